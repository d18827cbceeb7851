"""`tapfm embed`: features and raw attention of every tile of a cohort, in one file per slide."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tapfm.cohort.manifest import SlideRow
from tapfm.encoders.features import FeatureSet, recall, write_features
from tapfm.encoders.inference import prepare_encoder
from tapfm.errors import InputError
from tapfm.inference.bags import AHEAD_BYTES, PixelBags, SlideFailed, SlideTiles
from tapfm.inference.embedding_jobs import Job, Settings, make_job, outcome_before, refuse_foreign_files
from tapfm.inference.embedding_outcomes import Outcome, Report, failure, say_failed
from tapfm.inference.predictor import EncodedSlide, InferenceModel, Predictor
from tapfm.runtime.output_folder import GOES_ON, locked, remove_unfinished
from tapfm.runtime.progress import SAY_EVERY_S, progress_bar
from tapfm.tiles.cohort_tiling import number, records

SAVE_EVERY_S = 5.0  # the tables, during a run


def embed_cohort(
    rows: Sequence[SlideRow],
    tiles_folder: Path,
    folder: Path,
    settings: Settings,
    *,
    tile_command: str,
    only: Collection[str] | None,
    workers: int,
    force: bool,
    console: Console,
) -> Report:
    """Embed all slides (or those in `only`); those whose features were made from the same by the same are kept.

    `tile_command` is what to type for tiles that are missing.
    """
    refuse_foreign_files(folder, rows)
    card, encoder = settings.loaded.card, settings.loaded.encoder
    features = f"{encoder.feature_size:,} features, by {card.name} in {settings.precision}"
    report = Report(folder, [row.slide_id for row in rows], features)
    with locked(folder, "tapfm embed"):
        remove_unfinished(folder)
        seconds = {row["slide_id"]: number(row["seconds"]) for row in records(folder / "summary.csv", "seconds")}
        failures = {row["slide_id"]: row for row in records(folder / "failures.csv", "reason", "what_to_do")}
        todo = []
        for row in rows:
            slide_id = row.slide_id
            chosen = only is None or slide_id in only
            job = make_job(row, tiles_folder, folder, settings, tile_command)
            kept = outcome_before(job) if isinstance(job, Job) and not (chosen and force) else None
            if kept is not None:
                report.outcomes[slide_id] = replace(kept, seconds=seconds.get(slide_id))
            elif chosen and isinstance(job, Job):
                todo.append(job)
            elif chosen and isinstance(job, Outcome):
                report.outcomes[slide_id] = job
                say_failed(job, console)
            elif slide_id in failures:
                reason, what_to_do = (failures[slide_id][name] for name in ("reason", "what_to_do"))
                report.outcomes[slide_id] = failure(slide_id, reason, what_to_do)
            else:
                report.outcomes[slide_id] = Outcome(slide_id, "not embedded", "no features with these settings")
        if report.embedded:
            console.print(f"{len(report.embedded):,} of {len(rows):,} slides are embedded already with these settings.")
        for line in rescaled(todo, encoder.tile_px):
            console.print(line)
        try:
            try:
                run(todo, report, settings, workers, console)
            finally:
                report.save()
        except OSError as error:
            raise InputError(
                f"{folder} cannot be written to ({error}).",
                hint=f"Make room, or give another folder with --out. {GOES_ON}",
            ) from error
    return report


def run(jobs: Sequence[Job], report: Report, settings: Settings, workers: int, console: Console) -> None:
    """Embed the slides of the jobs and write their files."""
    if not jobs:
        return
    encoder, by_id = settings.loaded.encoder, {job.row.slide_id: job for job in jobs}
    tiles = sum(len(job.tiles) for job in jobs)
    prepared = prepare_encoder(encoder, settings.precision, tiles=tiles, compiled=settings.compiled)
    bags = PixelBags(
        {job.row.slide_id: SlideTiles(job.row.path, job.tiles) for job in jobs},
        tile_px=encoder.tile_px,
        device=encoder.mean.device,
        workers=workers,
        ahead_bytes=AHEAD_BYTES,
    )
    with progress_bar(console) as progress:
        embed_progress = EmbedProgress(jobs, bags, progress, console)
        predictor = Predictor(
            [InferenceModel(prepared, None)],
            batch=settings.batch,
            on_tiles=embed_progress.add_tiles,
            on_retry=progress.console.print,
        )
        slide_start = saved = time.monotonic()

        def after_slide(slide_id: str, result: EncodedSlide | SlideFailed) -> None:
            nonlocal slide_start, saved
            now = time.monotonic()
            outcome = replace(outcome_of(by_id[slide_id], result), seconds=round(now - slide_start, 2))
            report.outcomes[slide_id] = outcome
            embed_progress.add_slide(by_id[slide_id], outcome)
            slide_start = now
            if now - saved > SAVE_EVERY_S:
                report.save()
                saved = now

        predictor.run(
            list(by_id), bags, lambda slide_id, slide: write(by_id[slide_id], slide, settings), on_slide=after_slide
        )


def outcome_of(job: Job, result: EncodedSlide | SlideFailed) -> Outcome:
    """Return the outcome of a slide; where it failed, features of other settings are removed."""
    if not isinstance(result, SlideFailed):
        return Outcome(job.row.slide_id, "ok", tiles=result.tiles, tiles_failed=len(result.missing))
    if recall(job.path) != job.key:
        job.path.unlink(missing_ok=True)
    damaged = f"Copy it again from where it was scanned. See: tapfm inspect {shlex.quote(str(job.row.path))}"
    return failure(job.row.slide_id, result.reason, result.hint or damaged)


class EmbedProgress:
    """Progress of a cohort: a bar at a terminal, a line now and then elsewhere."""

    def __init__(self, jobs: Sequence[Job], bags: PixelBags, progress: Progress, console: Console) -> None:
        self._slides, self._tiles = len(jobs), sum(len(job.tiles) for job in jobs)
        self._bags, self._progress, self._console = bags, progress, console
        self._bar = progress.add_task("embedding", total=self._tiles, speed="")
        self._start = self._said = time.monotonic()
        self._slides_done = self._slides_failed = 0
        self._encoded = 0  # all tiles so far
        self._past = self._past_slides = 0  # tiles that are done with, encoded or lost: all, and of finished slides

    def add_tiles(self, tiles: int) -> None:
        """Count tiles of the current slide."""
        self._encoded += tiles
        self._past += tiles
        self._show()

    def add_slide(self, job: Job, outcome: Outcome) -> None:
        """Count a slide, and print a failure."""
        self._slides_done += 1
        self._past = self._past_slides = self._past_slides + len(job.tiles)
        if outcome.status == "failed":
            self._slides_failed += 1
            say_failed(outcome, self._progress.console)
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        elapsed = max(now - self._start, 1e-9)
        failed = f", {self._slides_failed:,} failed" if self._slides_failed else ""
        speed = (
            f"{self._slides_done:,}/{self._slides:,} slides, {self._encoded / elapsed:,.0f} tiles/s, "
            f"waiting {self._bags.waited_s / elapsed:.0%}{failed}"
        )
        self._progress.update(self._bar, completed=self._past, speed=speed)
        if not self._console.is_terminal and now - self._said > SAY_EVERY_S:
            self._console.print(f"{self._past:,} of {self._tiles:,} tiles, {speed}")
            self._said = now


def write(job: Job, slide: EncodedSlide, settings: Settings) -> None:
    """Write a slide's file, with the positions of the tiles that were read."""
    [encoded] = slide.by_model
    card, encoder = settings.loaded.card, settings.loaded.encoder
    features = FeatureSet(
        slide_id=job.row.slide_id,
        features=encoded.z_KD.cpu().numpy(),
        attention=encoded.r_K.cpu().numpy(),
        positions=job.tiles.positions[slide.rows],
        encoder=card.key,
        fingerprint=job.key,
    )
    about: dict[str, str | int] = {
        "weights_sha256": settings.loaded.provenance.sha256,
        "feature": encoder.feature,
        "encoder_tile_px": encoder.tile_px,
        "precision": settings.precision,
        "tiles_failed": len(slide.missing),
    }
    write_features(job.path, features, job.tiles, about=about)


def rescaled(jobs: Sequence[Job], encoder_px: int) -> list[str]:
    """Say which tiles the encoder sees at another scale than they were laid at, once for each kind."""
    kinds = sorted({(job.tiles.tile_px, job.tiles.target_mpp or 0.0) for job in jobs})
    lines = []
    for tile_px, mpp in kinds:
        if tile_px != encoder_px:
            at = f", at {mpp * tile_px / encoder_px:.3g} um per pixel" if mpp else ""
            lines.append(f"Tiles of {tile_px} px are read as {encoder_px} px{at}.")
    return lines
