"""The table at the top of a report: AUCs on held-out slides."""

from __future__ import annotations

from collections.abc import Sequence

from tapfm.evaluation.metric_values import target_title
from tapfm.report.result import EvaluatedSlideSet
from tapfm.results.table import Cell, Column, Row, Table, table_row


def headline_table(results: Sequence[tuple[str, EvaluatedSlideSet]]) -> Table:
    """Return the AUC of each target on each set of slides; results come with the name of their model, or none."""
    rows: list[Row] = []
    for model, result in results:
        several, first = len(result.results.columns) > 1, result.results.main_metrics[0]
        name = f"{model}, {result.title}" if model else result.title
        if several:
            rows.append(Row(heading=name))
        for target in result.results.columns:
            found = result.metrics.get((target, first))
            if found is not None:
                positives = "" if found.positives is None else f"{found.positives:,} of {found.units:,}"
                title = target_title(target) if several else name
                rows.append(table_row(title, Cell(found.estimate, rank=1), positives))
    units = {f"{result.unit}s" for _, result in results}
    positive = f"Positive {units.pop()}" if len(units) == 1 else "Positive"
    scores = dict.fromkeys(result.results.metric_names[result.results.main_metrics[0]] for _, result in results)
    score = f"{' or '.join(scores)}, 95% confidence interval"
    return Table([Column("", text=True), Column(score), Column(positive)], rows)
