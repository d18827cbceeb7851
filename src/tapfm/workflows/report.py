"""`tapfm report`: write an HTML report of runs or a study."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.workflows.shared_options import SlidesFolder

if TYPE_CHECKING:
    from tapfm.report.report_creation import WrittenReport


@options
class ReportOptions:
    """Options of `tapfm report`."""

    sources: Annotated[
        tuple[Path, ...], Argument("One or more run folders, or the folder of a study.", metavar="RUN...|STUDY")
    ]
    _: KW_ONLY
    out: Annotated[Path, Option("HTML file to write, such as report.html.", metavar="FILE")]
    evaluation: Annotated[
        tuple[Path, ...],
        Option(
            "Output folder of `tapfm evaluate` to include. Repeatable.",
            metavar="DIR",
            show_default="found automatically",
        ),
    ] = ()
    predictions: Annotated[
        tuple[Path, ...],
        Option(
            "Output folder of `tapfm predict` to include. Repeatable.",
            metavar="DIR",
            show_default="found automatically",
        ),
    ] = ()
    run: Annotated[
        tuple[str, ...],
        Option(
            "Run of a study to show in detail. Repeatable.",
            metavar="NAME",
            show_default="the runs of --evaluation and --predictions, else the run with the best validation AUC",
        ),
    ] = ()
    slides: SlidesFolder = None
    heatmaps: Annotated[
        int, Option("Maximum number of slides with heatmaps from each folder of predictions.", metavar="N")
    ] = 12
    gallery_tiles: Annotated[int, Option("Number of most influential tiles in each gallery.", metavar="N")] = 12
    max_image_mb: Annotated[
        float,
        Option("Maximum size of all images in the report, in megabytes. Further images are omitted.", metavar="MB"),
    ] = 20.0
    title: Annotated[
        str | None, Option("Title of the report.", metavar="TEXT", show_default="the names of the targets")
    ] = None
    resamples: Annotated[
        int,
        Option(
            "Number of bootstrap resamples for metrics that the report computes itself, of splits without an "
            "evaluation. Evaluations keep their own.",
            metavar="N",
            at_least=1,
        ),
    ] = 2000
    force: Annotated[bool, Option("Overwrite --out even if it is not a report of tapfm.")] = False

    def check(self) -> None:
        """Raise InputError if the maximum size is infinite or NaN."""
        if not math.isfinite(self.max_image_mb):
            raise InputError(
                f"--max-image-mb must be a number of megabytes; got {self.max_image_mb}.",
                hint="For example: --max-image-mb 20",
            )


@command_function(ReportOptions)
def make_report(options: ReportOptions, console: Console) -> WrittenReport:
    """Write an HTML report of runs or a study. Warnings are in `.notes` of the result."""
    from tapfm.report.heatmap_blocks import ImageSelection
    from tapfm.report.report_creation import PageOptions, create_report

    page_options = PageOptions(
        evaluations=options.evaluation,
        predictions=options.predictions,
        runs=options.run,
        title=options.title,
        image_selection=ImageSelection(options.heatmaps, options.gallery_tiles, options.slides),
        max_image_bytes=round(options.max_image_mb * 1e6),
        resamples=options.resamples,
        force=options.force,
    )
    today = datetime.now(UTC).date()
    return create_report(options.sources, options.out, page_options, console=console, today=today)
