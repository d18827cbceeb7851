"""From predictions to figures: the model, its subgroups, the baseline, and the difference between the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from tapfm.errors import SettingError
from tapfm.evaluation.method_comparison import PairedComparison, compare_methods
from tapfm.evaluation.metric_tables import MODEL, EvaluationResults, MetricRow
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds, compute_metrics
from tapfm.evaluation.predictions import Prediction, Unit
from tapfm.evaluation.subgroups import Subgroup, evaluate_subgroup
from tapfm.tasks.target import BASELINE, TargetKinds


@dataclass(frozen=True)
class EvaluationSettings:
    """How figures are made of predictions."""

    unit: Unit | None = None  # None: as the run was selected by
    sensitivity: float = 0.9
    by: tuple[str, ...] = ()
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.sensitivity <= 1:
            raise SettingError(f"--sensitivity must be above 0, up to 1; got {self.sensitivity:g}.")
        if self.resamples < 1:
            raise SettingError(f"--resamples must be at least 1; got {self.resamples}.")


def parse_evaluation_settings(
    unit: str | None, sensitivity: float, by: Sequence[str], resamples: int
) -> EvaluationSettings:
    """Read settings as they are typed."""
    known: Unit | None = next((each for each in get_args(Unit) if each == unit), None)
    if unit is not None and known is None:
        raise SettingError(f"--unit must be slide or patient; got '{unit}'.")
    return EvaluationSettings(known, sensitivity, tuple(by), resamples)


@dataclass(frozen=True)
class BaselinePredictions:
    """Predictions of a baseline on the evaluated and on the validation slides; none where it could not be fitted."""

    predictions: tuple[Prediction, ...]
    validation: tuple[Prediction, ...]
    note: str  # what the baseline was fitted on, or why there is none


@dataclass(frozen=True)
class EvaluatedTable:
    """The cohort table behind an evaluation: its name, and what it lacks."""

    name: str
    absent_targets: tuple[str, ...]  # targets without a column
    without_label: tuple[str, ...]  # slides


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
    """Measure the model, its subgroups, the baseline, and the difference between the two."""
    unit = settings.unit
    assert unit is not None
    drawn = {"resamples": settings.resamples, "seed": settings.seed}
    rows = [
        MetricRow(MODEL, "", each)
        for each in compute_metrics(predictions, targets, unit, thresholds.thresholds, **drawn)
    ]
    for group in groups:
        rows += [
            MetricRow(MODEL, group.name, each) for each in evaluate_subgroup(group, predictions, targets, unit, **drawn)
        ]
    evaluated_slides = {each.slide_id for each in predictions}
    of_baseline = [each for each in baseline.predictions if each.slide_id in evaluated_slides]
    differences: tuple[PairedComparison, ...] = ()
    if of_baseline:
        its_own = (
            choose_thresholds(baseline.validation, targets, unit, settings.sensitivity) if baseline.validation else None
        )
        rows += [
            MetricRow(BASELINE, "", each) for each in compute_metrics(of_baseline, targets, unit, its_own, **drawn)
        ]
        differences = compare_methods(
            {MODEL: [predictions], BASELINE: [of_baseline]},
            targets,
            unit,
            resamples=settings.resamples,
            seed=settings.seed,
        ).pairs
    return EvaluationResults(
        about,
        targets,
        [_with_reason(row, table, thresholds, targets) for row in rows],
        thresholds,
        baseline.note,
        differences,
        without_label=table.without_label,
        slides=len(predictions),
        patients=len({(each.cohort, each.patient_id) for each in predictions}),
    )


def _with_reason(row: MetricRow, table: EvaluatedTable, chosen: ChosenThresholds, targets: TargetKinds) -> MetricRow:
    """Say why a metric is missing where only this evaluation knows."""
    each = row.metric_value
    if each.target in table.absent_targets:
        reason = f"{table.name} has no column {each.target}"
    elif (
        row.model == MODEL
        and each.estimate.value is None
        and (lacking := _why_no_threshold(each.metric, chosen, targets))
    ):
        reason = f"no threshold: {lacking}"
    else:
        return row
    delong = None if each.delong is None else replace(each.delong, reason=reason)
    return replace(row, metric_value=replace(each, estimate=replace(each.estimate, reason=reason), delong=delong))


def _why_no_threshold(metric: str, chosen: ChosenThresholds, targets: TargetKinds) -> str:
    """Say why no target has the threshold that a metric is measured at; nothing where that is not the reason."""
    threshold = next(kind.threshold_name(metric) for kind in targets.values() if metric in kind.metrics)
    if not threshold:
        return ""
    if chosen.thresholds is None:
        return chosen.source
    return chosen.missing_reason if threshold == "at_sensitivity" else ""
