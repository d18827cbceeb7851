"""`tapfm predict`: slides to probabilities, tables of tiles and pictures; each slide is done for itself."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tapfm.encoders.features import FEATURES_VERSION
from tapfm.errors import InputError, RunError, SlidesFailedError
from tapfm.inference.bags import SlideFailed
from tapfm.inference.loading import InferenceOptions, load_with_encoder, prepare_models
from tapfm.inference.precision import choose_inference_precision
from tapfm.inference.predictor import EncodedSlide, Predictor, SlideOutput
from tapfm.inference.slide_bags import make_bags
from tapfm.metrics.arrays import sigmoid
from tapfm.prediction.drawing import Wishes, draw_slides
from tapfm.prediction.folder import ABOUT, SLIDE, TABLE, PredictedSlide, PredictionFolder, Said
from tapfm.prediction.inputs import Asked, Laid, lay_tiles, read_sources
from tapfm.prediction.tables import Failed, failures_csv, predictions_csv, read_failures
from tapfm.prediction.tile_table import NAME as TILES
from tapfm.prediction.tile_table import TileTable, write_tile_table
from tapfm.runs.data import SlideOfRun
from tapfm.runs.model import SlideModel
from tapfm.runs.model_folder import Evaluated, Member, description_of, finished, look_at
from tapfm.runs.thresholds import EXPORTED_SENSITIVITY, thresholds_of
from tapfm.runtime.devices import choose_device
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.interrupts import StopRequests
from tapfm.runtime.messages import command, counted, grouped_advice
from tapfm.runtime.output_folder import locked, remove_unfinished
from tapfm.runtime.progress import TileCounter
from tapfm.runtime.workers import Crew, answer_items
from tapfm.slides.opening import PER_SLIDE, open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import SlideFacts
from tapfm.tiles.cohort_tiling import tile_one
from tapfm.tiles.stream import serve_pieces

COMMAND = "tapfm predict"
LAID = "tiles"  # folder of the tiles that are laid here
IDENTITY = ("members", "targets", "calls", "precision")  # what all slides of a folder share
SHOWN = 20  # slides in the table on the terminal
AHEAD_BYTES = 2**28  # pixels read ahead: some hundred tiles keep any encoder busy


@dataclass(frozen=True)
class Predicted:
    """What came of it."""

    folder: PredictionFolder
    slides: tuple[PredictedSlide, ...]  # those that were asked for, and are done
    failed: Mapping[str, Failed]  # and those that are not


@dataclass(frozen=True)
class Calls:
    """By which probability a target is called positive; None where validation gave no such."""

    thresholds: Mapping[str, float | None]
    where: str

    def said(self, output: SlideOutput, labels: Mapping[str, int | None]) -> dict[str, Said]:
        """Put what the model says of a slide into words: probabilities and calls."""
        return {
            target: self.of(target, logit, output.constants[target], labels.get(target))
            for target, logit in output.logits.items()
        }

    def of(self, target: str, logit: float, constant: float | None, label: int | None) -> Said:
        """Call one target."""
        threshold, probability = self.thresholds.get(target), sigmoid(logit)
        call = None if threshold is None else int(probability >= threshold)
        return Said(logit, probability, threshold, call, label, constant)


def predict(
    path: Path,
    sources: Sequence[Path],
    out: Path,
    *,
    slides: Path | None = None,
    tiles: Path | None = None,
    split: str | None = None,
    wishes: Wishes | None = None,
    batch: int | None = None,
    sensitivity: float | None = None,
    device: str = "auto",
    precision: str = "auto",
    compiled: bool | None = None,
    workers: int,
    resume: bool = False,
    console: Console,
) -> Predicted:
    """Predict slides with a run, an export or an ensemble. Raises `Interrupted` when a signal asked it to stop."""
    folder = PredictionFolder(out)
    # Workers start, and weights are loaded, while slides are tiled; not for --resume, which may have nothing to do.
    with (
        closing(Crew(1 if tiles is None and not resume else 0, answer_items, tile_one)) as tiling_workers,
        closing(Crew(0 if resume else workers, serve_pieces)) as reading_workers,
        ThreadPoolExecutor(1, "weights") as thread,
    ):
        evaluated = look_at(path)
        asked = read_sources(sources, slides, evaluated.targets, split)
        calls = calls_of(evaluated, sensitivity)
        options = InferenceOptions(choose_device(device), workers, batch, precision, compiled)
        choose_inference_precision(precision, options.device)  # refused before any work
        with locked(out, COMMAND):
            begin(folder, about_of(evaluated, calls, sensitivity, precision), resume=resume)
            say_what_begins(evaluated, asked, calls, console)
            loading = None
            if len(asked.slides) > max(1, workers):
                reading_workers.close()  # tiling many slides takes long: do not hold memory meanwhile
            elif not resume:
                loading = thread.submit(load_members_with_encoder, evaluated, options.device)
            laid = lay_tiles(asked, evaluated, tiles, out / LAID, workers=workers, crew=tiling_workers, console=console)
            failed = {slide_id: Failed("tiles", *why) for slide_id, why in laid.failed.items()}
            try:
                predict_slides(evaluated, laid, folder, calls, options, loading, reading_workers, console, failed)
                done = [slide for slide in laid.slides if slide.row.slide_id not in failed]
                drawn = [slide.row.slide_id for slide in done]
                failed |= draw_slides(folder, drawn, wishes or Wishes(), workers, console)
            finally:  # also when stopped
                write_tables(folder, asked, failed)
    predicted = [PredictedSlide.read(folder.folder_of(slide.row.slide_id)) for slide in done]
    if not predicted:
        raise none_left(folder, failed)
    return Predicted(folder, tuple(predicted), failed)


def calls_of(evaluated: Evaluated, sensitivity: float | None) -> Calls:
    """Take the thresholds that validation slides gave: Youden's, or that which reaches a sensitivity."""
    chosen = thresholds_of(evaluated, "slide", EXPORTED_SENSITIVITY if sensitivity is None else sensitivity)
    if chosen.thresholds is None:
        return Calls({}, f"no calls, as {chosen.where}")
    if sensitivity is None:
        return Calls(dict(chosen.thresholds.youden), f"Youden's thresholds of {chosen.where}")
    if chosen.why_none_at_sensitivity:
        raise InputError(
            f"There is no threshold for a sensitivity of {sensitivity:g}: {chosen.why_none_at_sensitivity}.",
            hint="Leave --sensitivity out, or predict with the run itself.",
        )
    return Calls(dict(chosen.thresholds.chosen), f"a sensitivity of {sensitivity:g} on {chosen.where}")


