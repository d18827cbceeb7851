"""Metrics of many resamples at once. Each row of weights is a resample: how often each unit counts.

With all weights 1, results equal those of the unweighted metrics. The result is NaN if a metric is undefined.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.calibration import bin_index


def aucs(weights: Floats, positive: Flags, scores: Floats) -> Floats:
    """Return the AUC of every row."""
    positives, negatives = sum_by_score(weights, positive, scores)
    below = np.cumsum(negatives, axis=1) - negatives / 2  # a tie counts half
    return _ratio(np.einsum("ij,ij->i", positives, below), positives.sum(axis=1) * negatives.sum(axis=1))


def average_precisions(weights: Floats, positive: Flags, scores: Floats) -> Floats:
    """Return the average precision of every row; NaN unless both classes are present."""
    positives, negatives = sum_by_score(weights, positive, -scores)
    true_positives = np.cumsum(positives, axis=1)
    predicted = true_positives + np.cumsum(negatives, axis=1)
    total = positives.sum(axis=1)
    precision = np.divide(true_positives, predicted, out=np.zeros_like(true_positives), where=predicted > 0)
    both = total * (negatives.sum(axis=1) > 0)
    return _ratio(np.einsum("ij,ij->i", positives, precision), both)


def brier_scores(weights: Floats, positive: Flags, probabilities: Floats) -> Floats:
    """Return the Brier score of every row."""
    return _ratio(weights @ (probabilities - positive) ** 2, weights.sum(axis=1))


def calibration_errors(weights: Floats, positive: Flags, probabilities: Floats, bins: int = 10) -> Floats:
    """Return the expected calibration error of every row."""
    members = np.eye(bins)[bin_index(probabilities, bins)]
    gaps = np.abs(weights @ (members * (probabilities - positive)[:, None]))
    return _ratio(gaps.sum(axis=1), weights.sum(axis=1))


def threshold_metrics(
    weights: Floats, positive: Flags, probabilities: Floats, threshold: float
) -> Mapping[str, Floats]:
    """Return the metrics of every row at a threshold, by name."""
    predicted = probabilities >= threshold
    true_positives, false_positives = weights @ (predicted & positive), weights @ (predicted & ~positive)
    false_negatives, true_negatives = weights @ (~predicted & positive), weights @ (~predicted & ~positive)
    positives = true_positives + false_negatives
    sensitivity = _ratio(true_positives, positives)
    specificity = _ratio(true_negatives, true_negatives + false_positives)
    return {
        "sensitivity": sensitivity,
        "specificity": specificity,
        "ppv": _ratio(true_positives, true_positives + false_positives),
        "npv": _ratio(true_negatives, true_negatives + false_negatives),
        "balanced_accuracy": (sensitivity + specificity) / 2,
        "f1": _ratio(2 * true_positives, (positives > 0) * (positives + true_positives + false_positives)),
    }


def sum_by_score(weights: Floats, positive: Flags, scores: Floats) -> tuple[Floats, Floats]:
    """Return the summed weights of positives and of negatives at each distinct score, in ascending order."""
    order = np.argsort(scores, kind="stable")
    ordered_weights, ordered_positive, ordered_scores = weights[:, order], positive[order], scores[order]
    starts = np.concatenate([order[:1] * 0, 1 + np.flatnonzero(ordered_scores[1:] != ordered_scores[:-1])])
    positives, negatives = ordered_weights * ordered_positive, ordered_weights * ~ordered_positive
    if len(starts) == len(order):
        return positives, negatives
    return np.add.reduceat(positives, starts, axis=1), np.add.reduceat(negatives, starts, axis=1)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """Return part / whole of each row; NaN if whole is 0."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
