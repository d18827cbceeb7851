"""Tile the slides of a cohort in worker processes; write tiles, tissue outlines, overlays and tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import cv2
import h5py
from rich.console import Console

from tapfm.cohort.cohort_table import SlideRow
from tapfm.errors import InputError, TileStoreError
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import Failure, SlideTable, process_slides
from tapfm.runtime.files import file_identity, fingerprint, write_atomically
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.output_folder import lock_folder, remove_unfinished_files
from tapfm.runtime.progress import SlideProgress
from tapfm.runtime.workers import WorkerPool
from tapfm.slides.annotations import GEOJSON_SUFFIXES, MASK_SUFFIXES, encode_tissue_geojson
from tapfm.slides.opening import OUTPUT_FOLDERS, list_slide_files, open_slide
from tapfm.slides.scale import MPP_OPTION, resolve_scale
from tapfm.tiles.grid import TileSpec, TileStatus
from tapfm.tiles.overlay import draw_overlay
from tapfm.tiles.overview_page import build_overview_page
from tapfm.tiles.records import TilingRecord
from tapfm.tiles.store import LAYOUTS, Layout, TileSet, read_tiles, tile_file_path, write_tiles
from tapfm.tiles.tiling import TILING_VERSION, no_tiles_error, tile_slide

_OUTLINES = "tissue"  # folder of the GeoJSON files that tapfm writes


@dataclass(frozen=True)
class TilingJob:
    """One slide to tile. Jobs are sent to workers."""

    row: SlideRow
    spec: TileSpec
    layout: Layout
    folder: Path
    tissue_path: Path | None
    key: str  # fingerprint of everything that determines the tiles
    threads: int = 1  # more if there are at least twice as many workers as slides
    mpp_option: float | None = None  # microns per pixel if the slide has no usable scale


def tile_cohort(
    rows: Sequence[SlideRow],
    folder: Path,
    spec: TileSpec,
    *,
    only: Collection[str] | None,
    layout: Layout,
    tissue: Path | None,
    workers: int,
    force: bool,
    console: Console,
    pool: WorkerPool | None = None,
    mpp_option: float | None = None,
) -> SlideTable[TilingRecord]:
    """Tile all slides, or those in `only`. Slides already tiled with the same settings are skipped.

    tissue: folder or file with tissue annotations. pool: running workers that call `catch_failures(run_tiling_job)`.
    mpp_option: microns per pixel of slides without a usable scale.
    """
    annotations = _find_tissue_annotations(rows, tissue, folder, only)
    jobs = {row.slide_id: _make_job(row, folder, spec, layout, annotations.get(row.slide_id)) for row in rows}
    jobs = {slide_id: replace(job, mpp_option=mpp_option) for slide_id, job in jobs.items()}
    if tissue is not None:
        console.print(
            f"Tissue annotations found for {len(annotations):,} of {len(rows):,} slides. "
            f"Without an annotation, tissue is detected automatically ({spec.tissue})."
        )
    _reject_foreign_files(list(jobs.values()))
    with lock_folder(folder, "tapfm tile"), SlideClaims(folder) as claims:
        remove_unfinished_files(folder, *(folder / name for name in OUTPUT_FOLDERS))
        table = SlideTable(
            folder,
            list(jobs),
            TilingRecord,
            unselected_status="not tiled",
            unselected_reason="excluded by --only",
            on_save=partial(_write_overview_page, folder),
        )
        todo = table.select_remaining_jobs(jobs, only=only, force=force, load_finished=_load_finished_record)
        if table.finished:
            console.print(f"{len(table.finished):,} of {len(jobs):,} slides are already tiled with these settings.")
        replaced = [job for job in todo.values() if job.row.path.exists() and _find_replaceable_files(job)]
        if replaced and not force:
            console.print(
                f"Replacing the tiles of {format_count(len(replaced), 'slide')} in {folder}: settings, slide file, "
                "annotation or version have changed, or an output file is missing.",
                markup=False,
                soft_wrap=True,
            )
        threads = max(1, workers // max(1, len(todo)))
        todo = {slide_id: replace(job, threads=threads) for slide_id, job in todo.items()}
        with table.save_on_exit(), SlideProgress(console, "tiling", slides=len(todo)) as progress:
            for slide_id, result in process_slides(
                run_tiling_job, todo, workers=workers, claims=claims, pool=pool, crash_hint=_format_crash_hint
            ):
                if isinstance(result, Failure):
                    with contextlib.suppress(OSError):  # the same error may already have made the slide fail
                        _remove_results(todo[slide_id])
                    table.add_failure(slide_id, result)
                else:
                    table.add(result)
                record = table.records[slide_id]
                progress.finish_slide(
                    slide_id, tiles=record.tiles, failure=record.reason if record.status == "failed" else ""
                )
    return table


def _format_crash_hint(job: TilingJob) -> str:
    return (
        f"Inspect the slide: {format_command('inspect', job.row.path)}. "
        "If the machine ran out of memory, reduce --workers."
    )


def _write_overview_page(folder: Path, records: Sequence[TilingRecord]) -> None:
    write_atomically(folder / "index.html", build_overview_page(records).encode())


def find_unrelated_tile_files(table: SlideTable[TilingRecord]) -> list[str]:
    """Return the names of tile files in the folder that belong to no slide of the cohort."""
    owned = {tile_file_path(table.folder, slide_id, layout).name for slide_id in table.slide_ids for layout in LAYOUTS}
    return sorted(path.name for path in (table.folder / "patches").glob("*.h5") if path.name not in owned)


def _make_job(row: SlideRow, folder: Path, spec: TileSpec, layout: Layout, tissue_path: Path | None) -> TilingJob:
    """Return the job of a slide. Its key covers everything that its output files depend on, except `mpp_option`."""
    try:
        files = [file_identity(file) for file in [*list_slide_files(row.path), *([tissue_path] if tissue_path else [])]]
    except OSError:
        files = []  # the job itself will fail with the reason
    key = fingerprint(TILING_VERSION, spec.to_dict(), layout, row.slide_id, row.mpp, files)
    return TilingJob(row, spec, layout, folder, tissue_path, key)


def _tiles_key(job: TilingJob, mpp_source: str) -> str:
    """Return the key that is stored with the tiles: of the job, and of `mpp_option` if the slide needs it."""
    return fingerprint(job.key, job.mpp_option) if mpp_source == MPP_OPTION else job.key


def _reject_foreign_files(jobs: Sequence[TilingJob]) -> None:
    """Raise InputError if tile files of another tool or another slide would be overwritten."""
    paths = [(tile_file_path(job.folder, job.row.slide_id, job.layout), job.row.slide_id) for job in jobs]
    foreign = [path.name for path, slide_id in paths if path.exists() and not _is_replaceable(path, slide_id)]
    if foreign:
        raise InputError(
            f"{jobs[0].folder}/patches contains {len(foreign):,} tile files of another tool or another slide, such as "
            f"{foreign[0]}.",
            hint="Choose another folder with --out.",
        )


def _find_tissue_annotations(
    rows: Sequence[SlideRow], annotations: Path | None, folder: Path, only: Collection[str] | None
) -> dict[str, Path]:
    """Return the annotation file of each slide: files named by slide id in a folder, or one file for one slide."""
    if annotations is None:
        return {}
    own_outlines = (folder / _OUTLINES).resolve()
    if own_outlines in (annotations.resolve(), annotations.resolve().parent):
        raise InputError(
            f"tapfm writes its own outlines to {annotations}; your annotations would be overwritten.",
            hint=f"Copy them to another folder and use that: cp -r {folder / _OUTLINES} edited",
        )
    slide_ids = [row.slide_id for row in rows if only is None or row.slide_id in only]
    if annotations.is_file():
        if len(slide_ids) != 1:
            raise InputError(
                f"--tissue-mask {annotations} is a single file, but there are {len(slide_ids):,} slides.",
                hint="Pass a folder with one file per slide, named by slide id, or select one slide: --only ID",
            )
        return {slide_ids[0]: annotations}
    suffixes = (*GEOJSON_SUFFIXES, *MASK_SUFFIXES)
    found: dict[str, Path] = {}
    for row in rows:
        files = [path for suffix in suffixes if (path := annotations / f"{row.slide_id}{suffix}").exists()]
        if len(files) > 1:
            names = " and ".join(file.name for file in files)
            raise InputError(
                f"{annotations} contains several files for one slide: {names}.", hint="Keep one file per slide."
            )
        if files:
            found[row.slide_id] = files[0]
    if not found:
        raise InputError(
            f"{annotations} contains no file for any of the slides.",
            hint=f"Name the files by slide id, for example {rows[0].slide_id}.geojson or {rows[0].slide_id}.png",
        )
    return found


def _load_finished_record(job: TilingJob) -> TilingRecord | None:
    """Return the record of a slide that is already tiled, if everything it depends on is unchanged."""
    path = tile_file_path(job.folder, job.row.slide_id, job.layout)
    if not (path.exists() and _overlay_path(job).exists()):
        return None
    try:
        tiles = read_tiles(path)
    except TileStoreError:
        return None
    try:
        record = TilingRecord(**tiles.summary or {})
    except TypeError:
        return None  # not by tapfm, or by a version with other columns
    return record if tiles.fingerprint == _tiles_key(job, record.mpp_source) else None


def _overlay_path(job: TilingJob) -> Path:
    return job.folder / "overlays" / f"{job.row.slide_id}.png"


def _outline_path(job: TilingJob) -> Path:
    return job.folder / _OUTLINES / f"{job.row.slide_id}.geojson"


def run_tiling_job(job: TilingJob) -> TilingRecord:
    """Remove the old files of a slide, tile it and write its new files. Runs in a worker.

    A slide without tiles gives a record with status "failed"; other errors are raised.
    """
    cv2.setNumThreads(job.threads)  # several slides are tiled in parallel
    start = time.monotonic()
    _remove_results(job)
    record = _tile_and_write(job)
    return replace(record, seconds=round(time.monotonic() - start, 2))


def _tile_and_write(job: TilingJob) -> TilingRecord:
    slide_id = job.row.slide_id
    job.row.check_file()
    with closing(open_slide(job.row.path)) as slide:
        metadata = slide.metadata
        scale = resolve_scale(metadata, job.row.mpp, job.mpp_option)
        tiled = tile_slide(slide, scale, job.spec, job.tissue_path, job.threads)
        write_atomically(_overlay_path(job), draw_overlay(slide, tiled, scale, slide_id))
    write_atomically(_outline_path(job), encode_tissue_geojson(tiled.tissue_mask, tiled.thumbnail, metadata, slide_id))
    counts = tiled.counts
    record = TilingRecord(
        slide_id=slide_id,
        status="ok",
        mpp=scale.mpp,
        mpp_source=scale.source,
        tissue=job.spec.tissue if job.tissue_path is None else "annotation",
        achieved_mpp=job.spec.achieved_mpp(scale.mpp),
        tiles=len(tiled.kept),
        tiles_padded=counts[TileStatus.PADDED],
        tissue_mm2=tiled.tissue_mm2,
        removed_background=counts[TileStatus.BACKGROUND],
        removed_padding=counts[TileStatus.PADDING],
        removed_pen=counts[TileStatus.PEN],
        removed_blur=counts[TileStatus.BLUR],
        removed_unreadable=counts[TileStatus.UNREADABLE],
        removed_edge=counts[TileStatus.EDGE],
        removed_edge_mm2=tiled.removed_edge_mm2,
        warnings="; ".join(tiled.warnings),
    )
    if not len(tiled.kept):
        error = no_tiles_error(tiled, job.row.path.name, job.spec, job.tissue_path)
        return replace(record, status="failed", reason=error.message, hint=error.hint)
    tiles = TileSet(
        slide_id=slide_id,
        positions=tiled.kept,
        side_px0=tiled.side_px0,
        tile_px=job.spec.tile_px,
        target_mpp=job.spec.mpp,
        slide_mpp=scale.mpp,
        overlap_px=job.spec.overlap_px,
        size_px0=(metadata.width_px0, metadata.height_px0),
        fingerprint=_tiles_key(job, scale.source),
        summary=asdict(record),
        spec=job.spec.to_dict(),
        padded=tiled.padded if job.spec.edge_tiles == "pad" else None,
    )
    write_tiles(job.folder, tiles, job.layout)
    return record


def _remove_results(job: TilingJob) -> None:
    """Remove all output files of a slide, except tile files of another tool or another slide."""
    _overlay_path(job).unlink(missing_ok=True)
    _outline_path(job).unlink(missing_ok=True)
    for path in _find_replaceable_files(job):
        path.unlink()


def _find_replaceable_files(job: TilingJob) -> list[Path]:
    """Return the existing tile files of the slide in all layouts, except those of another tool or another slide."""
    paths = [tile_file_path(job.folder, job.row.slide_id, layout) for layout in LAYOUTS]
    return [path for path in paths if path.exists() and _is_replaceable(path, job.row.slide_id)]


def _is_replaceable(path: Path, slide_id: str) -> bool:
    """Return whether a tile file was written by tapfm for this slide, or is not readable as HDF5.

    x_patches.h5 belongs to slide x in one layout and to slide x_patches in the other.
    """
    try:
        with h5py.File(path, "r") as file:
            attributes = file["coords"].attrs if "coords" in file else {}
            return "tapfm_fingerprint" in attributes and attributes.get("name") == slide_id
    except Exception:  # a damaged file can make h5py raise anything
        return True
