"""Predict slides: tile them, encode and aggregate the tiles, and write probabilities, tile scores and heatmaps."""

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

from tapfm.cohort.table_options import DEFAULT_TABLE_OPTIONS, TableOptions
from tapfm.errors import InputError, RunError, SlidesFailedError
from tapfm.inference.bags import SlideFailed
from tapfm.inference.loading import InferenceOptions, load_with_encoder, prepare_models
from tapfm.inference.precision import choose_inference_precision
from tapfm.inference.predictor import EncodedSlide, Predictor, SlideOutput
from tapfm.inference.slide_bags import make_bags
from tapfm.prediction.calls import CallThresholds, choose_call_thresholds
from tapfm.prediction.csv_tables import read_failures, write_failures, write_predictions_table
from tapfm.prediction.drawing import OutputOptions, draw_slides
from tapfm.prediction.folder import PREDICTION_JSON, SLIDE_JSON, PredictedSlide, PredictionFolder
from tapfm.prediction.inputs import (
    RequestedSlides,
    TiledSlides,
    adapt_hint,
    describe_mpp_option,
    find_or_create_tiles,
    read_sources,
)
from tapfm.prediction.tile_table import TILES_PARQUET, TileTable, write_tile_table
from tapfm.prediction.validity import prediction_key, reuse_prediction
from tapfm.runs.data import RunSlide
from tapfm.runs.model import SlideModel
from tapfm.runs.model_folder import ModelFolder, ModelMember, is_finished, open_model_folder, read_export_metadata
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import FAILURES_FILE, Failure, catch_failures
from tapfm.runtime.devices import choose_device
from tapfm.runtime.files import write_atomically
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.messages import format_count
from tapfm.runtime.output_folder import check_no_other_files, lock_folder, remove_unfinished_files
from tapfm.runtime.progress import SlideProgress
from tapfm.runtime.workers import WorkerPool, serve_function
from tapfm.slides.opening import PER_SLIDE, open_slide
from tapfm.slides.scale import MPP_OPTION, resolve_scale
from tapfm.slides.slide import SlideMetadata
from tapfm.tasks.catalog import class_texts
from tapfm.tiles.cohort_tiling import run_tiling_job
from tapfm.tiles.stream import serve_requests

_TILES_FOLDER = "tiles"  # tiles that this command created
_SHARED_KEYS = ("members", "targets", "calls", "precision")  # in prediction.json; equal for all slides of a folder
_PREFETCH_BYTES = 2**28  # of pixels: about 1,800 tiles of 224 px, enough to keep any encoder busy


@dataclass(frozen=True)
class Predictions:
    """Result of predicting slides."""

    folder: PredictionFolder
    slides: tuple[PredictedSlide, ...]  # requested slides that were predicted
    failed: Mapping[str, Failure]  # requested slides that failed, also those predicted but not drawn


