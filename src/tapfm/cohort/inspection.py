"""`tapfm inspect`: what each slide says of itself, and what would be a problem, before any work is done."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from tapfm.cohort.manifest import SlideRow, read_cohort, slides_below
from tapfm.errors import SlideError, TapfmError
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import grouped_advice
from tapfm.runtime.workers import Died, run_isolated
from tapfm.slides.opening import open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.slides.slide import COPY_AGAIN, Slide


@dataclass(frozen=True)
class Inspection:
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


def collect(sources: Sequence[Path], slides_folder: Path | None) -> list[SlideRow]:
    """Gather the slides of tables, folders and files; missing ones too, as they are what is looked for."""
    rows: list[SlideRow] = []
    for source in sources:
        if source.is_dir():
            rows += slides_below(source)  # equal names too: they are told apart by their paths
        else:
            rows += read_cohort(source, slides_folder, must_exist=False).rows
    return rows


def inspect_slide(row: SlideRow) -> Inspection:
    """Open a slide and read what it says."""
    unknown = Inspection(row.slide_id, str(row.path))
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
            read_somewhere(slide)  # a file whose header is whole may have no pixels behind it
        except TapfmError as error:
            return replace(known, problem=error.message, what_to_do=error.hint)
    return known


def read_somewhere(slide: Slide) -> None:
    """Read a few pixels of each level, from the middle: cheap also where there is no pyramid."""
    for index, level in enumerate(slide.facts.levels):
        slide.read_level(index, level.width_px // 2, level.height_px // 2, 8, 8)


def inspect_all(rows: Sequence[SlideRow], workers: int, console: Console) -> list[Inspection]:
    """Inspect slides in processes of their own: a damaged header can kill the library that reads it."""
    found: dict[int, Inspection] = {}
    results = run_isolated(inspect_slide, rows, workers)
    watched = track(results, "inspecting", len(rows), console=console, transient=True, disable=not console.is_terminal)
    for index, answer in watched:
        if isinstance(answer, Died):
            row = rows[index]
            found[index] = Inspection(row.slide_id, str(row.path), problem=answer.reason, what_to_do=COPY_AGAIN)
        else:
            found[index] = answer
    return [found[index] for index in range(len(rows))]


def show(inspections: Sequence[Inspection], console: Console, *, as_json: bool) -> None:
    """Print a line for each slide, then what to do about problems."""
    if as_json:
        print(json.dumps([asdict(each) for each in inspections], indent=1))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("slide", overflow="fold")
    table.add_column("format", no_wrap=True)
    table.add_column("size, px", justify="right", no_wrap=True)
    table.add_column("um/px", justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("objective", justify="right", no_wrap=True)
    table.add_column("levels", justify="right", no_wrap=True)
    table.add_column("vendor", no_wrap=True)
    table.add_column("problem", overflow="fold", ratio=1)
    for each in inspections:
        remark = Text(each.problem, "bold red") if each.problem else Text("; ".join(each.warnings), "yellow")
        mpp = each.mpp if each.mpp is not None else each.mpp_in_file
        table.add_row(
            Text(each.slide_id),
            each.format,
            f"{each.width_px0:,} x {each.height_px0:,}" if each.width_px0 is not None else "",
            f"{mpp:.4g}" if mpp is not None else "",
            each.mpp_source,
            f"{each.objective_power:g}x" if each.objective_power else "",
            f"{each.levels}" if each.levels else "",
            Text(each.vendor),
            remark,
        )
    console.print(table)
    problems = [each for each in inspections if each.problem]
    warned = sum(bool(each.warnings) and not each.problem for each in inspections)
    console.print(
        f"\n{len(inspections):,} slides: {len(inspections) - len(problems) - warned:,} ready, "
        f"{warned:,} with a warning, {len(problems):,} with a problem."
    )
    for line in grouped_advice((each.slide_id, each.what_to_do) for each in problems):
        console.print(Text(line))


def names_for(slide_id: str) -> Iterator[str]:
    """Give an id, then others like it, for slides of the same name."""
    yield slide_id
    for number in itertools.count(2):
        yield f"{slide_id}-{number}"


def write_cohort(rows: Sequence[SlideRow], path: Path) -> None:
    """Write a table to start from: an id and a path for each slide, and `mpp` to fill in where it is missing."""
    base = path.absolute().parent
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["slide_id", "path", "patient_id", "mpp"])
    taken: set[str] = set()
    for row in rows:
        slide_id = next(name for name in names_for(row.slide_id) if name not in taken)
        taken.add(slide_id)
        absolute = row.path.absolute()  # links keep their names
        where = absolute.relative_to(base) if absolute.is_relative_to(base) else absolute
        writer.writerow([slide_id, where.as_posix(), slide_id, ""])
    write_atomically(path, buffer.getvalue().encode())
