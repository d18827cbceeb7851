"""Tile the slides of a cohort: tissue, tiles and an overlay of each, in worker processes, and tables of all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import cv2
from rich.console import Console

from tapfm.cohort.manifest import SlideRow
from tapfm.errors import InputError, TileStoreError
from tapfm.runtime.claims import SlideClaims
from tapfm.runtime.cohort_job import Failure, SlideTable, run_slides
from tapfm.runtime.files import file_identity, fingerprint, write_atomically
from tapfm.runtime.messages import command
from tapfm.runtime.output_folder import locked, remove_unfinished
from tapfm.runtime.progress import SlideProgress
from tapfm.runtime.workers import WorkerPool
from tapfm.slides.opening import OUTPUT_FOLDERS, files_of, open_slide
from tapfm.slides.regions import GEOJSON_SUFFIXES, MASK_SUFFIXES, geojson_of
from tapfm.slides.scale import resolve_scale
from tapfm.tiles.contact_sheet import contact_sheet
from tapfm.tiles.grid import TileSpec, TileVerdict
from tapfm.tiles.overlay import draw_overlay
from tapfm.tiles.records import TileRecord
from tapfm.tiles.store import LAYOUTS, Layout, TileSet, read_tiles, store_path, write_tiles
from tapfm.tiles.tiling import TILING_VERSION, tile_slide, why_empty

_OUTLINES = "tissue"  # folder of our own GeoJSON


@dataclass(frozen=True)
class TilingJob:
    """One slide to tile; is sent to a worker."""

    row: SlideRow
    spec: TileSpec
    layout: Layout
    folder: Path
    tissue_path: Path | None
    key: str  # fingerprint of everything that decides the tiles
    threads: int = 1  # more where there are fewer slides than cores


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
) -> SlideTable[TileRecord]:
    """Tile all slides (or those in `only`); slides that were tiled with the same settings are kept.

    tissue: tissue that a person drew. pool: workers of `attempt(run_tiling_job)`, started before.
    """
    drawn = _find_drawn_tissue(rows, tissue, folder, only)
    jobs = {row.slide_id: _make_job(row, folder, spec, layout, drawn.get(row.slide_id)) for row in rows}
    if tissue is not None:
        console.print(f"Tissue drawn by hand: {len(drawn):,} of {len(rows):,} slides; the others by {spec.tissue}.")
    _refuse_foreign_files(list(jobs.values()))
    with locked(folder, "tapfm tile"), SlideClaims(folder) as claims:
        remove_unfinished(folder, *(folder / name for name in OUTPUT_FOLDERS))
        table = SlideTable(
            folder,
            list(jobs),
            TileRecord,
            left_out=("not tiled", "no tiles with these settings"),
            also_save=partial(_write_sheet, folder),
        )
        todo = table.plan(jobs, only=only, force=force, recall=_recall_record)
        if table.finished:
            console.print(f"{len(table.finished):,} of {len(jobs):,} slides are already tiled with these settings.")
        threads = max(1, workers // max(1, len(todo)))
        todo = {slide_id: replace(job, threads=threads) for slide_id, job in todo.items()}
        with table.saved(), SlideProgress(console, "tiling", slides=len(todo)) as progress:
            for slide_id, result in run_slides(
                run_tiling_job, todo, workers=workers, claims=claims, pool=pool, after_crash=_after_crash
            ):
                if isinstance(result, Failure):
                    with contextlib.suppress(OSError):  # the reason of the failure, perhaps
                        _remove_results(todo[slide_id])
                    table.fail(slide_id, result)
                else:
                    table.add(result)
                record = table.records[slide_id]
                progress.finish_slide(
                    slide_id, tiles=record.tiles, failure=record.reason if record.status == "failed" else ""
                )
    return table


def _after_crash(job: TilingJob) -> str:
    return f"Inspect it: {command('inspect', job.row.path)}. If the machine ran out of memory, use fewer --workers."


def _write_sheet(folder: Path, records: Sequence[TileRecord]) -> None:
    write_atomically(folder / "index.html", contact_sheet(records).encode())


def other_files(table: SlideTable[TileRecord]) -> list[str]:
    """Return the names of tile files that belong to no slide of the cohort."""
    owned = {store_path(table.folder, slide_id, layout).name for slide_id in table.slide_ids for layout in LAYOUTS}
    return sorted(path.name for path in (table.folder / "patches").glob("*.h5") if path.name not in owned)


def _make_job(row: SlideRow, folder: Path, spec: TileSpec, layout: Layout, tissue_path: Path | None) -> TilingJob:
    """Make the job of a slide; its key covers everything that its files depend on."""
    try:
        files = [file_identity(file) for file in [*files_of(row.path), *([tissue_path] if tissue_path else [])]]
    except OSError:
        files = []  # it will fail by itself, and say how
    key = fingerprint(TILING_VERSION, asdict(spec), layout, row.slide_id, row.mpp, files)
    return TilingJob(row, spec, layout, folder, tissue_path, key)


def _refuse_foreign_files(jobs: Sequence[TilingJob]) -> None:
    """Stop before tiles that another tool wrote would be written over."""
    paths = [(store_path(job.folder, job.row.slide_id, job.layout), job.row.slide_id) for job in jobs]
    foreign = [path.name for path, slide_id in paths if path.exists() and not _may_replace(path, slide_id)]
    if foreign:
        raise InputError(
            f"{jobs[0].folder}/patches has {len(foreign):,} files that tapfm did not write, such as {foreign[0]}.",
            hint="Give another folder with --out.",
        )


def _find_drawn_tissue(
    rows: Sequence[SlideRow], given: Path | None, folder: Path, only: Collection[str] | None
) -> dict[str, Path]:
    """Find the tissue that a person drew: a file for each id in a folder, or one file for a single slide."""
    if given is None:
        return {}
    ours = (folder / _OUTLINES).resolve()
    if ours in (given.resolve(), given.resolve().parent):
        raise InputError(
            f"{given} is where tapfm writes its own outlines: yours would be overwritten.",
            hint=f"Copy what you corrected to another folder, and give that: cp -r {folder / _OUTLINES} edited",
        )
    slide_ids = [row.slide_id for row in rows if only is None or row.slide_id in only]
    if given.is_file():
        if len(slide_ids) != 1:
            raise InputError(
                f"--tissue-mask {given} is one file, for {len(slide_ids):,} slides.",
                hint="Give a folder with a file for each slide, named by its id; or one slide: --only ID",
            )
        return {slide_ids[0]: given}
    suffixes = (*GEOJSON_SUFFIXES, *MASK_SUFFIXES)
    found: dict[str, Path] = {}
    for row in rows:
        files = [path for suffix in suffixes if (path := given / f"{row.slide_id}{suffix}").exists()]
        if len(files) > 1:
            names = " and ".join(file.name for file in files)
            raise InputError(f"{given} has {names}: which is meant?", hint="Keep one file for each slide.")
        if files:
            found[row.slide_id] = files[0]
    if not found:
        raise InputError(
            f"{given} has no file for any of the slides.",
            hint=f"Files are named by the slide's id, such as {rows[0].slide_id}.geojson or {rows[0].slide_id}.png",
        )
    return found


def _recall_record(job: TilingJob) -> TileRecord | None:
    """Return the record of a slide that is tiled already, if everything it depends on is unchanged."""
    path = store_path(job.folder, job.row.slide_id, job.layout)
    if not (path.exists() and _overlay_path(job).exists()):
        return None
    try:
        tiles = read_tiles(path)
    except TileStoreError:
        return None
    if tiles.fingerprint != job.key or not tiles.summary:
        return None
    try:
        return TileRecord(**tiles.summary)
    except TypeError:
        return None  # a version that knew other columns


def _overlay_path(job: TilingJob) -> Path:
    """Say where a slide's picture is."""
    return job.folder / "overlays" / f"{job.row.slide_id}.png"


