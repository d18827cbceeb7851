"""`tapfm evaluate`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_command, format_count
from tapfm.workflows import evaluate as workflow

if TYPE_CHECKING:
    from tapfm.evaluation.metric_values import MetricValue
    from tapfm.workflows.evaluation_run import Evaluation

_WIDE = 150  # columns of a terminal that hold all metrics of a target on a line


@command(workflow.EvaluateOptions)
def evaluate(options: workflow.EvaluateOptions) -> None:
    """Evaluate a model on held-out slides, or on another cohort.

    \b
    tapfm evaluate runs/first --out evaluations/first
    tapfm evaluate runs/first --by scanner --unit patient --out evaluations/by
    tapfm evaluate runs/first --cohort external.csv --tiles tiles-external \\
        --out evaluations/external

    All tiles of each slide; 95% confidence intervals by resampling patients, and
    DeLong's. Thresholds come from validation slides, never from the slides that
    are evaluated. A baseline of colours and tile count is evaluated beside the
    model, so that shortcuts show.

    \b
    predictions.csv                 each slide and target; -baseline: by colours
    metrics.md, .csv, .json         metrics with intervals: a page, tidy, complete
    roc.png, pr.png, reliability.png, scores.png
    failures.csv                    what could not be read
    evaluation.json                 which weights, on which table

    Exit code 3 when more slides failed than allowed; the others are evaluated.
    """
    evaluation = workflow.evaluate.run(options, stderr_console())
    _print_evaluation(evaluation, stdout_console(), stderr_console())
    if len(evaluation.failed) > options.allow_failures:
        raise typer.Exit(3)


def _print_evaluation(evaluation: Evaluation, console: Console, stderr_console: Console) -> None:
    from tapfm.evaluation.metric_tables import MODEL, overview_table
    from tapfm.results.terminal import rich_table
    from tapfm.tasks.target import BASELINE

    results, folder = evaluation.results, evaluation.folder
    # metrics.md has the other metrics
    metrics = results.main_metrics if console.width >= _WIDE else results.main_metrics[:1]
    console.print(rich_table(overview_table(results, metrics)))
    _print_missing(results.select_metrics(MODEL).values(), stderr_console)
    if BASELINE not in results.models:
        print_line(stderr_console, results.baseline_note)
    if results.failed:
        failed = format_count(len(results.failed), "slide")
        print_line(stderr_console, f"{failed} failed: {folder / 'failures.csv'}")
    print_line(stderr_console, f"Results: {folder / 'metrics.md'} and {folder / 'roc.png'}")
    following = format_command("compare", folder, "OTHER", "--out", "comparison")
    print_line(stderr_console, f"Next, compare it with another: {following}")


def _print_missing(measured: Iterable[MetricValue], stderr_console: Console) -> None:
    reasons = dict.fromkeys(
        f"{each.target}: {each.estimate.reason}"
        for each in measured
        if each.estimate.value is None and each.estimate.reason
    )
    for reason in reasons:
        print_line(stderr_console, f"  empty: {reason}")
