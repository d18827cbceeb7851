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

_WIDE_TERMINAL = 150  # characters; narrower terminals show only the first metric


@command(workflow.EvaluateOptions)
def evaluate(options: workflow.EvaluateOptions) -> None:
    """Evaluate a model on the test slides of its cohort, or on another cohort.

    Predicts each slide from all of its tiles. Computes metrics with 95%
    confidence intervals from a patient bootstrap, and DeLong intervals of the
    AUC. Thresholds are chosen on the validation slides. If these are evaluated
    too (--split val or all), the metrics at the thresholds are optimistic. A
    baseline that only uses colours and the number of tiles is evaluated as
    well, to detect shortcuts.

    \b
    Examples:
      tapfm evaluate runs/first --out evaluations/first
      tapfm evaluate runs/first --by scanner --unit patient --out evaluations/by
      tapfm evaluate runs/first --cohort external.csv --tiles tiles-external \\
          --out evaluations/external

    \b
    Output files:
      metrics.md, metrics.csv, metrics.json   metrics with confidence intervals
      predictions.csv                         one row per slide and target
      predictions-baseline.csv                predictions of the colour baseline
      roc.png, pr.png, reliability.png, scores.png
      failures.csv                            slides and tiles that failed
      evaluation.json                         model, cohort table and settings

    Exit code 3 if more slides failed than --allow-failures; the others are
    evaluated.
    """
    evaluation = workflow.evaluate.run(options, stderr_console())
    _print_evaluation(evaluation, stdout_console(), stderr_console())
    if len(evaluation.failed) > options.allow_failures:
        raise typer.Exit(3)


def _print_evaluation(evaluation: Evaluation, console: Console, stderr: Console) -> None:
    from tapfm.evaluation.metric_tables import MODEL, build_overview_table
    from tapfm.results.terminal import rich_table
    from tapfm.tasks.target import BASELINE

    results, folder = evaluation.results, evaluation.folder
    # all metrics are in metrics.md
    metrics = results.main_metrics if console.width >= _WIDE_TERMINAL else results.main_metrics[:1]
    console.print(rich_table(build_overview_table(results, metrics)))
    _print_missing_metrics(results.select_metrics(MODEL).values(), stderr)
    if BASELINE not in results.models:
        print_line(stderr, results.baseline_note)
    if results.failed:
        failed = format_count(len(results.failed), "slide")
        print_line(stderr, f"{failed} failed. Reasons: {folder / 'failures.csv'}")
    print_line(stderr, f"Results: {folder / 'metrics.md'} and {folder / 'roc.png'}")
    next_command = format_command("compare", folder, "OTHER", "--out", "comparison")
    print_line(stderr, f"To compare it with another model: {next_command}")


def _print_missing_metrics(metrics: Iterable[MetricValue], stderr: Console) -> None:
    missing = dict.fromkeys(
        (each.target, each.estimate.reason) for each in metrics if each.estimate.value is None and each.estimate.reason
    )
    for target, reason in missing:
        print_line(stderr, f"  Metrics not computed for {target}: {reason}")
