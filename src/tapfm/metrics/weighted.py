"""The metrics of many resamples at once: a row of weights says how often each unit counts.

With a weight of 1 for each unit a row gives what the plain metrics give; NaN where a row has no value.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.calibration import bin_of


def aucs(weights: Floats, positive: Flags, scores: Floats) -> Floats:
    """Compute the AUC of every row."""
    positives, negatives = by_distinct_score(weights, positive, scores)
    below = np.cumsum(negatives, axis=1) - negatives / 2  # a tie counts half
    return _ratio(np.einsum("ij,ij->i", positives, below), positives.sum(axis=1) * negatives.sum(axis=1))


def average_precisions(weights: Floats, positive: Flags, scores: Floats) -> Floats:
    """Compute the average precision of every row; as without weights it needs both classes."""
    positives, negatives = by_distinct_score(weights, positive, -scores)
    found = np.cumsum(positives, axis=1)
    called = found + np.cumsum(negatives, axis=1)
    total = positives.sum(axis=1)
    precision = np.divide(found, called, out=np.zeros_like(found), where=called > 0)
    both = total * (negatives.sum(axis=1) > 0)
    return _ratio(np.einsum("ij,ij->i", positives, precision), both)


def briers(weights: Floats, positive: Flags, probabilities: Floats) -> Floats:
    """Compute the Brier score of every row."""
    return _ratio(weights @ (probabilities - positive) ** 2, weights.sum(axis=1))


def calibration_errors(weights: Floats, positive: Flags, probabilities: Floats, bins: int = 10) -> Floats:
    """Compute the expected calibration error of every row: |sum of (p - label)| of each bin, over all units."""
    members = np.eye(bins)[bin_of(probabilities, bins)]
    gaps = np.abs(weights @ (members * (probabilities - positive)[:, None]))
    return _ratio(gaps.sum(axis=1), weights.sum(axis=1))


def rates(weights: Floats, positive: Flags, probabilities: Floats, threshold: float) -> Mapping[str, Floats]:
    """Compute the rates of every row at a threshold, by name."""
    called = probabilities >= threshold
    true_positives, false_positives = weights @ (called & positive), weights @ (called & ~positive)
    false_negatives, true_negatives = weights @ (~called & positive), weights @ (~called & ~positive)
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


def by_distinct_score(weights: Floats, positive: Flags, scores: Floats) -> tuple[Floats, Floats]:
    """Sum the weights of positives and of negatives at each distinct score, from the lowest up."""
    order = np.argsort(scores, kind="stable")
    ordered, in_order, rising = weights[:, order], positive[order], scores[order]
    starts = np.concatenate([order[:1] * 0, 1 + np.flatnonzero(rising[1:] != rising[:-1])])
    positives, negatives = ordered * in_order, ordered * ~in_order
    if len(starts) == len(order):
        return positives, negatives
    return np.add.reduceat(positives, starts, axis=1), np.add.reduceat(negatives, starts, axis=1)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """Divide row by row; NaN where there is nothing to divide by."""
    return np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