def predict_slides(
    model_path: Path,
    sources: Sequence[Path],
    out: Path,
    *,
    table_options: TableOptions = DEFAULT_TABLE_OPTIONS,
    tiles: Path | None = None,
    mpp: float | None = None,
    split: str | None = None,
    outputs: OutputOptions | None = None,
    batch: int | None = None,
    sensitivity: float | None = None,
    device: str = "auto",
    precision: str = "auto",
    compiled: bool | None = None,
    workers: int,
    resume: bool = False,
    console: Console,
) -> Predictions:
    """Predict slides with a run, an export or an ensemble. Raises `Interrupted` after a stop signal.

    mpp: microns per pixel of slides without a usable scale.
    """
    folder = PredictionFolder(out)
    # Start workers and load weights while slides are tiled, but not with --resume: there may be nothing to predict.
    early_workers = 0 if resume else workers
    with (
        closing(
            WorkerPool(min(1, early_workers) if tiles is None else 0, serve_function, catch_failures(run_tiling_job))
        ) as tiling_workers,
        closing(WorkerPool(early_workers, serve_requests)) as reading_workers,
        ThreadPoolExecutor(1, "weights") as thread,
    ):
        model_folder = open_model_folder(model_path)
        requested = read_sources(sources, table_options, model_folder.targets, split)
        calls = choose_call_thresholds(model_folder, sensitivity)
        options = InferenceOptions(choose_device(device), workers, batch, precision, compiled)
        choose_inference_precision(precision, options.device)  # raises before any work is done
        with lock_folder(out, "tapfm predict"), SlideClaims(out) as claims:
            metadata = _describe_prediction(model_folder, calls, sensitivity, precision, mpp)
            _prepare_folder(folder, metadata, resume=resume)
            _print_start(model_folder, requested, calls, console)
            loading = None
            if len(requested.slides) > max(1, workers):
                reading_workers.close()  # tiling many slides takes long: free the memory
            elif not resume:
                loading = thread.submit(_load_members, model_folder, options.device)
            tiled = find_or_create_tiles(
                requested,
                model_folder,
                tiles,
                out / _TILES_FOLDER,
                mpp=mpp,
                workers=workers,
                pool=tiling_workers,
                console=console,
            )
            failed = dict(tiled.failed)
            try:
                job = _PredictionJob(model_folder, tiled, folder, calls, mpp, options, claims, console, failed)
                job.run(loading, reading_workers)
                done = [slide.row.slide_id for slide in tiled.slides if slide.row.slide_id not in failed]
                failed |= draw_slides(
                    folder, done, outputs or OutputOptions(), workers=workers, claims=claims, console=console
                )
            finally:  # also when stopped
                _write_tables(folder, requested, failed)
    predicted = [PredictedSlide.read(folder.slide_folder(slide_id)) for slide_id in done]
    if not predicted:
        raise _make_no_prediction_error(folder, failed)
    if mpp is not None and tiles is not None:  # otherwise printed after tiling
        line = describe_mpp_option(mpp, [slide.mpp_source for slide in predicted])
        console.print(line, markup=False, soft_wrap=True)
    return Predictions(folder, tuple(predicted), failed)


@dataclass(frozen=True)
class _PredictionJob:
    """Prediction of tiled slides. Failures are added to `failed` as they happen."""

    model_folder: ModelFolder
    tiled: TiledSlides
    folder: PredictionFolder
    calls: CallThresholds
    mpp: float | None
    options: InferenceOptions
    claims: SlideClaims
    console: Console
    failed: dict[str, Failure]

    def run(self, loading: Future[list[SlideModel]] | None, reading_workers: WorkerPool) -> None:
        """Predict the slides that have no valid prediction yet."""
        by_id = {slide.row.slide_id: slide for slide in self.tiled.slides}
        keys = {slide_id: prediction_key(self.model_folder, slide) for slide_id, slide in by_id.items()}
        todo = {
            slide_id: slide
            for slide_id, slide in by_id.items()
            if not reuse_prediction(self.folder, slide, keys[slide_id], self.calls)
        }
        if len(todo) < len(by_id):
            self.console.print(f"{len(by_id) - len(todo):,} of {len(by_id):,} slides are already predicted.")
        if not todo:
            return
        slides, options = list(todo.values()), self.options
        tiles = sum(len(slide.tiles or ()) for slide in slides)
        with (
            StopSignalHandler(self.console.print) as stop,
            SlideProgress(self.console, "predicting", slides=len(todo), tiles=tiles) as progress,
        ):
            predictor = Predictor(
                prepare_models(self.model_folder, slides, options, self.console, loading),
                batch=options.batch,
                on_tiles=progress.add_tiles,
                on_retry=progress.print,
            )
            bags = make_bags(
                slides,
                tile_px=predictor.tile_px,
                device=options.device,
                workers=options.workers,
                prefetch_bytes=_PREFETCH_BYTES,
                pool=reading_workers,
            )
            start = time.monotonic()

            def finish(slide_id: str, encoded: EncodedSlide) -> None:
                output = predictor.predict(slide_id, encoded)
                assert predictor.tile_px is not None
                slide_folder = self.folder.slide_folder(slide_id)
                key = keys[slide_id]
                slide, tile_px = todo[slide_id], predictor.tile_px
                write_slide(slide, encoded, output, tile_px, slide_folder, self.calls, key, start, self.mpp)

            def after_slide(slide_id: str, result: EncodedSlide | SlideFailed) -> None:
                nonlocal start
                failure = ""
                if isinstance(result, SlideFailed):
                    failure = result.reason
                    hint = adapt_hint(result.hint, self.mpp) or "Copy the slide again, or exclude it."
                    self.failed[slide_id] = Failure(failure, hint, stage=result.stage)
                self.claims.release(slide_id)
                progress.finish_slide(slide_id, tiles=len(todo[slide_id].tiles or ()), failure=failure)
                start = time.monotonic()

            try:
                ids = self.claims.claim_each(todo)
                predictor.run(ids, bags, finish, on_slide=after_slide, stop_signal=stop.signal_number)
            except OSError as error:
                raise InputError(
                    f"Cannot write predictions to {self.folder.path} ({error}).",
                    hint="Make the folder writable, then run the same command with --resume.",
                ) from error


