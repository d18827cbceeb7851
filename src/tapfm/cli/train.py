"""`tapfm train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console
from tapfm.runtime.messages import format_command, format_count
from tapfm.workflows import train as workflow

if TYPE_CHECKING:
    from tapfm.adaptation.training_run import TrainingResult


@command(workflow.TrainOptions)
def train(options: workflow.TrainOptions) -> None:
    """Adapt an encoder to slide labels, keep the best epoch, and predict the held-out slides.

    \b
    tapfm train run.toml --out runs/first
    tapfm train run.toml --out runs/half --set adaptation.lambda=0.5 --set seed=1
    tapfm train run.toml --out runs/first --resume   after Ctrl-C, a crash, ...

    Ctrl-C and SIGTERM save first. A run that was stopped is resumed in the middle
    of its epoch, with the same tiles; on a CPU with the same weights, bit by bit,
    as if it had not been stopped.

    \b
    config.toml, environment.json, split.csv   what it was made from
    history.jsonl, curves.png, tensorboard/    losses, AUC, speed, memory by epoch
    checkpoints/                               last (to resume) and best (weights)
    predictions-val.csv, predictions-test.csv  the best epoch, on all tiles
    failures.csv, summary.md                   what failed; the run on a page

    Exit code 3 when more slides failed than allowed, 130 after Ctrl-C, 143 after
    SIGTERM.
    """
    result = workflow.train.run(options, stderr_console())
    _print_result(result, stderr_console())
    if len(result.failed) > result.allowed_failures:
        raise typer.Exit(3)


def _print_result(result: TrainingResult, console: Console) -> None:
    for split, scores in result.scores.items():
        values = ", ".join(
            f"{target} {'-' if value is None else f'{value:.3f}'}" for target, value in scores.auc.items()
        )
        print_line(console, f"AUC on {format_count(scores.count, scores.unit)} of {split}, all tiles: {values}")
        for target, why in scores.undefined_reasons.items():
            print_line(console, f"  no AUC of {target}: {why}")
    folder = result.folder
    if result.failed:
        print_line(console, f"{format_count(len(result.failed), 'slide')} failed: {folder / 'failures.csv'}")
    print_line(console, f"Results: {folder}/summary.md and curves.png")
    following = format_command("evaluate", folder, "--out", Path("evaluations") / folder.name)
    print_line(console, f"Next: {following}")
    export = format_command("export", folder, "--out", Path("exported") / folder.name)
    print_line(console, f"To use it elsewhere: {export}")