def _outline_path(job: TilingJob) -> Path:
    """Say where a slide's outline is."""
    return job.folder / _OUTLINES / f"{job.row.slide_id}.geojson"


def run_tiling_job(job: TilingJob) -> TileRecord:
    """Tile one slide and write its files. Runs in a worker."""
    cv2.setNumThreads(job.threads)  # slides run side by side
    start = time.monotonic()
    _remove_results(job)
    record = _tile_and_write(job)
    return replace(record, seconds=round(time.monotonic() - start, 2))


def _tile_and_write(job: TilingJob) -> TileRecord:
    """Tile one slide and write its files."""
    slide_id = job.row.slide_id
    with closing(open_slide(job.row.path)) as slide:
        facts = slide.facts
        scale = resolve_scale(facts, job.row.mpp)
        tiled = tile_slide(slide, scale, job.spec, job.tissue_path, job.threads)
        write_atomically(_overlay_path(job), draw_overlay(slide, tiled, scale, slide_id))
    write_atomically(_outline_path(job), geojson_of(tiled.tissue, tiled.thumbnail, facts, slide_id))
    counts = tiled.counts
    record = TileRecord(
        slide_id=slide_id,
        status="ok",
        mpp=scale.mpp,
        mpp_source=scale.source,
        tissue=job.spec.tissue if job.tissue_path is None else "drawn",
        achieved_mpp=job.spec.achieved_mpp(scale.mpp),
        tiles=counts[TileVerdict.KEPT],
        tissue_mm2=tiled.tissue_mm2,
        removed_background=counts[TileVerdict.BACKGROUND],
        removed_padding=counts[TileVerdict.PADDING],
        removed_pen=counts[TileVerdict.PEN],
        removed_blur=counts[TileVerdict.BLUR],
        removed_unreadable=counts[TileVerdict.UNREADABLE],
        warnings="; ".join(tiled.warnings),
    )
    if not len(tiled.kept):
        error = why_empty(tiled, job.row.path.name, job.spec)
        return replace(record, status="failed", reason=error.message, what_to_do=error.hint)
    tiles = TileSet(
        slide_id=slide_id,
        positions=tiled.kept,
        side_px0=tiled.side_px0,
        tile_px=job.spec.tile_px,
        target_mpp=job.spec.mpp,
        slide_mpp=scale.mpp,
        overlap_px=job.spec.overlap_px,
        size_px0=(facts.width_px0, facts.height_px0),
        fingerprint=job.key,
        summary=asdict(record),
        spec=asdict(job.spec),
    )
    write_tiles(job.folder, tiles, job.layout)
    return record


def _remove_results(job: TilingJob) -> None:
    """Remove what other settings made of a slide, so that it is never taken for the result of these."""
    _overlay_path(job).unlink(missing_ok=True)
    _outline_path(job).unlink(missing_ok=True)
    for layout in LAYOUTS:
        path = store_path(job.folder, job.row.slide_id, layout)
        if path.exists() and _may_replace(path, job.row.slide_id):
            path.unlink()


def _may_replace(path: Path, slide_id: str) -> bool:
    """Say whether a file is ours and of that slide, or nobody's as it cannot be read.

    x_patches.h5 is of the slide x in one layout, of x_patches in the other.
    """
    try:
        tiles = read_tiles(path)
    except TileStoreError:
        return True
    return tiles.fingerprint is not None and tiles.slide_id == slide_id
