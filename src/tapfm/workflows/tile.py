"""`tapfm tile`: detect the tissue of each slide of a cohort and extract tiles from it."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError, UnknownNameError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.shared_options import (
    AllowFailures,
    Encoding,
    Missing,
    Only,
    SlidesFolder,
    Workers,
    print_table_notes,
    read_table_options,
)

if TYPE_CHECKING:
    from tapfm.runtime.cohort_job import SlideTable
    from tapfm.tiles.records import TilingRecord


@options
class TileOptions:
    """Options of `tapfm tile`."""

    cohort: Annotated[
        Path,
        Argument(
            "Cohort table with the columns slide_id and path, and optionally patient_id, mpp and labels. Or a folder "
            "of slides, or a single slide.",
            metavar="COHORT.csv",
        ),
    ]
    _: KW_ONLY
    out: Annotated[Path, Option("Output folder for tiles, overlays and tables.", metavar="DIR")]
    size: Annotated[int, Option("Side of a tile in pixels: the input size of the encoder, see `tapfm encoders`.")] = 224
    mpp: Annotated[float, Option("Resolution of the tiles in microns per pixel. 0.5 is about 20x, 0.25 about 40x.")] = (
        0.5
    )
    overlap: Annotated[int, Option("Overlap of neighbouring tiles in pixels.")] = 0
    min_tissue: Annotated[float, Option("Minimum fraction of tissue in a tile, above 0 and up to 1.")] = 0.25
    tissue: Annotated[
        str,
        Option(
            "Tissue detection: otsu (by saturation, as in the paper, but keeps faint tissue), darkness (for pale "
            "stains) or texture (unstained).",
        ),
    ] = "otsu"
    tissue_mask: Annotated[
        Path | None,
        Option(
            "Use manually annotated tissue instead: a folder with ID.geojson or ID.png (tissue is white) for each "
            "slide, or a file for a single slide.",
            metavar="PATH",
        ),
    ] = None
    keep_pen: Annotated[bool, Option("Keep tiles with pen marks. By default they are removed.")] = False
    keep_blur: Annotated[bool, Option("Keep tiles that are out of focus. By default they are removed.")] = False
    edge_tiles: Annotated[
        str,
        Option(
            "Tiles that extend past the right or bottom edge of the slide: skip (count them only) or pad (keep them; "
            "pixels outside the slide are white)."
        ),
    ] = "skip"
    layout: Annotated[str, Option("Layout of the HDF5 files: trident or clam. All commands read both.")] = "trident"
    slides: SlidesFolder = None
    encoding: Encoding = None
    missing: Missing = ()
    only: Only = ()
    workers: Workers = None
    allow_failures: AllowFailures = 0
    force: Annotated[
        bool, Option("Tile all slides again, or keep those with the same settings.", flag="--force/--resume")
    ] = False

    def check(self) -> None:
        """Raise InputError if the tissue mask does not exist, or the output folder is a file."""
        if self.tissue_mask is not None and not self.tissue_mask.exists():
            raise InputError(
                f"--tissue-mask {self.tissue_mask} does not exist.",
                hint="Give a folder with ID.geojson or ID.png for each slide, or a file for a single slide.",
            )
        if self.out.is_file():
            raise InputError(f"{self.out} is a file, not a folder.", hint="Choose another folder with --out.")


@command_function(TileOptions)
def tile(options: TileOptions, console: Console) -> SlideTable[TilingRecord]:
    """Detect tissue and extract tiles. Failed slides are in `.failed` of the result."""
    from tapfm.cohort.cohort_table import read_cohort
    from tapfm.tiles.cohort_tiling import tile_cohort
    from tapfm.tiles.grid import TileSpec
    from tapfm.tiles.store import LAYOUTS

    spec = TileSpec(
        options.size,
        options.mpp,
        options.overlap,
        options.min_tissue,
        options.tissue,
        not options.keep_pen,
        not options.keep_blur,
        options.edge_tiles,
    )
    layout = next((each for each in LAYOUTS if each == options.layout), None)
    if layout is None:
        raise UnknownNameError.with_suggestions("layout", options.layout, LAYOUTS, see=", ".join(LAYOUTS))
    cohort = read_cohort(options.cohort, read_table_options(options))
    cohort.check_ids(options.only)
    print_table_notes(console, cohort.reading_notes, ())
    return tile_cohort(
        cohort.rows,
        options.out,
        spec,
        only=options.only or None,
        layout=layout,
        tissue=options.tissue_mask,
        workers=choose_worker_count(options.workers),
        force=options.force,
        console=console,
    )
