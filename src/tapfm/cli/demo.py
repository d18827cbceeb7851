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
from tapfm.demo.sizes import COHORT_NOTE, TARGET, DemoSize
from tapfm.runtime.messages import format_command
from tapfm.runtime.steps import INTERRUPTED_EXIT_CODE
from tapfm.workflows import demo as workflow

if TYPE_CHECKING:
    from tapfm.demo.results import DemoResults


@command(workflow.DemoOptions)
def demo(options: workflow.DemoOptions, context: typer.Context) -> None:
    """Run the whole workflow on synthetic slides, from slides to a report, in minutes and without a GPU.

    Generates slides with a planted signal, then inspects, tiles and splits
    them. Trains models on the slide labels with three methods: fixed encoder
    with ABMIL, fine-tuned encoder with ABMIL, and TAPFM. The encoder has 0.9
    million parameters. Evaluates all models on test and external slides, draws
    heatmaps with the TAPFM model, and writes a report. At the end it prints the
    AUCs, and how well attention ranks the tiles with the planted signal. Every
    command is printed as you would type it. Ctrl-C stops the demo; run the same
    command again to resume it.

    \b
    Examples:
      tapfm demo               # 9 to 10 minutes on two cores
      tapfm demo --tiny        # one or two minutes, only to test the installation
      tapfm demo --full        # an hour or more, with more slides

    \b
    Output files:
      report.html               report on the study and the predictions
      attention-check.png       planted signal, attention before and after
      predictions/              predictions and heatmaps
      study/                    runs, evaluations and tables
      synthetic/, tiles/, ...   slides and tiles
      logs/                     output of each command
    """
    console = stderr_console()
    _print_plan(options.size, console)
    root = context.find_root().command

    def run_command(arguments: Sequence[str]) -> int:
        """Run a tapfm command in this process, so that torch is imported only once."""
        try:
            return root.main(list(arguments), prog_name="tapfm", standalone_mode=False) or 0
        except typer.Abort:  # Ctrl-C while the command starts or ends
            return INTERRUPTED_EXIT_CODE

    _print_results(options.size, workflow.demo(options, console, run_command), stdout_console())


def _print_plan(size: DemoSize, console: Console) -> None:
    lines = [
        f"The demo generates {size.slides} synthetic slides and {size.external_slides} external slides, and compares "
        f"three methods that predict {TARGET}, with an encoder of 0.9 million parameters. It takes {size.duration}.",
        COHORT_NOTE,
        *([size.note] if size.note else []),
    ]
    for line in lines:
        console.print(line, markup=False)


def _print_results(size: DemoSize, results: DemoResults, console: Console) -> None:
    from tapfm.results.formatting import format_duration
    from tapfm.results.terminal import rich_table

    folder = results.folder
    for table in (results.aucs, results.attention_check):
        console.print()
        console.print(rich_table(table))
        for note in table.notes:
            console.print(note, markup=False)
    console.print()
    console.print(
        size.note
        or "In parentheses: 95% confidence intervals from resampled patients or slides. Paired tests are in study.md. "
        "Each method was trained with one seed; another seed gives other results. Synthetic slides show how tapfm "
        "works, not how well a method performs on real tissue.",
        markup=False,
    )
    console.print(f"\nThe demo took {format_duration(results.seconds)}. Results:")
    _print_with_comments(
        console,
        {
            str(folder.report): "study and predictions on one page; open it in a browser",
            str(folder.attention_check_image): "one slide with the planted signal and heatmaps",
            str(folder.predictions("external") / "per-slide"): "heatmaps and most influential tiles by slide",
            str(folder.study / "study.md"): "tables of the study; also as .csv and .tex in the same folder",
        },
    )
    console.print("Next steps:")
    _print_with_comments(
        console,
        {
            format_command("view", folder.predictions("external")): "zoom into slides and heatmaps in the browser",
            "tapfm inspect SLIDES/ --write-cohort cohort.csv": "start with your own slides",
            "tapfm encoders": "list the encoders that you can adapt",
            "tapfm doctor": "check which encoders and devices work on this machine",
        },
    )
    if shutil.which("tapfm") is None:  # after `make demo`, the environment is not active
        activate = Path(sys.executable).parent / "activate"
        print_line(console, f"To run these commands, first activate the environment: source {activate}")


def _print_with_comments(console: Console, lines: Mapping[str, str]) -> None:
    width = max(map(len, lines))
    for text, comment in lines.items():
        print_line(console, f"  {text:<{width}}  # {comment}")
