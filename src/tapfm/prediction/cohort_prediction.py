"""Predict slides: tile them, encode and aggregate the tiles, write probabilities, tile scores and pictures."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tapfm.errors import InputError, RunError, SlidesFailedError
from tapfm.inference.bags import SlideFailed
from tapfm.inference.loading import InferenceOptions, load_with_encoder, prepare_models
from tapfm.inference.precision import choose_inference_precision
from tapfm.inference.predictor import EncodedSlide, Predictor, SlideOutput
from tapfm.inference.slide_bags import make_bags
from tapfm.prediction.calls import CallThresholds, choose_calls
from tapfm.prediction.drawing import PictureOptions, draw_slides
from tapfm.prediction.folder import ABOUT, SLIDE, PredictedSlide, PredictionFolder
from tapfm.prediction.inputs import RequestedSlides, TiledSlides, find_or_make_tiles, read_sources
from tapfm.prediction.tables import read_failures, write_failures, write_predictions_table
from tapfm.prediction.tile_table import NAME as TILES
from tapfm.prediction.tile_table import TileTable, write_tile_table
from tapfm.prediction.validity import is_predicted, prediction_key
from tapfm.runs.data import RunSlide
from tapfm.runs.model import SlideModel
from tapfm.runs.model_folder import ModelFolder, ModelMember, description_of, is_finished, open_model_folder
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import FAILURES, Failure, attempt
from tapfm.runtime.devices import choose_device
from tapfm.runtime.files import write_atomically
from tapfm.runtime.interrupts import StopRequests
from tapfm.runtime.messages import counted
from tapfm.runtime.output_folder import locked, refuse_other_files, remove_unfinished
from tapfm.runtime.progress import SlideProgress
from tapfm.runtime.workers import WorkerPool, serve_function
from tapfm.slides.opening import PER_SLIDE, open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import SlideFacts
from tapfm.tiles.cohort_tiling import run_tiling_job
from tapfm.tiles.stream import serve_pieces

_TILES = "tiles"  # folder of the tiles that are made here
_IDENTITY = ("members", "targets", "calls", "precision")  # what all slides of a folder share
_AHEAD_BYTES = 2**28  # pixels read ahead: some hundred tiles keep any encoder busy


@dataclass(frozen=True)
class Predictions:
    """The result of predicting slides."""

    folder: PredictionFolder
    slides: tuple[PredictedSlide, ...]  # the requested ones that are predicted
    failed: Mapping[str, Failure]  # those that are not


def predict_slides(
    path: Path,
    sources: Sequence[Path],
    out: Path,
    *,
    slides: Path | None = None,
    tiles: Path | None = None,
    split: str | None = None,
    pictures: PictureOptions | None = None,
    batch: int | None = None,
    sensitivity: float | None = None,
    device: str = "auto",
    precision: str = "auto",
    compiled: bool | None = None,
    workers: int,
    resume: bool = False,
    console: Console,
) -> Predictions:
    """Predict slides with a run, an export or an ensemble. Raises `Interrupted` when a signal asked it to stop."""
    folder = PredictionFolder(out)
    # Workers start, and weights are loaded, while slides are tiled; not for --resume, which may have nothing to do.
    early = 0 if resume else workers
    with (
        closing(
            WorkerPool(min(1, early) if tiles is None else 0, serve_function, attempt(run_tiling_job))
        ) as tiling_workers,
        closing(WorkerPool(early, serve_pieces)) as reading_workers,
        ThreadPoolExecutor(1, "weights") as thread,
    ):
        evaluated = open_model_folder(path)
        requested = read_sources(sources, slides, evaluated.targets, split)
        calls = choose_calls(evaluated, sensitivity)
        options = InferenceOptions(choose_device(device), workers, batch, precision, compiled)
        choose_inference_precision(precision, options.device)  # refused before any work
        with locked(out, "tapfm predict"), SlideClaims(out) as claims:
            _start_folder(folder, _describe(evaluated, calls, sensitivity, precision), resume=resume)
            _print_start(evaluated, requested, calls, console)
            loading = None
            if len(requested.slides) > max(1, workers):
                reading_workers.close()  # tiling many slides takes long: do not hold memory meanwhile
            elif not resume:
                loading = thread.submit(_load_members, evaluated, options.device)
            tiled = find_or_make_tiles(
                requested, evaluated, tiles, out / _TILES, workers=workers, pool=tiling_workers, console=console
            )
            failed = dict(tiled.failed)
            try:
                job = _PredictionJob(evaluated, tiled, folder, calls, options, claims, console, failed)
                job.run(loading, reading_workers)
                done = [slide.row.slide_id for slide in tiled.slides if slide.row.slide_id not in failed]
                failed |= draw_slides(
                    folder, done, pictures or PictureOptions(), workers=workers, claims=claims, console=console
                )
            finally:  # also when stopped
                _write_tables(folder, requested, failed)
    predicted = [PredictedSlide.read(folder.folder_of(slide_id)) for slide_id in done]
    if not predicted:
        raise _none_left(folder, failed)
    return Predictions(folder, tuple(predicted), failed)


@dataclass(frozen=True)
class _PredictionJob:
    """The prediction of tiled slides; `failed` gets each failure when it happens."""

    evaluated: ModelFolder
    tiled: TiledSlides
    folder: PredictionFolder
    calls: CallThresholds
    options: InferenceOptions
    claims: SlideClaims
    console: Console
    failed: dict[str, Failure]

    def run(self, loading: Future[list[SlideModel]] | None, reading_workers: WorkerPool) -> None:
        """Predict the slides that are not finished."""
        by_id = {slide.row.slide_id: slide for slide in self.tiled.slides}
        keys = {slide_id: prediction_key(self.evaluated, slide) for slide_id, slide in by_id.items()}
        todo = {
            slide_id: slide
            for slide_id, slide in by_id.items()
            if not is_predicted(self.folder, slide, keys[slide_id], self.calls)
        }
        if len(todo) < len(by_id):
            self.console.print(f"{len(by_id) - len(todo):,} of {len(by_id):,} slides are already predicted.")
        if not todo:
            return
        slides, options = list(todo.values()), self.options
        tiles = sum(len(slide.tiles or ()) for slide in slides)
        with (
            StopRequests(self.console.print) as stop,
            SlideProgress(self.console, "predicting", slides=len(todo), tiles=tiles) as progress,
        ):
            predictor = Predictor(
                prepare_models(self.evaluated, slides, options, self.console, loading),
                batch=options.batch,
                on_tiles=progress.add_tiles,
                on_retry=progress.print,
            )
            bags = make_bags(
                slides,
                tile_px=predictor.tile_px,
                device=options.device,
                workers=options.workers,
                ahead_bytes=_AHEAD_BYTES,
                pool=reading_workers,
            )
            start = time.monotonic()

            def finish(slide_id: str, encoded: EncodedSlide) -> None:
                output = predictor.predict(slide_id, encoded)
                assert predictor.tile_px is not None
                own = self.folder.folder_of(slide_id)
                write_slide(todo[slide_id], encoded, output, predictor.tile_px, own, self.calls, keys[slide_id], start)

            def after_slide(slide_id: str, result: EncodedSlide | SlideFailed) -> None:
                nonlocal start
                failure = ""
                if isinstance(result, SlideFailed):
                    failure, hint = result.reason, result.hint or "Copy it again, or predict the others without it."
                    self.failed[slide_id] = Failure(failure, hint, stage=result.stage)
                self.claims.release(slide_id)
                progress.finish_slide(slide_id, tiles=len(todo[slide_id].tiles or ()), failure=failure)
                start = time.monotonic()

            try:
                ids = self.claims.take_each(todo)
                predictor.run(ids, bags, finish, on_slide=after_slide, stop_signal=stop.signal_number)
            except OSError as error:
                raise InputError(
                    f"Predictions cannot be written ({error}).",
                    hint="Make the folder writable, then resume: the same command with --resume",
                ) from error


def _describe(
    evaluated: ModelFolder, calls: CallThresholds, sensitivity: float | None, precision: str
) -> dict[str, Any]:
    """Return what predicts; the same for the same model. Only float8 differs by more than rounding, so it is noted."""
    aggregators = sorted({_aggregator_name(member) for member in evaluated.members})
    return {
        **evaluated.described(),
        "encoder": ", ".join(sorted({member.encoder for member in evaluated.members})),
        "aggregator": ", ".join(aggregators),
        "calls": {"thresholds": dict(calls.thresholds), "by": calls.where, "sensitivity": sensitivity},
        **({"precision": precision} if precision == "float8" else {}),
    }


def _aggregator_name(member: ModelMember) -> str:
    if member.config is not None:
        return member.config.aggregator.name
    return str(description_of(member.folder)["aggregator"]["name"])


def _start_folder(folder: PredictionFolder, about: dict[str, Any], *, resume: bool) -> None:
    """Mark the folder; refuse to overwrite predictions, or to mix them with those of another model."""
    path = folder.path
    if folder.begun and any(path.glob(f"{PER_SLIDE}/*/{SLIDE}")):
        before = folder.about()
        if not resume:
            raise RunError(
                f"{path} holds predictions of {before.get('model', 'something')}.",
                hint="Resume, or add slides or pictures: the same command with --resume\nOr give a new --out.",
            )
        was, now = _identity(before), _identity(about)
        if changed := [name for name in _IDENTITY if was[name] != now[name]]:
            raise RunError(
                f"{path} holds predictions of {before.get('model')}, with other {' and '.join(changed)}: "
                f"{json.dumps(was[changed[0]])}, now {json.dumps(now[changed[0]])}.",
                hint="Give a new --out.",
            )
    elif not folder.begun:
        refuse_other_files(path, hint="Give a new folder with --out, such as predicted.")
    remove_unfinished(path)
    write_atomically(path / ABOUT, (json.dumps(about, indent=2) + "\n").encode())


def _identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all slides of a folder share; the explanation of calls may change, as it contains paths."""
    calls = {name: value for name, value in dict(about.get("calls") or {}).items() if name != "by"}
    return {name: about.get(name) for name in _IDENTITY} | {"calls": calls}


