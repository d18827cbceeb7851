"""`tapfm inspect`: read the metadata of slides and report problems."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.shared_options import Encoding, Missing, SlidesFolder, read_table_options

if TYPE_CHECKING:
    from tapfm.cohort.inspection import InspectedSlide


@options
class InspectOptions:
    """Options of `tapfm inspect`."""

    sources: Annotated[
        tuple[Path, ...],
        Argument(
            "Slides, folders or cohort tables. Folders are searched recursively; a folder of DICOM files is one slide.",
            metavar="SLIDE|FOLDER|COHORT.csv...",
        ),
    ]
    _: KW_ONLY
    slides: SlidesFolder = None
    encoding: Encoding = None
    missing: Missing = ()
    write_cohort: Annotated[
        Path | None,
        Option(
            "Write a cohort table of these slides to this new file. Fill in its column patient_id, and its column mpp "
            "where the slide has none.",
            metavar="CSV",
        ),
    ] = None

    def check(self) -> None:
        """Raise InputError if the table to write exists."""
        if self.write_cohort is not None and self.write_cohort.exists():
            raise InputError(
                f"{self.write_cohort} already exists.",
                hint="Choose another name with --write-cohort, or delete the file first.",
            )


@command_function(InspectOptions)
def inspect(options: InspectOptions, console: Console) -> list[InspectedSlide]:
    """Return the format, size, microns per pixel and problems of each slide."""
    from tapfm.cohort.inspection import collect_slides, inspect_slides, write_cohort_table
    from tapfm.cohort.table_files import TABLE_SUFFIXES

    table = options.write_cohort
    if table is not None and (given := [each for each in options.sources if each.suffix.lower() in TABLE_SUFFIXES]):
        raise InputError(
            f"--write-cohort needs slides or folders of slides, but {given[0]} is already a table.",
            hint="Edit that table, or pass the folder of its slides instead.",
        )
    rows = collect_slides(options.sources, read_table_options(options))
    inspections = inspect_slides(rows, choose_worker_count(None), console)
    if table is not None:
        write_cohort_table(rows, table)
    return inspections
