"""`tapfm inspect`: what each slide is, at which scale, and what would be a problem with it."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import SlidesFolder

if TYPE_CHECKING:
    from tapfm.cohort.inspection import InspectedSlide


@options
class InspectOptions:
    """Options of `tapfm inspect`."""

    sources: Annotated[
        tuple[Path, ...],
        Argument(
            "Slides, folders of slides (subfolders included; a folder of DICOM files is one slide), or cohort tables.",
            metavar="SLIDE|FOLDER|COHORT.csv...",
        ),
    ]
    _: KW_ONLY
    slides: SlidesFolder = None
    write_cohort: Annotated[
        Path | None, Option("Write a table of these slides, with a column mpp to fill in.", metavar="CSV")
    ] = None

    def check(self) -> None:
        """Refuse a table that exists."""
        if self.write_cohort is not None and self.write_cohort.exists():
            raise InputError(
                f"{self.write_cohort} already exists.",
                hint="Give another name with --write-cohort, or remove the file first.",
            )


@command_function(InspectOptions)
def inspect(options: InspectOptions, console: Console) -> list[InspectedSlide]:
    """Inspect slides: format, size, microns per pixel, problems."""
    from tapfm.cohort.cohort_table import TABLE_SUFFIXES
    from tapfm.cohort.inspection import collect_slides, inspect_slides, write_cohort_table

    table = options.write_cohort
    if table is not None and (given := [each for each in options.sources if each.suffix.lower() in TABLE_SUFFIXES]):
        raise InputError(
            f"{given[0]} is already a table.", hint="--write-cohort makes a table of slides and folders of slides."
        )
    rows = collect_slides(options.sources, options.slides)
    inspections = inspect_slides(rows, count_workers(None), console)
    if table is not None:
        write_cohort_table(rows, table)
    return inspections
