"""`tapfm train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_command, format_count
from tapfm.workflows import train as workflow

if TYPE_CHECKING:
    from tapfm.adaptation.training_run import TrainingResult
    from tapfm.workflows.cross_validation import CrossValidation


@command(workflow.TrainOptions)
def train(options: workflow.TrainOptions) -> None:
    """Train a model: adapt an encoder to slide labels, and keep the weights of the best epoch.

    RUN.toml defines the cohort, the tiles and all settings. The weights of the
    epoch with the best validation AUC are kept and used to predict the
    validation and test slides. After Ctrl-C or SIGTERM, a checkpoint is saved. A
    resumed run continues in the middle of the epoch with the same tiles; on a
    CPU its weights are bit for bit the same as without the interruption.

    \b
    Examples:
      tapfm train run.toml --out runs/first
      tapfm train run.toml --out runs/first --resume   # after Ctrl-C or a crash
      tapfm train run.toml --out runs/half --set adaptation.lambda=0.5
      tapfm train run.toml --out runs/cv --folds 5     # cross-validation

    \b
    Output files:
      summary.md                                 summary of the run
      checkpoints/                               best (weights), last (to resume)
      predictions-val.csv, predictions-test.csv  predictions of the best epoch
      history.jsonl, curves.png, tensorboard/    losses, AUC, speed, memory
      config.toml, environment.json, split.csv   settings, versions, slides
      failures.csv                               slides and tiles that failed

    \b
    With --folds:
      fold-0/, fold-1/, ...                      run folder of each fold
      metrics.md, predictions.csv, roc.png, ...  out-of-fold results of all folds
      ensemble.json                              all folds as one model
      folds.csv                                  cohort table with new folds

    Exit code 3 if more slides failed than --allow-failures, 130 after Ctrl-C,
    143 after SIGTERM.
    """
    result = workflow.train.run(options, stderr_console())
    if options.folds is None:
        _print_result(cast("TrainingResult", result), stderr_console())
    else:
        _print_cross_validation(cast("CrossValidation", result), stdout_console(), stderr_console())
    if len(result.failed) > result.allowed_failures:
        raise typer.Exit(3)


def _print_result(result: TrainingResult, console: Console) -> None:
    for split, scores in result.scores.items():
        values = ", ".join(
            f"{target} {'-' if value is None else f'{value:.3f}'}" for target, value in scores.auc.items()
        )
        print_line(console, f"AUC on {split} ({format_count(scores.count, scores.unit)}, all tiles): {values}")
        for target, reason in scores.undefined_reasons.items():
            print_line(console, f"  no AUC for {target}: {reason}")
    folder = result.folder
    if result.failed:
        print_line(console, f"{format_count(len(result.failed), 'slide')} failed. Reasons: {folder / 'failures.csv'}")
    print_line(console, f"Results: {folder / 'summary.md'} and {folder / 'curves.png'}")
    if "test" in result.scores:  # without test slides, `tapfm evaluate` needs other options
        next_command = format_command("evaluate", folder, "--out", Path("evaluations") / folder.name)
        print_line(console, f"Next: {next_command}")
    export = format_command("export", folder, "--out", Path("exported") / folder.name)
    print_line(console, f"To use the model in other programs: {export}")


def _print_cross_validation(result: CrossValidation, console: Console, stderr: Console) -> None:
    from tapfm.results.terminal import rich_table

    folder, table = result.folder, result.table
    console.print(rich_table(table))
    for note in table.notes:
        print_line(stderr, note)
    if result.failed:
        print_line(stderr, f"{format_count(len(result.failed), 'slide')} failed. Reasons: {folder / 'failures.csv'}")
    print_line(stderr, f"Results: {folder / 'metrics.md'} and {folder / 'roc.png'}")
    report = format_command("report", folder, "--out", f"{folder.name}.html")
    print_line(stderr, f"Next: {report}")
    evaluate = format_command("evaluate", folder, "--cohort", "EXTERNAL.csv", "--tiles", "DIR", "--out", "DIR")
    print_line(stderr, f"To evaluate the ensemble of all folds on another cohort: {evaluate}")
