"""`tapfm demo`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.demo.sizes import COHORT_NOTE, TARGET, Size
from tapfm.runtime.messages import format_command
from tapfm.runtime.steps import STOPPED_CODE
from tapfm.workflows import demo as workflow

if TYPE_CHECKING:
    from tapfm.demo.results import DemoResults


@command(workflow.DemoOptions)
def demo(options: workflow.DemoOptions, context: typer.Context) -> None:
    """Run all of tapfm on painted slides: from files to a report, in minutes, on any computer.

    \b
    tapfm demo                  9 to 10 minutes on two cores, no GPU
    tapfm demo --full           longer, with more slides
    tapfm demo --out elsewhere

    Slides are painted with a signal in some nests, inspected, tiled and split. An
    encoder of 0.9 million parameters learns from slide labels in three ways: fixed
    with ABMIL, fine-tuned with ABMIL, TAPFM. Each is evaluated on held-out and on
    external slides; TAPFM predicts them, with heatmaps; a report has it all. At the
    end you see the table, whether attention found the planted signal, and the next
    steps. Every command is shown as you would type it.

    Ctrl-C stops it, the same command resumes it. Finished steps are kept.

    \b
    report.html               all of it on a page
    attention-check.png       what was planted, attention before and after
    predictions/              heatmaps of slides
    study/                    runs, evaluations, tables
    synthetic/, tiles/, ...   slides, tiles
    logs/                     the result of each command
    """
    console = stderr_console()
    _print_plan(options.size, console)
    root = context.find_root().command

    def run_command(words: Sequence[str]) -> int:
        """Run a command as if it were typed, in this process: torch is loaded once for all of them."""
        try:
            return root.main(list(words), prog_name="tapfm", standalone_mode=False) or 0
        except typer.Abort:  # Ctrl-C before or after the command's own work
            return STOPPED_CODE

    _print_results(options.size, workflow.demo(options, console, run_command), stdout_console())


def _print_plan(size: Size, console: Console) -> None:
    lines = [
        f"{size.slides} painted slides and {size.external} of other sites, three ways to learn {TARGET} from their "
        f"labels, with an encoder of 0.9 million parameters: {size.takes}.",
        COHORT_NOTE,
        *([size.note] if size.note else []),
    ]
    for line in lines:
        console.print(line, markup=False)


def _print_results(size: Size, results: DemoResults, console: Console) -> None:
    from tapfm.results.formatting import format_duration
    from tapfm.results.terminal import rich_table

    folder = results.folder
    for table in (results.aucs, results.attention_check):
        console.print()
        console.print(rich_table(table))
    console.print()
    console.print(
        size.note
        or "Intervals are 95% confidence intervals, from resampled patients; study.md has paired tests. There is one "
        "seed of each, and another would give other numbers. Painted slides show how tapfm works, not how well a "
        "method does on tissue.",
        markup=False,
    )
    console.print(f"\nThe steps took {format_duration(results.seconds)}. Look at:")
    _print_beside(
        console,
        {
            str(folder.report): "all of it on a page, for any browser",
            str(folder.attention_check_image): "one slide: what was planted, attention before and after",
            str(folder.predictions("external") / "per-slide"): "heatmaps and most influential tiles of each slide",
            str(folder.study / "study.md"): "the tables; beside it as .csv and .tex",
        },
    )
    console.print("Next steps:")
    _print_beside(
        console,
        {
            format_command("view", folder.predictions("external")): "slides and heatmaps in the browser",
            "tapfm inspect SLIDES/ --write-cohort cohort.csv": "start with slides of your own",
            "tapfm encoders": "the models that can learn from them",
            "tapfm doctor": "which of them open here, and what else this machine can do",
        },
    )
    if shutil.which("tapfm") is None:  # as after `make demo`
        print_line(console, f"tapfm is not on the path yet: source {Path(sys.executable).parent / 'activate'}")


def _print_beside(console: Console, lines: Mapping[str, str]) -> None:
    width = max(map(len, lines))
    for text, meaning in lines.items():
        print_line(console, f"  {text:<{width}}  # {meaning}")
