"""`tapfm evaluate`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tapfm.cli.command import command
from tapfm.cli.console import messages, print_line, terminal
from tapfm.runtime.messages import command as command_text
from tapfm.runtime.messages import counted
from tapfm.workflows import evaluate as workflow

if TYPE_CHECKING:
    from tapfm.evaluation.comparing import PairedComparison
    from tapfm.evaluation.measures import MetricValue
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
    evaluation = workflow.evaluate.run(options, messages())
    _print_evaluation(evaluation, terminal(), messages())
    if len(evaluation.failed) > options.allow_failures:
        raise typer.Exit(3)


def _print_evaluation(evaluation: Evaluation, console: Console, messages: Console) -> None:
    from tapfm.evaluation.estimate_text import format_estimate
    from tapfm.evaluation.measures import target_title
    from tapfm.evaluation.metric_tables import MODEL
    from tapfm.evaluation.results import BASELINE
    from tapfm.tasks.catalog import target_kinds

    results, folder = evaluation.results, evaluation.folder
    found = results.of(MODEL)
    baseline = results.of(BASELINE) if BASELINE in results.models else {}
    differences = {pair.target: pair for pair in results.differences}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("target", f"{results.about['unit']}s", "positive"):
        table.add_column(name, justify="left" if name == "target" else "right")
    # metrics.md has the others
    kind = next(iter(target_kinds(results.about["targets"]).values()))
    first = kind.main_metrics[0]
    metrics = kind.main_metrics if console.width >= _WIDE else (first,)
    for name in (*(kind.metrics[metric] for metric in metrics), f"{kind.metrics[first]} of colours", "difference"):
        table.add_column(name)
    for target in results.columns:
        each = found[target, first]
        pair = differences.get(target)
        table.add_row(
            escape(target_title(target)),
            f"{each.units:,}",
            "" if each.positives is None else f"{each.positives:,}",
            *(format_estimate(found[target, metric].estimate) for metric in metrics),
            format_estimate(baseline[target, first].estimate) if baseline else "-",
            "-" if pair is None else _difference_text(pair),
        )
    console.print(table)
    _print_missing(found.values(), messages)
    if BASELINE not in results.models:
        print_line(messages, results.baseline_said)
    if results.failed:
        failed = counted(len(results.failed), "slide")
        print_line(messages, f"{failed} failed: {folder / 'failures.csv'}")
    print_line(messages, f"Results: {folder / 'metrics.md'} and {folder / 'roc.png'}")
    following = command_text("compare", folder, "OTHER", "--out", "comparison")
    print_line(messages, f"Next, compare it with another: {following}")


def _difference_text(pair: PairedComparison) -> str:
    from tapfm.evaluation.estimate_text import format_estimate, format_p_value

    p = pair.p_delong if pair.p_delong is not None else pair.p_bootstrap
    return format_estimate(pair.difference, sign=True) + ("" if p is None else f", p {format_p_value(p)}")


def _print_missing(measured: Iterable[MetricValue], messages: Console) -> None:
    reasons = dict.fromkeys(
        f"{each.target}: {each.estimate.why}" for each in measured if each.estimate.value is None and each.estimate.why
    )
    for reason in reasons:
        print_line(messages, f"  empty: {reason}")
