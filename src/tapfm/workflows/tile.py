"""`tapfm tile`: detect the tissue of each slide of a cohort and extract tiles from it."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError, UnknownNameError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import AllowFailures, Only, SlidesFolder, Workers

if TYPE_CHECKING:
    from tapfm.runtime.cohort_job import SlideTable
    from tapfm.tiles.records import TileRecord


@options
class TileOptions:
    """Options of `tapfm tile`."""

    cohort: Annotated[
        Path,
        Argument("slide_id,path[,patient_id][,mpp][,...]; or a folder, or a slide.", metavar="COHORT.csv"),
    ]
    _: KW_ONLY
    out: Annotated[Path, Option("Folder for tiles, overlays and tables.", metavar="DIR")]
    size: Annotated[int, Option("Side of a tile in pixels, as the encoder takes it.")] = 224
    mpp: Annotated[float, Option("Microns per pixel of the tiles; 0.5 is 20x.")] = 0.5
    overlap: Annotated[int, Option("Pixels that neighbouring tiles share.")] = 0
    min_tissue: Annotated[float, Option("Fraction of a tile that has to be tissue, above 0 to 1.")] = 0.25
    tissue: Annotated[
        str,
        Option(
            "How tissue is detected: otsu (colour, as in the paper), darkness (pale stains), texture (unstained).",
        ),
    ] = "otsu"
    tissue_mask: Annotated[
        Path | None,
        Option("Tissue drawn by a person: a folder with ID.geojson or ID.png (white on tissue), or one slide's file."),
    ] = None
    keep_pen: Annotated[bool, Option("Keep tiles with pen marks.")] = False
    keep_blur: Annotated[bool, Option("Keep tiles that are out of focus.")] = False
    layout: Annotated[str, Option("HDF5 layout to write: trident or clam. Both are read.")] = "trident"
    slides: SlidesFolder = None
    only: Only = ()
    workers: Workers = None
    allow_failures: AllowFailures = 0
    force: Annotated[
        bool, Option("Tile everything again / keep what has the same settings.", flags="--force/--resume")
    ] = False

    def check(self) -> None:
        """Refuse files where folders are needed, and a mask that does not exist."""
        if self.tissue_mask is not None and not self.tissue_mask.exists():
            raise InputError(
                f"{self.tissue_mask} does not exist.", hint="--tissue-mask is a folder, or a file for one slide."
            )
        if self.out.is_file():
            raise InputError(f"{self.out} is a file.", hint="Give a folder with --out.")


@command_function(TileOptions)
def tile(options: TileOptions, console: Console) -> SlideTable[TileRecord]:
    """Detect tissue and extract tiles. Slides that failed are in `.failed` of the result."""
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
    )
    layout = next((each for each in LAYOUTS if each == options.layout), None)
    if layout is None:
        raise UnknownNameError.with_suggestions("layout", options.layout, LAYOUTS, see=", ".join(LAYOUTS))
    cohort = read_cohort(options.cohort, options.slides)
    cohort.check_ids(options.only)
    return tile_cohort(
        cohort.rows,
        options.out,
        spec,
        only=options.only or None,
        layout=layout,
        tissue=options.tissue_mask,
        workers=count_workers(options.workers),
        force=options.force,
        console=console,
    )
