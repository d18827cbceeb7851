"""Embed the slides of a cohort: features and raw attention of every tile, in one file per slide."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from tapfm.cohort.cohort_table import SlideRow
from tapfm.encoders.features import SlideFeatures, read_fingerprint, write_features
from tapfm.encoders.inference import prepare_encoder
from tapfm.inference.bags import PREFETCH_BYTES, PixelBags, SlideFailed, SlideTiles
from tapfm.inference.embedding_jobs import (
    EmbeddingJob,
    EmbeddingRecord,
    EmbeddingSettings,
    check_no_overwriting,
    find_finished,
    make_job,
)
from tapfm.inference.predictor import EncodedSlide, InferenceModel, Predictor
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import Failure, SlideTable
from tapfm.runtime.output_folder import lock_folder, remove_unfinished_files
from tapfm.runtime.progress import SlideProgress, print_failure


def embed_cohort(
    rows: Sequence[SlideRow],
    tiles_folder: Path,
    folder: Path,
    settings: EmbeddingSettings,
    *,
    tile_command: str,
    only: Collection[str] | None,
    workers: int,
    force: bool,
    console: Console,
) -> SlideTable[EmbeddingRecord]:
    """Embed all slides (or those in `only`); existing features of the same tiles, encoder and settings are reused.

    tile_command: the command to suggest if tiles are missing.
    """
    check_no_overwriting(folder, rows)
    with lock_folder(folder, "tapfm embed"), SlideClaims(folder) as claims:
        remove_unfinished_files(folder)
        jobs = {row.slide_id: make_job(row, tiles_folder, folder, settings, tile_command) for row in rows}
        table = SlideTable(folder, list(jobs), EmbeddingRecord, "not embedded", "excluded by --only")
        todo = table.select_remaining_jobs(jobs, only=only, force=force, load_finished=find_finished)
        for slide_id, job in jobs.items():
            if isinstance(job, Failure) and (only is None or slide_id in only):
                print_failure(console, slide_id, job.reason)
        del jobs  # tiles of finished slides need not stay in memory
        if table.finished:
            console.print(f"{len(table.finished):,} of {len(rows):,} slides are already embedded with these settings.")
        for line in _describe_rescaling(list(todo.values()), settings.loaded.encoder.tile_px):
            console.print(line)
        with table.save_on_exit():
            if todo:
                _embed_slides(todo, table, settings, claims, workers, console)
    return table


def _embed_slides(
    jobs: dict[str, EmbeddingJob],
    table: SlideTable[EmbeddingRecord],
    settings: EmbeddingSettings,
    claims: SlideClaims,
    workers: int,
    console: Console,
) -> None:
    encoder = settings.loaded.encoder
    tiles = sum(len(job.tiles) for job in jobs.values())
    prepared = prepare_encoder(encoder, settings.precision, tiles=tiles, compiled=settings.compiled)
    bags = PixelBags(
        {slide_id: SlideTiles(job.row.path, job.tiles) for slide_id, job in jobs.items()},
        tile_px=encoder.tile_px,
        device=encoder.mean.device,
        workers=workers,
        prefetch_bytes=PREFETCH_BYTES,
    )
    command_start = slide_start = time.monotonic()

    def waiting() -> str:
        return f"waiting for data {bags.waited_s / max(time.monotonic() - command_start, 1e-9):.0%}"

    with SlideProgress(console, "embedding", slides=len(jobs), tiles=tiles, note=waiting) as progress:
        predictor = Predictor(
            [InferenceModel(prepared, None)],
            batch=settings.batch,
            on_tiles=progress.add_tiles,
            on_retry=progress.print,
        )

        def after_slide(slide_id: str, result: EncodedSlide | SlideFailed) -> None:
            nonlocal slide_start
            now = time.monotonic()
            seconds, slide_start = round(now - slide_start, 2), now
            job = jobs[slide_id]
            if isinstance(result, SlideFailed):
                if read_fingerprint(job.path) != job.key:
                    job.path.unlink(missing_ok=True)  # features of other settings
                table.add_failure(slide_id, Failure(result.reason, result.hint or _failure_hint(job), seconds))
            else:
                tiles_failed = len(result.unreadable_tiles)
                table.add(
                    EmbeddingRecord(slide_id, "ok", tiles=result.tiles, tiles_failed=tiles_failed, seconds=seconds)
                )
            claims.release(slide_id)
            failure = result.reason if isinstance(result, SlideFailed) else ""
            progress.finish_slide(slide_id, tiles=len(job.tiles), failure=failure)

        predictor.run(
            claims.claim_each(jobs),
            bags,
            lambda slide_id, slide: _write_slide_features(jobs[slide_id], slide, settings),
            on_slide=after_slide,
        )


def _failure_hint(job: EmbeddingJob) -> str:
    return f"Copy the slide again from its original. To check it: tapfm inspect {shlex.quote(str(job.row.path))}"


def _write_slide_features(job: EmbeddingJob, slide: EncodedSlide, settings: EmbeddingSettings) -> None:
    """Write the features of a slide, with the positions of the tiles that were read."""
    [encoded] = slide.by_model
    card, encoder = settings.loaded.card, settings.loaded.encoder
    features = SlideFeatures(
        slide_id=job.row.slide_id,
        features=encoded.z_KD.cpu().numpy(),
        attention=encoded.r_K.cpu().numpy(),
        encoder=card.key,
        fingerprint=job.key,
    )
    attributes: dict[str, str | int] = {
        "weights_sha256": settings.loaded.provenance.sha256,
        "feature": encoder.feature,
        "encoder_tile_px": encoder.tile_px,
        "precision": settings.precision,
        "tiles_failed": len(slide.unreadable_tiles),
    }
    write_features(job.path, features, job.tiles.select(slide.rows), attributes=attributes)


def _describe_rescaling(jobs: Sequence[EmbeddingJob], encoder_px: int) -> list[str]:
    """Return a note for each tile size that is rescaled for the encoder."""
    kinds = sorted({(job.tiles.tile_px, job.tiles.target_mpp or 0.0) for job in jobs})
    lines = []
    for tile_px, mpp in kinds:
        if tile_px != encoder_px:
            at = f", at {mpp * tile_px / encoder_px:.3g} um per pixel" if mpp else ""
            lines.append(f"Tiles of {tile_px} px are rescaled to {encoder_px} px for the encoder{at}.")
    return lines
