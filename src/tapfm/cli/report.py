"""The command that makes a page of a run or a study. What it needs is imported when it runs: help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    sources: Annotated[
        list[Path], typer.Argument(metavar="RUN...|STUDY", help="Folders of runs, or the folder of a study.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page, such as report.html.")],
    evaluations: Annotated[
        list[Path] | None,
        typer.Option("--evaluation", metavar="DIR", help="What `tapfm evaluate` wrote; repeatable."),
    ] = None,
    predictions: Annotated[
        list[Path] | None,
        typer.Option("--predictions", metavar="DIR", help="What `tapfm predict` wrote; repeatable."),
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            "--run", metavar="NAME", help="Of a study: show it in full; repeatable.", show_default="best on validation"
        ),
    ] = None,
    slides: Annotated[
        Path | None, typer.Option("--slides", metavar="DIR", help="Where to look for slides that moved.")
    ] = None,
    heatmaps: Annotated[
        int, typer.Option("--heatmaps", metavar="N", help="Maps of slides, of each folder of predictions.")
    ] = 12,
    tiles: Annotated[
        int, typer.Option("--tiles", metavar="N", help="Tiles in each gallery: the most influential.")
    ] = 12,
    megabytes: Annotated[float, typer.Option("--most-mb", metavar="MB", help="Of pictures in the page.")] = 20.0,
    title: Annotated[
        str | None, typer.Option("--title", metavar="TEXT", help="Above the page.", show_default="the targets")
    ] = None,
    resamples: Annotated[
        int, typer.Option("--resamples", metavar="N", help="For intervals that no evaluation has yet.")
    ] = 2000,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is no report.")] = False,
) -> None:
    """Put all about a run or a study on one page, to read, send or print.

    \b
    tapfm report runs/first --out report.html
    tapfm report runs/first --predictions predictions/first --out report.html
    tapfm report studies/first --out study.html

    One HTML file that fetches nothing: slides and labels, curves, figures
    with intervals, ROC, precision and calibration, every slide to sort and
    filter, maps and tiles, failures, settings, licence.

    Evaluations and predictions by the same weights are found by themselves
    where they lie inside the run, beside runs/, or there in evaluations/ and
    predictions/. The page names slides and patients: think before you send it.
    """
    import math
    from datetime import UTC, datetime

    from tapfm.cli.console import terminal
    from tapfm.errors import InputError
    from tapfm.report.making import Asked, make_report
    from tapfm.report.numbers import size
    from tapfm.report.slide_pictures import Settings

    if not math.isfinite(megabytes):
        raise InputError(f"--most-mb is {megabytes}: it has to be a number of megabytes.")
    messages = Console(stderr=True, highlight=False)
    made = make_report(
        sources,
        out,
        Asked(
            evaluations=tuple(evaluations or ()),
            predictions=tuple(predictions or ()),
            runs=tuple(runs or ()),
            title=title,
            pictures=Settings(heatmaps, tiles, slides),
            most_bytes=round(megabytes * 1e6),
            resamples=resamples,
            force=force,
        ),
        console=messages,
        today=datetime.now(UTC).date(),
    )
    for note in made.notes:
        messages.print(note, style="yellow", markup=False, soft_wrap=True)
    shown = terminal()
    shown.print(f"Written: {made.path} ({size(made.bytes)})", markup=False, soft_wrap=True)
    for line in made.found:
        shown.print(f"  {line}", markup=False, soft_wrap=True)