def _describe_prediction(
    model_folder: ModelFolder, calls: CallThresholds, sensitivity: float | None, precision: str, mpp: float | None
) -> dict[str, Any]:
    """Return the content of prediction.json. Precision is included only for float8, which changes results."""
    aggregators = sorted({_aggregator_name(member) for member in model_folder.members})
    return {
        **model_folder.build_identifying_metadata(),
        "encoder": ", ".join(sorted({member.encoder for member in model_folder.members})),
        "aggregator": ", ".join(aggregators),
        "calls": {"thresholds": dict(calls.thresholds), "by": calls.description, "sensitivity": sensitivity},
        **({"precision": precision} if precision == "float8" else {}),
        **({"mpp": mpp} if mpp is not None else {}),
    }


def _aggregator_name(member: ModelMember) -> str:
    if member.config is not None:
        return member.config.aggregator.name
    return str(read_export_metadata(member.folder)["aggregator"]["name"])


def _prepare_folder(folder: PredictionFolder, metadata: dict[str, Any], *, resume: bool) -> None:
    """Write prediction.json. Raises if this would overwrite predictions or mix different models or settings."""
    path = folder.path
    if folder.exists and any(path.glob(f"{PER_SLIDE}/*/{SLIDE_JSON}")):
        before = folder.read_metadata()
        if not resume:
            raise RunError(
                f"{path} already contains predictions of {before.get('model', 'a model')}.",
                hint="To resume, or to add slides or heatmaps, run the same command with --resume.\n"
                "Or pass a new folder to --out.",
            )
        was, now = _select_shared_values(before), _select_shared_values(metadata)
        if was["members"] != now["members"]:
            raise RunError(
                f"{path} contains predictions of another model or other weights: {before.get('model')} before, "
                f"{metadata['model']} now.",
                hint="Pass a new folder to --out.",
            )
        changed = [name for name in _SHARED_KEYS if was[name] != now[name]]
        # without --mpp before, slides that need it have failed, so there is nothing to mix
        changed += ["mpp"] if was["mpp"] is not None and was["mpp"] != now["mpp"] else []
        if changed:
            raise RunError(
                f"{path} contains predictions of {before.get('model')} with other settings:\n  "
                + "\n  ".join(
                    f"{name}: {json.dumps(was[name])} before, {json.dumps(now[name])} now" for name in changed
                ),
                hint="Pass the same options as before, or a new folder to --out.",
            )
    elif not folder.exists:
        check_no_other_files(path, hint="Pass a new folder to --out, such as predicted.")
    remove_unfinished_files(path)
    write_atomically(path / PREDICTION_JSON, (json.dumps(metadata, indent=2) + "\n").encode())


