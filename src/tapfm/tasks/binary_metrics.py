"""The metrics of a binary target by name: values, resampled values, and reasons for missing values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from tapfm.metrics import weighted
from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.calibration import brier_score, expected_calibration_error
from tapfm.metrics.ranking import auc, average_precision
from tapfm.metrics.thresholds import compute_threshold_metrics
from tapfm.tasks.target import TargetThresholds

_Value = TypeVar("_Value")

METRIC_NAMES = {  # metric: name in tables
    "auc": "AUC",
    "average_precision": "average precision",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
    "balanced_accuracy": "balanced accuracy",
    "f1": "F1",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "PPV",
    "npv": "NPV",
    "sensitivity_at_chosen": "sensitivity",
    "specificity_at_chosen": "specificity",
    "ppv_at_chosen": "PPV",
    "npv_at_chosen": "NPV",
}
_METRICS = tuple(METRIC_NAMES)
THRESHOLD_FREE = _METRICS[:4]
MAIN_METRICS = THRESHOLD_FREE[:3]  # shown for subgroups and for the baseline
_AT_SENSITIVITY = "_at_chosen"  # suffix of metrics at the threshold that reaches a sensitivity
METRICS_AT_SENSITIVITY = tuple(name for name in _METRICS if name.endswith(_AT_SENSITIVITY))


def compute_metrics(
    positive: Flags, logits: Floats, probabilities: Floats, thresholds: TargetThresholds | None
) -> dict[str, float | None]:
    """Return the value of each metric; None if it is undefined.

    AUC and average precision are computed from logits, because probabilities near 1 can be rounded to ties.
    """
    values: dict[str, float | None] = dict.fromkeys(_METRICS)
    values["auc"] = auc(positive, logits)
    values["average_precision"] = average_precision(positive, logits)
    values["brier"] = brier_score(positive, probabilities)
    values["ece"] = expected_calibration_error(positive, probabilities)
    for suffix, threshold in _thresholds_by_suffix(thresholds).items():
        values |= _add_suffix(asdict(compute_threshold_metrics(positive, probabilities, threshold)), suffix)
    return values


def compute_resampled_metrics(
    weights: Floats, positive: Flags, logits: Floats, probabilities: Floats, thresholds: TargetThresholds | None
) -> dict[str, Floats]:
    """Return every metric in every resample (a row of weights); NaN if a metric is undefined."""
    resampled = {metric: np.full(len(weights), np.nan) for metric in _METRICS}
    resampled["auc"] = weighted.aucs(weights, positive, logits)
    resampled["average_precision"] = weighted.average_precisions(weights, positive, logits)
    resampled["brier"] = weighted.brier_scores(weights, positive, probabilities)
    resampled["ece"] = weighted.calibration_errors(weights, positive, probabilities)
    for suffix, threshold in _thresholds_by_suffix(thresholds).items():
        resampled |= _add_suffix(weighted.threshold_metrics(weights, positive, probabilities, threshold), suffix)
    return resampled


def _thresholds_by_suffix(thresholds: TargetThresholds | None) -> dict[str, float]:
    """Return each threshold by the suffix in the names of its metrics. Thresholds that are None are omitted."""
    both = {} if thresholds is None else {"": thresholds.youden, _AT_SENSITIVITY: thresholds.at_sensitivity}
    return {suffix: threshold for suffix, threshold in both.items() if threshold is not None}


def _add_suffix(metrics: Mapping[str, _Value], suffix: str) -> dict[str, _Value]:
    """Add a suffix to the names of metrics. Names that are then not in `_METRICS` are dropped."""
    return {name + suffix: value for name, value in metrics.items() if name + suffix in _METRICS}


def explain_missing_metric(
    metric: str, target: str, undefined_reason: str, thresholds: TargetThresholds | None, unit: str, *, labelled: bool
) -> str:
    """Return why a metric of a target has no value."""
    if not labelled or metric in THRESHOLD_FREE:
        return undefined_reason
    if thresholds is None:
        return "no threshold: there are no validation predictions"
    at_sensitivity = metric in METRICS_AT_SENSITIVITY
    if (thresholds.at_sensitivity if at_sensitivity else thresholds.youden) is None:
        missing = "no positive label" if at_sensitivity else "labels of at most one class"
        return f"no threshold: {target} has {missing} in the validation split"
    predicted = {"ppv": "positive", "npv": "negative"}.get(metric.removesuffix(_AT_SENSITIVITY))
    return f"no {unit} is predicted {predicted}" if predicted else undefined_reason
