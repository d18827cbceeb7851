"""`tapfm tile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_failures, print_line, stderr_console, stdout_console
from tapfm.runtime.cohort_job import FAILURES, RESUME_HINT, SUMMARY
from tapfm.workflows import tile as workflow

if TYPE_CHECKING:
    from tapfm.runtime.cohort_job import SlideTable
    from tapfm.tiles.records import TileRecord

_WARNINGS_SHOWN = 10  # the rest are in summary.csv


@command(workflow.TileOptions, stopped=RESUME_HINT)
def tile(options: workflow.TileOptions) -> None:
    """Detect tissue and extract tiles, all at the same microns per pixel.

    \b
    tapfm tile cohort.csv --out tiles
    tapfm tile cohort.csv --out tiles --only case-17   one slide, after fixing it
    tapfm tile slides/ --out tiles                     a folder, without a table

    A command that was stopped resumes where it was. Exit code 3 when slides failed; the others are finished.

    \b
    patches/ID_patches.h5   positions of the tiles
    overlays/ID.png         tissue, tiles, what was left out
    tissue/ID.geojson       for QuPath; pass a corrected copy with --tissue-mask
    index.html              all overlays on a page
    summary.csv             one row per slide
    failures.csv            what failed, why, and what to do
    """
    table = workflow.tile.run(options, stderr_console())
    _print_tiled(table, stdout_console())
    raise typer.Exit(table.exit_code(options.only or None, options.allow_failures))


def _print_tiled(table: SlideTable[TileRecord], console: Console) -> None:
    from tapfm.tiles.cohort_tiling import find_unrelated_tile_files

    tiles = sum(record.tiles for record in table.ordered)
    print_line(console, f"Tiled {len(table.finished):,} of {len(table.ordered):,} slides: {tiles:,} tiles.")
    if others := find_unrelated_tile_files(table):
        print_line(
            console,
            f"{len(others):,} more files in {table.folder / 'patches'} are not of this cohort, such as {others[0]}",
        )
    warned = [record for record in table.ordered if record.warnings]
    for record in warned[:_WARNINGS_SHOWN]:
        print_line(console, f"warning {record.slide_id}: {record.warnings}", "yellow")
    if len(warned) > _WARNINGS_SHOWN:
        print_line(
            console, f"... and {len(warned) - _WARNINGS_SHOWN:,} more warnings, in {table.folder / SUMMARY}", "yellow"
        )
    print_failures(console, [(each.slide_id, each.hint) for each in table.failed], table.folder / FAILURES)
    print_line(console, f"Look at them: {table.folder / 'index.html'}")
