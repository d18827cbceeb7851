"""`tapfm tile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_failures, print_line, stderr_console, stdout_console
from tapfm.runtime.cohort_job import FAILURES_FILE, RESUME_HINT, SUMMARY_FILE
from tapfm.runtime.messages import format_count
from tapfm.workflows import tile as workflow

if TYPE_CHECKING:
    from tapfm.runtime.cohort_job import SlideTable
    from tapfm.tiles.records import TilingRecord

_MAX_WARNED_SLIDES = 10  # in the printed list; summary.csv has all warnings


@command(workflow.TileOptions, stop_message=RESUME_HINT)
def tile(options: workflow.TileOptions) -> None:
    """Detect the tissue of slides, and extract tiles with the same microns per pixel from all slides.

    Stores the coordinates of the tiles, not their pixels. Tiles with pen marks
    or out of focus are removed. Slides that are already tiled with the same
    settings are skipped, so run the same command again to resume.

    \b
    Examples:
      tapfm tile cohort.csv --out tiles
      tapfm tile slides/ --out tiles                     # folder of slides
      tapfm tile cohort.csv --out tiles --only case-17   # one slide

    \b
    Output files:
      patches/ID_patches.h5   coordinates of the tiles
      overlays/ID.png         image of tissue, tiles and removed tiles
      tissue/ID.geojson       tissue for QuPath, to edit for --tissue-mask
      index.html              all overlays on one page
      summary.csv             one row per slide
      failures.csv            failed slides, with reason and hint

    Exit code 3 if more slides failed than --allow-failures; the others are
    tiled.
    """
    table = workflow.tile.run(options, stderr_console())
    _print_result(table, stdout_console())
    raise typer.Exit(table.exit_code(options.only or None, options.allow_failures))


def _describe_edge_tiles(records: Sequence[TilingRecord]) -> Iterator[str]:
    """Yield a line about the tiles that are padded, and one about those that are removed, if there are any."""
    if padded := sum(record.tiles_padded or 0 for record in records):
        yield (
            f"{padded:,} of these tiles extend past the right or bottom edge of the slide; pixels outside it are white."
        )
    known = [record for record in records if record.removed_edge is not None]
    if removed := sum(record.removed_edge or 0 for record in known):
        tissue_mm2 = sum(record.tissue_mm2 or 0 for record in known)
        fraction = sum(record.removed_edge_mm2 or 0 for record in known) / tissue_mm2 if tissue_mm2 else 0
        yield (
            f"Not included: {format_count(removed, 'tile')} with tissue at the right or bottom edge "
            f"({fraction:.1%} of the tissue). To keep them: --edge-tiles pad"
        )


def _print_result(table: SlideTable[TilingRecord], console: Console) -> None:
    from tapfm.tiles.cohort_tiling import find_unrelated_tile_files

    tiles = sum(record.tiles for record in table.records_in_cohort_order)
    print_line(
        console, f"Tiled {len(table.finished):,} of {len(table.records_in_cohort_order):,} slides: {tiles:,} tiles."
    )
    for line in _describe_edge_tiles(table.records_in_cohort_order):
        print_line(console, line)
    if others := find_unrelated_tile_files(table):
        print_line(
            console,
            f"{table.folder / 'patches'} also contains {format_count(len(others), 'file')} of slides that are not in "
            f"this cohort, such as {others[0]}",
        )
    warned = [record for record in table.records_in_cohort_order if record.warnings]
    for record in warned[:_MAX_WARNED_SLIDES]:
        print_line(console, f"warning {record.slide_id}: {record.warnings}", "yellow")
    if len(warned) > _MAX_WARNED_SLIDES:
        print_line(
            console,
            f"... and {len(warned) - _MAX_WARNED_SLIDES:,} more slides with warnings, in {table.folder / SUMMARY_FILE}",
            "yellow",
        )
    print_failures(console, [(each.slide_id, each.hint) for each in table.failed], table.folder / FAILURES_FILE)
    print_line(console, f"Check the overlays: {table.folder / 'index.html'}")