def _select_shared_values(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that must be equal for all slides of a folder; without `calls.by`, which may contain paths."""
    calls = {name: value for name, value in dict(metadata.get("calls") or {}).items() if name != "by"}
    return {name: metadata.get(name) for name in (*_SHARED_KEYS, "mpp")} | {"calls": calls}


def _print_start(
    model_folder: ModelFolder, requested: RequestedSlides, calls: CallThresholds, console: Console
) -> None:
    members = f" ({format_count(len(model_folder.members), 'member')})" if model_folder.ensemble else ""
    targets, slides = ", ".join(model_folder.targets), format_count(len(requested.slides), "slide")
    console.print(
        f"Predicting {targets} for {slides} with the {model_folder.kind} {model_folder.path}{members}. "
        f"Call thresholds: {calls.description}.",
        markup=False,
        soft_wrap=True,
    )
    unfinished = [
        f"The run {member.folder} is not finished. Its best epoch so far is used."
        for member in model_folder.members
        if not is_finished(member)
    ]
    for warning in (*unfinished, *requested.warnings):
        console.print(warning, style="bold yellow", markup=False, soft_wrap=True)


def _load_members(model_folder: ModelFolder, device: torch.device) -> list[SlideModel]:
    return [load_with_encoder(member, device) for member in model_folder.members]


def _write_tables(folder: PredictionFolder, requested: RequestedSlides, failed: Mapping[str, Failure]) -> None:
    """Write the CSV tables of all slides in the folder, the requested slides first."""
    order = {slide.row.slide_id: number for number, slide in enumerate(requested.slides)}
    slides = sorted(folder.slides(), key=lambda slide: order.get(slide.slide_id, len(order)))
    before = read_failures(folder.path)
    done = {slide.slide_id for slide in slides}
    others = {slide_id: each for slide_id, each in before.items() if slide_id not in order and slide_id not in done}
    write_predictions_table(folder.path, slides)
    write_failures(folder.path, {**failed, **others}, slides)


def _make_no_prediction_error(folder: PredictionFolder, failed: Mapping[str, Failure]) -> SlidesFailedError:
    slide_id, failure = next(iter(failed.items()))
    return SlidesFailedError(
        f"None of {format_count(len(failed), 'slide')} could be predicted. {slide_id}: {failure.reason}",
        hint=f"{failure.hint}\nAll reasons are in {folder.path / FAILURES_FILE}".strip(),
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
    mpp_option: float | None,
) -> None:
    """Write tiles.parquet, then slide.json, which marks the prediction as complete. Remove older files of the slide.

    tile_px: side of the encoder's input tiles. start: time.monotonic() at the start of the slide.
    """
    assert slide.tiles is not None
    with closing(open_slide(slide.row.path)) as opened:
        metadata = opened.metadata
    _check_tiles_match_slide(slide, metadata)
    if slide.tiles.slide_mpp is not None:
        mpp, mpp_source = slide.tiles.slide_mpp, (slide.tiles.summary or {}).get("mpp_source")
        if mpp_source == MPP_OPTION and mpp != mpp_option:  # --tiles of an earlier prediction with another --mpp
            mpp_source = "tiles"
    else:  # tiles of another tool
        scale = resolve_scale(metadata, slide.row.mpp, mpp_option)
        mpp, mpp_source = scale.mpp, scale.source
    shutil.rmtree(folder, ignore_errors=True)  # remove outputs of other weights or tiles, heatmaps included
    encoded_tiles = slide.tiles.select(encoded.rows)
    write_tile_table(folder / TILES_PARQUET, TileTable(encoded_tiles.positions, output.columns, encoded_tiles.padded))
    PredictedSlide(
        slide_id=slide.row.slide_id,
        patient_id=slide.row.patient_id,
        cohort=slide.row.cohort,
        split=slide.split or None,
        path=slide.row.path.absolute(),
        width_px0=metadata.width_px0,
        height_px0=metadata.height_px0,
        bounds=metadata.bounds,
        mpp=mpp,
        mpp_source=mpp_source,
        labels=class_texts(calls.targets),
        side_px0=slide.tiles.side_px0,
        tile_px=tile_px,
        columns=tuple(output.columns),
        targets=calls.predict_targets(output, slide.labels),
        tiles=encoded.tiles,
        tiles_failed=len(encoded.unreadable_tiles),
        seconds=round(time.monotonic() - start, 2),
        key=key,
    ).write(folder)


def _check_tiles_match_slide(slide: RunSlide, metadata: SlideMetadata) -> None:
    """Raise if the tiles belong to another slide."""
    assert slide.tiles is not None
    found, tiled_size = (metadata.width_px0, metadata.height_px0), slide.tiles.size_px0
    if tiled_size not in (None, found) or ((slide.tiles.positions < 0) | (slide.tiles.positions >= found)).any():
        tiled = "" if tiled_size in (None, found) else f" of {tiled_size[0]:,} x {tiled_size[1]:,} pixels"
        raise InputError(
            f"{slide.row.path} has {found[0]:,} x {found[1]:,} pixels, but its tiles belong to another slide{tiled}.",
            hint="Tile the slide again with tapfm tile, or omit --tiles.",
        )
