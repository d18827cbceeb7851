"""Table at the top of a report of runs: the main metric on each set of slides."""

from __future__ import annotations

from collections.abc import Sequence

from tapfm.evaluation.metric_values import target_title
from tapfm.report.slide_set_results import SlideSetResults
from tapfm.results.table import Cell, Column, Row, Table, table_row


def build_headline_table(named_results: Sequence[tuple[str, SlideSetResults]]) -> Table:
    """Return the main metric (AUC) of each target on each set of slides.

    named_results: pairs of run name and result; the name is empty if there is only one run.
    """
    rows: list[Row] = []
    for run_name, result in named_results:
        several_targets, main_metric = len(result.results.targets_and_mean) > 1, result.results.main_metrics[0]
        set_title = f"{run_name}, {result.title}" if run_name else result.title
        if several_targets:
            rows.append(Row(heading=set_title))
        for target in result.results.targets_and_mean:
            value = result.metrics.get((target, main_metric))
            if value is not None:
                positives = "" if value.positives is None else f"{value.positives:,} of {value.units:,}"
                row_title = target_title(target) if several_targets else set_title
                rows.append(table_row(row_title, Cell(value.estimate, rank=1), positives))
    units = {f"{result.unit}s" for _, result in named_results}
    positive = f"Positive {units.pop()}" if len(units) == 1 else "Positive"
    names = dict.fromkeys(result.results.metric_names[result.results.main_metrics[0]] for _, result in named_results)
    metric_column = f"{' or '.join(names)} (95% confidence interval)"
    several_targets = any(len(result.results.targets_and_mean) > 1 for _, result in named_results)
    first_column = "Target" if several_targets else "Slides"
    return Table([Column(first_column, text=True), Column(metric_column), Column(positive)], rows)
