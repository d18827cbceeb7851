"""Inspect slides: metadata, warnings, and problems that would prevent tiling."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from rich.console import Console

from tapfm.cohort.cohort_table import SlideRow, list_folder_slides, read_cohort
from tapfm.cohort.table_options import TableOptions
from tapfm.errors import SlideError, TapfmError
from tapfm.runtime.cohort_job import Failure, process_slides
from tapfm.runtime.csv_files import write_csv
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import DAMAGED_FILE_HINT, Slide


@dataclass(frozen=True)
class InspectedSlide:
    """Metadata of a slide.

    problem: why the slide cannot be opened or decoded, or has no usable scale; empty if there is none.
    warnings: do not prevent tiling.
    """

    slide_id: str
    path: str
    format: str = ""
    vendor: str = ""
    reader: str = ""
    width_px0: int | None = None
    height_px0: int | None = None
    levels: int | None = None
    downsamples: tuple[float, ...] = ()
    mpp: float | None = None
    mpp_source: str = ""
    mpp_in_file: float | None = None
    objective_power: float | None = None
    bounds_px0: tuple[int, int, int, int] | None = None
    warnings: tuple[str, ...] = ()
    problem: str = ""
    hint: str = ""


def collect_slides(sources: Sequence[Path], options: TableOptions) -> list[SlideRow]:
    """Return the slides of cohort tables, folders and slide files, including table rows whose file is missing."""
    rows: list[SlideRow] = []
    for source in sources:
        if source.is_dir():
            rows += list_folder_slides(source)  # may contain equal names in different folders
        else:
            rows += read_cohort(source, options).rows
    return rows


def _inspect_slide(row: SlideRow) -> InspectedSlide:
    unknown = InspectedSlide(row.slide_id, str(row.path))
    try:
        row.check_file()
        slide = open_slide(row.path)
    except SlideError as error:
        return replace(unknown, problem=error.message, hint=error.hint)
    with closing(slide):
        metadata = slide.metadata
        known = replace(
            unknown,
            format=metadata.format,
            vendor=metadata.vendor,
            reader=metadata.reader,
            width_px0=metadata.width_px0,
            height_px0=metadata.height_px0,
            levels=len(metadata.levels),
            downsamples=tuple(round(level.downsample, 4) for level in metadata.levels),
            mpp_in_file=metadata.mpp_in_file,
            objective_power=metadata.objective_power,
            bounds_px0=astuple(metadata.bounds),
        )
        try:
            scale = resolve_scale(metadata, row.mpp)
            known = replace(known, mpp=scale.mpp, mpp_source=scale.source, warnings=scale.warnings)
            _read_sample_pixels(slide)  # a file with an intact header may lack its pixels
        except TapfmError as error:
            return replace(known, problem=error.message, hint=error.hint)
    return known


def _read_sample_pixels(slide: Slide) -> None:
    """Raise TileReadError if the 8 x 8 pixels in the middle of a level cannot be decoded."""
    for index, level in enumerate(slide.metadata.levels):
        slide.read_level(index, level.width_px // 2, level.height_px // 2, 8, 8)


def inspect_slides(rows: Sequence[SlideRow], workers: int, console: Console) -> list[InspectedSlide]:
    """Inspect slides in worker processes, because a damaged header can crash the library that reads it."""
    jobs = {str(index): row for index, row in enumerate(rows)}  # by index, because slide ids may repeat
    found: dict[str, InspectedSlide] = {}
    with SlideProgress(console, "inspecting", slides=len(rows), transient=True) as progress:
        for index, result in process_slides(
            _inspect_slide, jobs, workers=workers, crash_hint=lambda _: DAMAGED_FILE_HINT
        ):
            if isinstance(result, Failure):
                row = jobs[index]
                result = InspectedSlide(row.slide_id, str(row.path), problem=result.reason, hint=result.hint)
            found[index] = result
            progress.finish_slide(result.slide_id)
    return [found[index] for index in jobs]


def _unique_id_candidates(slide_id: str) -> Iterator[str]:
    """Yield ID, ID-2, ID-3, ..., as unique ids for slides with the same name."""
    yield slide_id
    for number in itertools.count(2):
        yield f"{slide_id}-{number}"


def write_cohort_table(rows: Sequence[SlideRow], path: Path) -> None:
    """Write a cohort table with id and path of each slide, and empty `patient_id` and `mpp` to fill in."""
    base = path.absolute().parent
    used_ids: set[str] = set()
    table = []
    for row in rows:
        slide_id = next(name for name in _unique_id_candidates(row.slide_id) if name not in used_ids)
        used_ids.add(slide_id)
        absolute = row.path.absolute()  # symbolic links are not resolved
        written_path = absolute.relative_to(base) if absolute.is_relative_to(base) else absolute
        table.append([slide_id, written_path.as_posix(), "", ""])
    write_csv(path, ["slide_id", "path", "patient_id", "mpp"], table)
