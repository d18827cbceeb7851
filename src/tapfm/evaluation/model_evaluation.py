"""Evaluate predictions: metrics of the model (also on subgroups) and of the baseline, and their AUC difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from tapfm.errors import SettingError
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, MetricRow
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds, compute_metrics
from tapfm.evaluation.model_comparison import PairedComparison, compare_models
from tapfm.evaluation.predictions import Prediction, Unit
from tapfm.evaluation.subgroups import Subgroup, evaluate_subgroup
from tapfm.tasks.target import BASELINE, TargetKinds


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings for the metrics, thresholds, subgroups and bootstrap of an evaluation."""

    unit: Unit | None = None  # None: the unit of model selection in the run; slide for an export
    sensitivity: float = 0.9
    by: tuple[str, ...] = ()  # columns for subgroups
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sensitivity <= 1:
            raise SettingError(f"--sensitivity must be above 0 and at most 1; got {self.sensitivity:g}.")
        if self.resamples < 1:
            raise SettingError(f"--resamples must be at least 1; got {self.resamples}.")


def parse_evaluation_settings(
    unit: str | None, sensitivity: float, by: Sequence[str], resamples: int
) -> EvaluationSettings:
    """Return the settings for options of the command line."""
    known: Unit | None = next((each for each in get_args(Unit) if each == unit), None)
    if unit is not None and known is None:
        raise SettingError(f"--unit must be slide or patient; got '{unit}'.")
    return EvaluationSettings(known, sensitivity, tuple(by), resamples)


@dataclass(frozen=True)
class BaselinePredictions:
    """Predictions of the baseline for evaluated and for validation slides; empty if it could not be fitted."""

    predictions: tuple[Prediction, ...]
    validation: tuple[Prediction, ...]
    note: str  # what the baseline was fitted to, or why there is none


@dataclass(frozen=True)
class EvaluatedTable:
    """Name of an evaluated cohort table, the targets it has no column for, and its slides without any label."""

    name: str
    missing_targets: tuple[str, ...]  # targets without a column
    slides_without_label: tuple[str, ...]  # slides without any label


def evaluate_predictions(
    predictions: Sequence[Prediction],
    targets: TargetKinds,
    settings: EvaluationSettings,
    *,
    thresholds: ChosenThresholds,
    groups: Sequence[Subgroup],
    baseline: BaselinePredictions,
    table: EvaluatedTable,
    about: dict[str, Any],
) -> EvaluationResults:
    """Return the metrics of the model (also on subgroups) and of the baseline, and their AUC difference."""
    unit = settings.unit
    assert unit is not None
    bootstrap = {"resamples": settings.resamples, "seed": settings.seed}
    rows = [
        MetricRow(MODEL, "", each)
        for each in compute_metrics(predictions, targets, unit, thresholds.thresholds, **bootstrap)
    ]
    for group in groups:
        rows += [
            MetricRow(MODEL, group.name, each)
            for each in evaluate_subgroup(group, predictions, targets, unit, **bootstrap)
        ]
    evaluated_slides = {each.slide_id for each in predictions}
    baseline_predictions = [each for each in baseline.predictions if each.slide_id in evaluated_slides]
    differences: tuple[PairedComparison, ...] = ()
    if baseline_predictions:
        baseline_thresholds = None
        if baseline.validation:
            baseline_thresholds = choose_thresholds(baseline.validation, targets, unit, settings.sensitivity)
        rows += [
            MetricRow(BASELINE, "", each)
            for each in compute_metrics(baseline_predictions, targets, unit, baseline_thresholds, **bootstrap)
        ]
        differences = compare_models(
            {MODEL: [predictions], BASELINE: [baseline_predictions]},
            targets,
            unit,
            resamples=settings.resamples,
            seed=settings.seed,
        ).pairs
    return EvaluationResults(
        about,
        targets,
        [_add_reason(row, table, thresholds, targets) for row in rows],
        thresholds,
        baseline.note,
        differences,
        slides_without_label=table.slides_without_label,
        slide_count=len(predictions),
        patient_count=len({(each.cohort, each.patient_id) for each in predictions}),
    )


def _add_reason(row: MetricRow, table: EvaluatedTable, chosen: ChosenThresholds, targets: TargetKinds) -> MetricRow:
    """Return the row with a more specific reason for a missing metric: an absent column, or no threshold."""
    each = row.metric_value
    if each.target in table.missing_targets:
        reason = f"{table.name} has no column {each.target}"
    elif (
        row.model == MODEL
        and each.estimate.value is None
        and (threshold_reason := _explain_missing_threshold(each.metric, chosen, targets))
    ):
        reason = f"no threshold: {threshold_reason}"
    else:
        return row
    delong = None if each.delong is None else replace(each.delong, reason=reason)
    return replace(row, metric_value=replace(each, estimate=replace(each.estimate, reason=reason), delong=delong))


def _explain_missing_threshold(metric: str, chosen: ChosenThresholds, targets: TargetKinds) -> str:
    """Return why no target has the threshold that a metric needs; empty if this is not the reason."""
    threshold = next(kind.threshold_name(metric) for kind in targets.values() if metric in kind.metrics)
    if not threshold:
        return ""
    if chosen.thresholds is None:
        return chosen.source
    return chosen.no_at_sensitivity_reason if threshold == "at_sensitivity" else ""
