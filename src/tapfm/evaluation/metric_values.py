"""Compute every metric of every target with confidence intervals, and the mean over targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapfm.evaluation.labelled_units import LabelledUnits, select_labelled_units
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction, Unit, pool_by_unit
from tapfm.metrics.arrays import Floats
from tapfm.metrics.bootstrap import RESAMPLES, Resamples, percentile_interval
from tapfm.results.estimate import Estimate
from tapfm.tasks.target import TargetKinds, TargetThresholds

MACRO = "macro"  # in place of a target: the mean over targets


def target_title(target: str) -> str:
    """Return the name of a target, or of the mean over targets, for tables."""
    return "mean of targets" if target == MACRO else target


@dataclass(frozen=True)
class Thresholds:
    """Thresholds by target, chosen on the validation split; None if a target has none."""

    youden: Mapping[str, float | None]
    at_sensitivity: Mapping[str, float | None]  # the highest thresholds that reach `sensitivity`
    sensitivity: float


@dataclass(frozen=True)
class ChosenThresholds:
    """Thresholds and the slides that they were chosen on, or the reason why there are none."""

    thresholds: Thresholds | None
    source: str  # such as "16 validation slides of the run"; without thresholds, the reason
    no_at_sensitivity_reason: str = ""  # why `at_sensitivity` has no thresholds although `youden` has


@dataclass(frozen=True)
class MetricValue:
    """A metric of one target, or its mean over the targets that have it ("macro"), with bootstrap interval."""

    target: str
    metric: str
    estimate: Estimate
    delong: Estimate | None  # only for the AUC of one target
    units: int  # number of units with a label
    positives: int | None


def choose_thresholds(
    validation: Sequence[Prediction], targets: TargetKinds, unit: Unit, sensitivity: float = 0.9
) -> Thresholds:
    """Choose the thresholds of each target on predictions for validation slides."""
    chosen: dict[str, TargetThresholds] = {}
    for target, kind in targets.items():
        units = pool_by_unit(validation, {target: kind}, unit)
        labelled = select_labelled_units(units, target, kind, unit)
        chosen[target] = kind.choose_thresholds(labelled.truth, labelled.logits, sensitivity)
    youden = {target: each.youden for target, each in chosen.items()}
    return Thresholds(youden, {target: each.at_sensitivity for target, each in chosen.items()}, sensitivity)


def compute_metrics(
    predictions: Sequence[Prediction],
    targets: TargetKinds,
    unit: Unit,
    thresholds: Thresholds | None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[MetricValue]:
    """Return every metric of every target, followed by the means over targets if there are several."""
    units = pool_by_unit(predictions, targets, unit)
    labelled_units = [select_labelled_units(units, target, kind, unit) for target, kind in targets.items()]
    found = []
    for labelled in labelled_units:
        kind, target_thresholds = labelled.kind, _select_thresholds(labelled.target, thresholds)
        # stratified by this target only, so that its interval does not depend on other targets
        drawn = resample_patients(units, {labelled.target: kind}, resamples=resamples, seed=seed)
        values = kind.compute_metrics(labelled.truth, labelled.logits, target_thresholds)
        resampled = _compute_resampled_metrics([labelled], thresholds, drawn)[0]
        positives, labels = kind.count_positives(labelled.labels)
        for metric in kind.metrics:
            reason = labelled.no_interval_reason
            if values[metric] is None:
                reason = kind.explain_missing_metric(metric, labelled.target, labelled.labels, target_thresholds, unit)
            estimate = percentile_interval(values[metric], resampled[metric], reason=reason)
            delong = _compute_delong_interval(metric, labelled, unit)
            found.append(MetricValue(labelled.target, metric, estimate, delong, labels, positives))
    if len(targets) > 1:
        drawn = resample_patients(units, targets, resamples=resamples, seed=seed)
        joint = _compute_resampled_metrics(labelled_units, thresholds, drawn)
        no_interval_reasons = {labelled.target: labelled.no_interval_reason for labelled in labelled_units}
        for metric in [name for name in labelled_units[0].kind.metrics if all(name in each for each in joint)]:
            by_target = [each for each in found if each.metric == metric]
            estimate = _average_targets(by_target, [each[metric] for each in joint], no_interval_reasons)
            found.append(MetricValue(MACRO, metric, estimate, None, len(units), None))
    return found


def _compute_resampled_metrics(
    labelled_units: Sequence[LabelledUnits], thresholds: Thresholds | None, resamples: Resamples
) -> list[dict[str, Floats]]:
    """Return every metric of every target in every resample; NaN if undefined."""
    found = [{metric: np.full(len(resamples), np.nan) for metric in each.kind.metrics} for each in labelled_units]
    for rows, unit_weights in resamples.blocks():
        for labelled, by_metric in zip(labelled_units, found, strict=True):
            resampled = labelled.kind.compute_resampled_metrics(
                unit_weights[:, labelled.indices],
                labelled.truth,
                labelled.logits,
                _select_thresholds(labelled.target, thresholds),
            )
            for metric, values in resampled.items():
                by_metric[metric][rows] = values
    return found


def _select_thresholds(target: str, thresholds: Thresholds | None) -> TargetThresholds | None:
    """Return the thresholds of one target."""
    if thresholds is None:
        return None
    return TargetThresholds(thresholds.youden.get(target), thresholds.at_sensitivity.get(target))


def _compute_delong_interval(metric: str, labelled: LabelledUnits, unit: Unit) -> Estimate | None:
    """Return a metric with DeLong's confidence interval, or the reason why it has none; None unless it is the AUC."""
    found = labelled.kind.compute_analytic_interval(
        metric, labelled.truth, labelled.logits, unit=unit, clustered=labelled.clustered
    )
    if found is None or labelled.clustered or not labelled.undefined_reason:
        return found
    return replace(found, reason=labelled.undefined_reason)


def _average_targets(
    values: Sequence[MetricValue], resampled: Sequence[Floats], no_interval_reasons: Mapping[str, str]
) -> Estimate:
    """Return the mean of a metric over the targets that have a value, with the interval of this mean.

    no_interval_reasons: why a target has no confidence interval, by target; empty if it has one.
    """
    defined = [index for index, each in enumerate(values) if each.estimate.value is not None]
    missing = [f"{each.target}: {each.estimate.reason}" for each in values if each.estimate.value is None]
    if not defined:
        return Estimate(None, reason="; ".join(missing))
    mean = sum(values[index].estimate.value or 0.0 for index in defined) / len(defined)
    reasons = [
        f"{no_interval_reasons[target]} ({target})"
        for index in defined
        if no_interval_reasons[target := values[index].target]
    ]
    mean_resampled = np.mean([resampled[index] for index in defined], axis=0)
    estimate = percentile_interval(mean, mean_resampled, reason="; ".join(reasons))
    notes = [f"mean without {each}" for each in missing] + [estimate.reason] * bool(estimate.reason)
    return replace(estimate, reason="; ".join(notes))
