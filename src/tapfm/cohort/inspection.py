"""Inspect slides before any work is done: what their files say, and what would be a problem."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from rich.console import Console

from tapfm.cohort.manifest import SlideRow, read_cohort, slides_below
from tapfm.errors import SlideError, TapfmError
from tapfm.runtime.cohort_job import Failure, run_slides
from tapfm.runtime.csv_files import write_csv
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import COPY_AGAIN, Slide


@dataclass(frozen=True)
class InspectedSlide:
    """What is known of a slide; `problem` would stop it from being tiled, `warnings` would not."""

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
    what_to_do: str = ""


def collect_slides(sources: Sequence[Path], slides_folder: Path | None) -> list[SlideRow]:
    """Gather the slides of tables, folders and files; missing ones too, as they are what is looked for."""
    rows: list[SlideRow] = []
    for source in sources:
        if source.is_dir():
            rows += slides_below(source)  # slides of the same name too: their paths differ
        else:
            rows += read_cohort(source, slides_folder, must_exist=False).rows
    return rows


def _inspect_slide(row: SlideRow) -> InspectedSlide:
    """Open a slide and read what it says."""
    unknown = InspectedSlide(row.slide_id, str(row.path))
    try:
        slide = open_slide(row.path)
    except SlideError as error:
        return replace(unknown, problem=error.message, what_to_do=error.hint)
    with closing(slide):
        facts = slide.facts
        known = replace(
            unknown,
            format=facts.format,
            vendor=facts.vendor,
            reader=facts.reader,
            width_px0=facts.width_px0,
            height_px0=facts.height_px0,
            levels=len(facts.levels),
            downsamples=tuple(round(level.downsample, 4) for level in facts.levels),
            mpp_in_file=facts.mpp_in_file,
            objective_power=facts.objective_power,
            bounds_px0=astuple(facts.bounds),
        )
        try:
            scale = resolve_scale(facts, row.mpp)
            known = replace(known, mpp=scale.mpp, mpp_source=scale.source, warnings=scale.warnings)
            _read_somewhere(slide)  # a file whose header is whole may have no pixels behind it
        except TapfmError as error:
            return replace(known, problem=error.message, what_to_do=error.hint)
    return known


def _read_somewhere(slide: Slide) -> None:
    """Read a few pixels of each level, from the middle: cheap also where there is no pyramid."""
    for index, level in enumerate(slide.facts.levels):
        slide.read_level(index, level.width_px // 2, level.height_px // 2, 8, 8)


def inspect_all(rows: Sequence[SlideRow], workers: int, console: Console) -> list[InspectedSlide]:
    """Inspect slides in worker processes: a damaged header can crash the library that reads it."""
    jobs = {str(index): row for index, row in enumerate(rows)}  # by number: ids may repeat
    found: dict[str, InspectedSlide] = {}
    with SlideProgress(console, "inspecting", slides=len(rows), transient=True) as progress:
        for index, result in run_slides(_inspect_slide, jobs, workers=workers, after_crash=lambda _: COPY_AGAIN):
            if isinstance(result, Failure):
                row = jobs[index]
                result = InspectedSlide(
                    row.slide_id, str(row.path), problem=result.reason, what_to_do=result.what_to_do
                )
            found[index] = result
            progress.finish_slide(result.slide_id)
    return [found[index] for index in jobs]


def _names_for(slide_id: str) -> Iterator[str]:
    """Give an id, then others like it, for slides of the same name."""
    yield slide_id
    for number in itertools.count(2):
        yield f"{slide_id}-{number}"


def write_cohort(rows: Sequence[SlideRow], path: Path) -> None:
    """Write a table to start from: an id and a path for each slide, and `mpp` to fill in where it is missing."""
    base = path.absolute().parent
    taken: set[str] = set()
    table = []
    for row in rows:
        slide_id = next(name for name in _names_for(row.slide_id) if name not in taken)
        taken.add(slide_id)
        absolute = row.path.absolute()  # links keep their names
        where = absolute.relative_to(base) if absolute.is_relative_to(base) else absolute
        table.append([slide_id, where.as_posix(), slide_id, ""])
    write_csv(path, ["slide_id", "path", "patient_id", "mpp"], table)