def about_of(evaluated: Evaluated, calls: Calls, sensitivity: float | None, precision: str = "auto") -> dict[str, Any]:
    """Say what predicts; the same model gives the same text. Other precisions than float8 differ in the last digits."""
    aggregators = sorted({aggregator_of(member) for member in evaluated.members})
    return {
        **evaluated.described(),
        "encoder": ", ".join(sorted({member.encoder for member in evaluated.members})),
        "aggregator": ", ".join(aggregators),
        "calls": {"thresholds": dict(calls.thresholds), "by": calls.where, "sensitivity": sensitivity},
        **({"precision": precision} if precision == "float8" else {}),
    }


def aggregator_of(member: Member) -> str:
    """Name the aggregator of a run, or of an export."""
    if member.config is not None:
        return member.config.aggregator.name
    return str(description_of(member.folder)["aggregator"]["name"])


def begin(folder: PredictionFolder, about: dict[str, Any], *, resume: bool) -> None:
    """Mark the folder; keep predictions from being written over, or mixed with those of another model."""
    path = folder.path
    if folder.begun and any(path.glob(f"{PER_SLIDE}/*/{SLIDE}")):
        before = folder.about()
        if not resume:
            raise RunError(
                f"{path} holds predictions of {before.get('model', 'something')}.",
                hint="Go on with them, or add slides or pictures: the same command with --resume\nOr give a new --out.",
            )
        was, now = identity(before), identity(about)
        if changed := [name for name in IDENTITY if was[name] != now[name]]:
            raise RunError(
                f"{path} holds predictions of {before.get('model')}, with other {' and '.join(changed)}: "
                f"{json.dumps(was[changed[0]])}, now {json.dumps(now[changed[0]])}.",
                hint="Give a new --out.",
            )
    elif not folder.begun and (others := sorted(each.name for each in path.glob("[!.]*"))):
        raise RunError(
            f"{path} has other files in it, such as {others[0]}.",
            hint="Give a new folder with --out, such as predicted.",
        )
    remove_unfinished(path)
    write_atomically(path / ABOUT, (json.dumps(about, indent=2) + "\n").encode())


def identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """Take what all slides of a folder share; by which words calls are explained may change, as paths do."""
    calls = {name: value for name, value in dict(about.get("calls") or {}).items() if name != "by"}
    return {name: about.get(name) for name in IDENTITY} | {"calls": calls}