def _print_start(evaluated: ModelFolder, requested: RequestedSlides, calls: CallThresholds, console: Console) -> None:
    members = f" ({counted(len(evaluated.members), 'member')})" if evaluated.ensemble else ""
    said = f"{', '.join(evaluated.targets)} of {counted(len(requested.slides), 'slide')} by the {evaluated.kind} "
    console.print(f"{said}{evaluated.path}{members}. Calls: {calls.where}.", markup=False, soft_wrap=True)
    unfinished = [
        f"{member.folder} is not finished: this is the best of its epochs so far."
        for member in evaluated.members
        if not is_finished(member)
    ]
    for note in (*unfinished, *requested.notes):
        console.print(note, style="bold yellow", markup=False, soft_wrap=True)


def _load_members(evaluated: ModelFolder, device: torch.device) -> list[SlideModel]:
    return [load_with_encoder(member, device) for member in evaluated.members]


def _write_tables(folder: PredictionFolder, requested: RequestedSlides, failed: Mapping[str, Failure]) -> None:
    """Write the tables of all slides in the folder: first the requested ones, in their order."""
    order = {slide.row.slide_id: number for number, slide in enumerate(requested.slides)}
    slides = sorted(folder.slides(), key=lambda slide: order.get(slide.slide_id, len(order)))
    before = read_failures(folder.path)
    done = {slide.slide_id for slide in slides}
    others = {slide_id: each for slide_id, each in before.items() if slide_id not in order and slide_id not in done}
    write_predictions_table(folder.path, slides)
    write_failures(folder.path, {**failed, **others}, slides)


