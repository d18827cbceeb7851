"""The metrics of a binary target, by name: as they are, in resamples, and why one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from tapfm.metrics import weighted
from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.calibration import brier, expected_calibration_error
from tapfm.metrics.ranking import auc, average_precision
from tapfm.metrics.thresholds import rates
from tapfm.tasks.target import TargetThresholds

_Value = TypeVar("_Value")

NAMES = {  # of every metric, for tables
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
_METRICS = tuple(NAMES)
THRESHOLD_FREE = _METRICS[:4]
BESIDE = THRESHOLD_FREE[:3]  # of subgroups, and of the model beside the baseline
_AT_CHOSEN = "_at_chosen"
BY_CHOSEN = tuple(name for name in _METRICS if name.endswith(_AT_CHOSEN))


def compute_values(
    positive: Flags, logits: Floats, probabilities: Floats, thresholds: TargetThresholds | None
) -> dict[str, float | None]:
    """Compute every metric. AUC and average precision rank logits: probabilities near 0 and 1 are rounded to ties."""
    values: dict[str, float | None] = dict.fromkeys(_METRICS)
    values["auc"] = auc(positive, logits)
    values["average_precision"] = average_precision(positive, logits)
    values["brier"] = brier(positive, probabilities)
    values["ece"] = expected_calibration_error(positive, probabilities)
    for ending, threshold in _by_ending(thresholds).items():
        values |= _with_ending(asdict(rates(positive, probabilities, threshold)), ending)
    return values


def compute_resampled(
    weights: Floats, positive: Flags, logits: Floats, probabilities: Floats, thresholds: TargetThresholds | None
) -> dict[str, Floats]:
    """Compute every metric in every resample, a row of weights; NaN where there is none."""
    drawn = {metric: np.full(len(weights), np.nan) for metric in _METRICS}
    drawn["auc"] = weighted.aucs(weights, positive, logits)
    drawn["average_precision"] = weighted.average_precisions(weights, positive, logits)
    drawn["brier"] = weighted.briers(weights, positive, probabilities)
    drawn["ece"] = weighted.calibration_errors(weights, positive, probabilities)
    for ending, threshold in _by_ending(thresholds).items():
        drawn |= _with_ending(weighted.rates(weights, positive, probabilities, threshold), ending)
    return drawn


def _by_ending(thresholds: TargetThresholds | None) -> dict[str, float]:
    """Return the thresholds by the ending of the metrics that are measured there."""
    both = {} if thresholds is None else {"": thresholds.youden, _AT_CHOSEN: thresholds.chosen}
    return {ending: threshold for ending, threshold in both.items() if threshold is not None}


def _with_ending(found: Mapping[str, _Value], ending: str) -> dict[str, _Value]:
    """Name the rates at a threshold; rates that are no metric there are left out."""
    return {name + ending: rate for name, rate in found.items() if name + ending in _METRICS}


def why_missing(
    metric: str, target: str, why_undefined: str, thresholds: TargetThresholds | None, unit: str, *, labelled: bool
) -> str:
    """Say why a metric of a target has no value."""
    if not labelled or metric in THRESHOLD_FREE:
        return why_undefined
    if thresholds is None:
        return "no threshold: no validation predictions"
    at_chosen = metric in BY_CHOSEN
    if (thresholds.chosen if at_chosen else thresholds.youden) is None:
        return f"no threshold: {'no positive' if at_chosen else 'not both classes'} of {target} in validation"
    calls = {"ppv": "positive", "npv": "negative"}.get(metric.removesuffix(_AT_CHOSEN))
    return f"no {unit} is called {calls}" if calls else why_undefined