def say_what_begins(evaluated: Evaluated, asked: Asked, calls: Calls, console: Console) -> None:
    """Tell what is about to be predicted by what."""
    members = f" ({counted(len(evaluated.members), 'member')})" if evaluated.ensemble else ""
    said = f"{', '.join(evaluated.targets)} of {counted(len(asked.slides), 'slide')} by the {evaluated.kind} "
    console.print(f"{said}{evaluated.path}{members}. Calls: {calls.where}.", markup=False, soft_wrap=True)
    unfinished = [
        f"{member.folder} is not finished: this is the best of its epochs so far."
        for member in evaluated.members
        if not finished(member)
    ]
    for note in (*unfinished, *asked.notes):
        console.print(note, style="bold yellow", markup=False, soft_wrap=True)


def predict_slides(
    evaluated: Evaluated,
    laid: Laid,
    folder: PredictionFolder,
    calls: Calls,
    options: InferenceOptions,
    loading: Future[list[SlideModel]] | None,
    reading_workers: Crew,
    console: Console,
    failed: dict[str, Failed],
) -> None:
    """Predict the slides that are not finished; `failed` gets each failure when it happens."""
    by_id = {slide.row.slide_id: slide for slide in laid.slides}
    keys = {slide_id: key_of(evaluated, slide) for slide_id, slide in by_id.items()}
    todo = [slide for slide_id, slide in by_id.items() if not kept(folder, slide, keys[slide_id], calls)]
    if len(todo) < len(by_id):
        console.print(f"{len(by_id) - len(todo):,} of {len(by_id):,} slides are predicted already.")
    if not todo:
        return
    tiles = sum(len(slide.tiles) for slide in todo if slide.tiles is not None)
    with StopRequests(console.print) as stop, closing(TileCounter(console, len(todo), tiles)) as counter:
        predictor = Predictor(
            prepare_models(evaluated, todo, options, console, loading),
            batch=options.batch,
            on_tiles=counter.more_tiles,
            on_retry=console.print,
        )
        bags = make_bags(
            todo,
            tile_px=predictor.tile_px,
            device=options.device,
            workers=options.workers,
            ahead_bytes=AHEAD_BYTES,
            crew=reading_workers,
        )
        start = time.monotonic()

        def finish(slide_id: str, encoded: EncodedSlide) -> None:
            output = predictor.predict(slide_id, encoded)
            write_slide(
                by_id[slide_id], encoded, output, predictor, folder.folder_of(slide_id), calls, keys[slide_id], start
            )

        def after_slide(slide_id: str, result: EncodedSlide | SlideFailed) -> None:
            nonlocal start
            if isinstance(result, SlideFailed):
                hint = result.hint or "Copy it again, or predict the others without it."
                failed[slide_id] = Failed(result.stage, result.reason, hint)
                counter.failed(slide_id, result.reason)
            counter.one_more_slide(len(by_id[slide_id].tiles or ()))
            start = time.monotonic()

        try:
            predictor.run(
                [slide.row.slide_id for slide in todo], bags, finish, on_slide=after_slide, stop_signal=stop.asked
            )
        except OSError as error:
            raise InputError(
                f"Predictions cannot be written ({error}).",
                hint="Make the folder writable, then resume: the same command with --resume",
            ) from error


def load_members_with_encoder(evaluated: Evaluated, device: torch.device) -> list[SlideModel]:
    """Load the weights of all members."""
    return [load_with_encoder(member, device) for member in evaluated.members]


def write_slide(
    slide: SlideOfRun,
    encoded: EncodedSlide,
    output: SlideOutput,
    predictor: Predictor,
    folder: Path,
    calls: Calls,
    key: str,
    start: float,
) -> None:
    """Write the files of a slide; slide.json last, as it marks the others as complete."""
    assert slide.tiles is not None
    assert predictor.tile_px is not None
    with closing(open_slide(slide.row.path)) as opened:
        facts = opened.facts
    refuse_tiles_of_another(slide, facts)
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
        tile_px=predictor.tile_px,
        columns=tuple(output.columns),
        targets=calls.said(output, slide.labels),
        tiles=encoded.tiles,
        tiles_failed=len(encoded.missing),
        seconds=round(time.monotonic() - start, 2),
        key=key,
    ).write(folder)


