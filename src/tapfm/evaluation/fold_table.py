"""The table of a cross-validation: the main metric of each fold, and of the out-of-fold predictions of all folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from tapfm.evaluation.metric_tables import MODEL, EvaluationResults
from tapfm.evaluation.metric_values import MetricValue, target_title
from tapfm.results.estimate import Estimate
from tapfm.results.table import Cell, Column, Row, Table, table_row

_POOLED_NOTE = (
    "The pooled {metric} compares scores of different models with each other, so it can differ from the mean of the "
    "folds."
)


def build_fold_table(folds: Mapping[str, EvaluationResults], pooled: EvaluationResults) -> Table:
    """Return the main metric (AUC) of each fold on its test slides, the mean of the folds, and the pooled metric.

    folds: by the name of the fold. pooled: results of the out-of-fold predictions of all folds.
    """
    metric, targets = pooled.main_metrics[0], pooled.targets_and_mean
    models = pooled.models
    rows: list[Row] = []
    for target in targets:
        if len(targets) > 1:
            rows.append(Row(heading=target_title(target)))
        values = {name: _select_values(results, models, target, metric) for name, results in folds.items()}
        rows += [_value_row(name, by_model) for name, by_model in values.items()]
        means = [_mean_of_folds([by_model[index] for by_model in values.values()]) for index in range(len(models))]
        rows.append(table_row("mean of the folds", None, None, *means))
        rows.append(_value_row("out-of-fold, pooled", _select_values(pooled, models, target, metric), rank=1))
    name, unit = pooled.metric_names[metric], pooled.about["unit"]
    columns = [Column("fold", text=True), Column(f"test {unit}s"), Column("positive")]
    columns += [Column(name if model == MODEL else f"{model} {name}", text=True) for model in models]
    return Table(columns, rows, notes=[_POOLED_NOTE.format(metric=name)])


def _select_values(
    results: EvaluationResults, models: Sequence[str], target: str, metric: str
) -> list[MetricValue | None]:
    """Return the metric of each model."""
    return [results.select_metrics(model).get((target, metric)) for model in models]


def _value_row(name: str, by_model: Sequence[MetricValue | None], rank: int = 0) -> Row:
    """Return the row of a fold: number of units and positives, and the metric of each model."""
    first = by_model[0]
    counts = (None, None) if first is None else (first.units, first.positives)
    estimates = [Cell(None if each is None else each.estimate, rank=rank) for each in by_model]
    return table_row(name, *counts, *estimates)


def _mean_of_folds(values: Sequence[MetricValue | None]) -> Estimate:
    """Return the mean over the folds that have a value, without a confidence interval."""
    known = [each.estimate.value for each in values if each is not None and each.estimate.value is not None]
    missing = len(values) - len(known)
    reason = f"mean without {missing} of {len(values)} folds, which have no value" if known and missing else ""
    return Estimate(fmean(known) if known else None, reason=reason)