def _none_left(folder: PredictionFolder, failed: Mapping[str, Failure]) -> SlidesFailedError:
    slide_id, why = next(iter(failed.items()))
    return SlidesFailedError(
        f"None of {counted(len(failed), 'slide')} could be predicted, such as {slide_id}: {why.reason}",
        hint=f"{why.what_to_do}\nAll reasons: {folder.path / FAILURES}".strip(),
    )


def write_slide(
    slide: RunSlide,
    encoded: EncodedSlide,
    output: SlideOutput,
    tile_px: int,
    folder: Path,
    calls: CallThresholds,
    key: str,
    start: float,
) -> None:
    """Write the files of a slide; slide.json last, as it marks the others as complete.

    tile_px: side of the tiles that the encoder took. start: time.monotonic() at the start of the slide.
    """
    assert slide.tiles is not None
    with closing(open_slide(slide.row.path)) as opened:
        facts = opened.facts
    _refuse_tiles_of_another(slide, facts)
    mpp = slide.tiles.slide_mpp or resolve_scale(facts, slide.row.mpp).mpp
    shutil.rmtree(folder, ignore_errors=True)  # what other weights or tiles made, pictures too
    write_tile_table(folder / TILES, TileTable(slide.tiles.positions[encoded.rows], output.columns))
    PredictedSlide(
        slide_id=slide.row.slide_id,
        patient_id=slide.row.patient_id,
        cohort=slide.row.cohort,
        split=slide.split or None,
        path=slide.row.path.absolute(),
        width_px0=facts.width_px0,
        height_px0=facts.height_px0,
        bounds=facts.bounds,
        mpp=mpp,
        side_px0=slide.tiles.side_px0,
        tile_px=tile_px,
        columns=tuple(output.columns),
        targets=calls.predictions(output, slide.labels),
        tiles=encoded.tiles,
        tiles_failed=len(encoded.missing),
        seconds=round(time.monotonic() - start, 2),
        key=key,
    ).write(folder)


def _refuse_tiles_of_another(slide: RunSlide, facts: SlideFacts) -> None:
    """Refuse tiles of another slide: beyond the edge of this one there is nothing to read."""
    assert slide.tiles is not None
    found, tiled_size = (facts.width_px0, facts.height_px0), slide.tiles.size_px0
    if tiled_size not in (None, found) or ((slide.tiles.positions < 0) | (slide.tiles.positions >= found)).any():
        wide = "" if tiled_size in (None, found) else f" of {tiled_size[0]:,} x {tiled_size[1]:,} pixels"
        raise InputError(
            f"{slide.row.path} has {found[0]:,} x {found[1]:,} pixels, and its tiles are of another slide{wide}.",
            hint="Tile it again with tapfm tile, or leave --tiles out.",
        )