def refuse_tiles_of_another(slide: SlideOfRun, facts: SlideFacts) -> None:
    """Fail a slide whose tiles were laid on another one: beyond its edge there is only paper to read."""
    assert slide.tiles is not None
    found, laid_on = (facts.width_px0, facts.height_px0), slide.tiles.size_px0
    if laid_on not in (None, found) or ((slide.tiles.positions < 0) | (slide.tiles.positions >= found)).any():
        wide = "" if laid_on in (None, found) else f" of {laid_on[0]:,} x {laid_on[1]:,} pixels"
        raise InputError(
            f"{slide.row.path} has {found[0]:,} x {found[1]:,} pixels, and its tiles are of another slide{wide}.",
            hint="Lay them again: tapfm tile; or leave --tiles out.",
        )


def key_of(evaluated: Evaluated, slide: SlideOfRun) -> str:
    """Return the key of a prediction: it covers weights, tiles and code, then the slide's files if they exist."""
    weights = [member.digest for member in evaluated.members]
    return fingerprint(weights, slide.content_digest, FEATURES_VERSION)[:16] + (slide.files_digest or "")


def kept(folder: PredictionFolder, slide: SlideOfRun, key: str, calls: Calls) -> bool:
    """Say whether a slide is done, with these weights and tiles; what the table says of it may have changed.

    One whose files are gone, or not at hand, stays what it was.
    """
    own = folder.folder_of(slide.row.slide_id)
    if not (own / SLIDE).exists() or not (own / TILES).exists():
        return False
    try:
        before = PredictedSlide.read(own)
    except InputError:
        return False
    if not before.key.startswith(key):
        return False
    said = {
        target: calls.of(target, each.logit, each.constant, slide.labels.get(target))
        for target, each in before.targets.items()
    }
    row = slide.row
    now = replace(
        before,
        patient_id=row.patient_id,
        cohort=row.cohort,
        split=slide.split or None,
        path=row.path.absolute(),
        targets=said,
    )
    if now != before:
        now.write(own)
    return True


def write_tables(folder: PredictionFolder, asked: Asked, failed: Mapping[str, Failed]) -> None:
    """Write the tables of all slides in the folder: those of this command as they were named, then earlier ones."""
    order = {slide.row.slide_id: number for number, slide in enumerate(asked.slides)}
    slides = sorted(folder.slides(), key=lambda slide: order.get(slide.slide_id, len(order)))
    before = read_failures(folder.path)
    done = {slide.slide_id for slide in slides}
    others = {slide_id: each for slide_id, each in before.items() if slide_id not in order and slide_id not in done}
    write_atomically(folder.path / TABLE, predictions_csv(slides))
    write_atomically(folder.path / "failures.csv", failures_csv({**failed, **others}, slides))


def none_left(folder: PredictionFolder, failed: Mapping[str, Failed]) -> SlidesFailedError:
    """Make the error for slides all of which failed."""
    slide_id, why = next(iter(failed.items()))
    return SlidesFailedError(
        f"None of {counted(len(failed), 'slide')} could be predicted, such as {slide_id}: {why.reason}",
        hint=f"{why.what_to_do}\nAll reasons: {folder.path / 'failures.csv'}".strip(),
    )


def show(predicted: Predicted, console: Console, messages: Console) -> None:
    """Print what was predicted, and say where to look and what to type next."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, side in (("slide", "left"), ("target", "left"), ("probability", "right"), ("call", "left")):
        table.add_column(name, justify="right" if side == "right" else "left")
    table.add_column("tiles", justify="right")
    table.add_column("seconds", justify="right")
    for slide in predicted.slides[:SHOWN]:
        for number, (target, said) in enumerate(slide.targets.items()):
            call = "-" if said.call is None else "positive" if said.call else "negative"
            about = (slide.slide_id, f"{slide.tiles:,}", f"{slide.seconds:.1f}") if number == 0 else ("", "", "")
            table.add_row(Text(about[0]), Text(target), f"{said.probability:.3f}", call, about[1], about[2])
    console.print(table)
    if len(predicted.slides) > SHOWN:
        console.print(f"... and {len(predicted.slides) - SHOWN:,} more")
    folder = predicted.folder.path
    messages.print(
        f"Predicted {counted(len(predicted.slides), 'slide')}: {folder / TABLE}", markup=False, soft_wrap=True
    )
    if predicted.failed:
        messages.print(
            f"{counted(len(predicted.failed), 'slide')} failed: {folder / 'failures.csv'}", markup=False, soft_wrap=True
        )
        for line in grouped_advice((slide_id, each.what_to_do) for slide_id, each in predicted.failed.items()):
            messages.print(f"  {line}", markup=False, soft_wrap=True)
    messages.print(f"Next, look at them: {command('view', folder)}", markup=False, soft_wrap=True)
