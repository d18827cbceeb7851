"""`tapfm report`: all about runs or a study on one page."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.workflows.shared_options import Resamples, SlidesFolder

if TYPE_CHECKING:
    from tapfm.report.making import WrittenReport


@options
class ReportOptions:
    """Options of `tapfm report`."""

    sources: Annotated[tuple[Path, ...], Argument("Run folders, or the folder of a study.", metavar="RUN...|STUDY")]
    _: KW_ONLY
    out: Annotated[Path, Option("The page, such as report.html.", metavar="FILE")]
    evaluation: Annotated[
        tuple[Path, ...], Option("Output folder of `tapfm evaluate`; repeatable.", metavar="DIR")
    ] = ()
    predictions: Annotated[
        tuple[Path, ...], Option("Output folder of `tapfm predict`; repeatable.", metavar="DIR")
    ] = ()
    run: Annotated[
        tuple[str, ...],
        Option("Run of a study to show in full; repeatable.", metavar="NAME", default="best on validation"),
    ] = ()
    slides: SlidesFolder = None
    heatmaps: Annotated[int, Option("Heatmaps from each folder of predictions.", metavar="N")] = 12
    tiles: Annotated[int, Option("Tiles in each gallery: the most influential.", metavar="N")] = 12
    most_mb: Annotated[float, Option("Most megabytes of pictures on the page.", metavar="MB")] = 20.0
    title: Annotated[str | None, Option("Title of the page.", metavar="TEXT", default="the targets")] = None
    resamples: Resamples = 2000
    force: Annotated[bool, Option("Overwrite a file that is not a report.")] = False

    def check(self) -> None:
        """Refuse sizes that are not numbers."""
        if not math.isfinite(self.most_mb):
            raise InputError(f"--most-mb is {self.most_mb}: it has to be a number of megabytes.")


@command_function(ReportOptions)
def make_report(options: ReportOptions, console: Console) -> WrittenReport:
    """Write an HTML page about runs or a study. Warnings are in `.notes` of the result."""
    from tapfm.report import making
    from tapfm.report.slide_pictures import PictureSettings

    asked = making.PageOptions(
        evaluations=options.evaluation,
        predictions=options.predictions,
        runs=options.run,
        title=options.title,
        pictures=PictureSettings(options.heatmaps, options.tiles, options.slides),
        most_bytes=round(options.most_mb * 1e6),
        resamples=options.resamples,
        force=options.force,
    )
    today = datetime.now(UTC).date()
    return making.make_report(options.sources, options.out, asked, console=console, today=today)
