"""Decision thresholds and the metrics at a threshold. A unit is predicted positive if probability >= threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tapfm.errors import SettingError
from tapfm.metrics.arrays import Flags, Floats, check_scores
from tapfm.metrics.ranking import explain_undefined


@dataclass(frozen=True)
class ThresholdMetrics:
    """Metrics of the predictions at a threshold; None if undefined, for example sensitivity without positives."""

    sensitivity: float | None
    specificity: float | None
    ppv: float | None
    npv: float | None
    balanced_accuracy: float | None
    f1: float | None


def youden_threshold(positive: Flags, probabilities: Floats) -> float | None:
    """Return the observed probability with the largest sensitivity + specificity; None if a class is missing.

    Ties are resolved by the smallest |sensitivity - specificity|, then by the highest probability.
    """
    check_scores(positive, probabilities)
    if explain_undefined(positive):
        return None
    thresholds, indices = np.unique(-probabilities, return_inverse=True)
    thresholds = -thresholds  # in descending order
    true_positives = np.cumsum(np.bincount(indices, weights=positive))
    predicted_positive = np.cumsum(np.bincount(indices))
    positives, negatives = int(positive.sum()), int((~positive).sum())
    # both rates times positives * negatives: whole numbers, so that ties are exact
    sensitivity = true_positives * negatives
    specificity = (negatives - predicted_positive + true_positives) * positives
    best = np.lexsort((-thresholds, np.abs(sensitivity - specificity), -(sensitivity + specificity)))[0]
    return float(thresholds[best])


def sensitivity_threshold(positive: Flags, probabilities: Floats, sensitivity: float) -> float | None:
    """Return the highest of the observed probabilities at which the sensitivity is reached; None without positives."""
    if not 0 < sensitivity <= 1:
        raise SettingError(f"sensitivity must be above 0 and at most 1; got {sensitivity}.")
    check_scores(positive, probabilities)
    if not positive.any():
        return None
    descending = np.sort(probabilities[positive])[::-1]
    needed = math.ceil(sensitivity * len(descending) - 1e-9)  # the margin absorbs rounding: 0.9 of 10 is 9
    return float(descending[needed - 1])


def compute_threshold_metrics(positive: Flags, probabilities: Floats, threshold: float) -> ThresholdMetrics:
    check_scores(positive, probabilities)
    predicted = probabilities >= threshold
    true_positives, false_positives = int((predicted & positive).sum()), int((predicted & ~positive).sum())
    false_negatives, true_negatives = int((~predicted & positive).sum()), int((~predicted & ~positive).sum())
    sensitivity = _ratio(true_positives, true_positives + false_negatives)
    specificity = _ratio(true_negatives, true_negatives + false_positives)
    both = sensitivity is not None and specificity is not None
    return ThresholdMetrics(
        sensitivity=sensitivity,
        specificity=specificity,
        ppv=_ratio(true_positives, true_positives + false_positives),
        npv=_ratio(true_negatives, true_negatives + false_negatives),
        balanced_accuracy=((sensitivity or 0.0) + (specificity or 0.0)) / 2 if both else None,
        # without positives it would be 0 for any prediction
        f1=_ratio(2 * true_positives, 2 * true_positives + false_positives + false_negatives)
        if sensitivity is not None
        else None,
    )


def _ratio(part: int, whole: int) -> float | None:
    """Return part / whole, or None if whole is 0."""
    return part / whole if whole else None
