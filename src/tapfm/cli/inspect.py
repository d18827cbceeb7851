"""`tapfm inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tapfm.cli.command import command
from tapfm.cli.console import print_json, print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_command, format_count, group_hints
from tapfm.workflows import inspect as workflow

if TYPE_CHECKING:
    from tapfm.cohort.inspection import InspectedSlide


@command(workflow.InspectOptions)
def inspect(
    options: workflow.InspectOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show format, size and microns per pixel of slides, and problems that would prevent tiling.

    Slides are not modified. With --write-cohort, also writes a cohort table of
    the slides, for `tapfm tile`.

    \b
    Examples:
      tapfm inspect slide.svs
      tapfm inspect slides/ --write-cohort cohort.csv
      tapfm inspect cohort.csv --json

    Exit code 3 if a slide has a problem and cannot be tiled.
    """
    inspections = workflow.inspect.run(options, stderr_console())
    if as_json:
        print_json([asdict(each) for each in inspections])
    else:
        _print_inspections(inspections, stdout_console())
    if options.write_cohort is not None:
        tile = format_command("tile", options.write_cohort, "--out", "tiles")
        print_line(stderr_console(), f"Wrote {options.write_cohort}. Next: {tile}")
    if any(each.problem for each in inspections):
        raise typer.Exit(3)


def _print_inspections(inspections: Sequence[InspectedSlide], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("slide", overflow="fold")
    table.add_column("format", no_wrap=True)
    table.add_column("size, px", justify="right", no_wrap=True)
    table.add_column("um/px", justify="right", no_wrap=True)
    table.add_column("source", no_wrap=True)
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
        f"\n{format_count(len(inspections), 'slide')}: {len(inspections) - len(problems) - warned:,} ready, "
        f"{warned:,} with a warning, {len(problems):,} with a problem."
    )
    for line in group_hints((each.slide_id, each.hint) for each in problems):
        console.print(Text(line))
