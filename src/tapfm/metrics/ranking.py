"""How well scores put positives above negatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapfm.metrics.arrays import Flags, Floats, known_of

Curve = tuple[Floats, Floats, Floats]


def auc(labels: Sequence[int | None], scores: Sequence[float]) -> float | None:
    """Compute the area under the ROC curve: how often a positive scores above a negative, a tie counting half.

    Missing labels (None) take no part; where a class is absent it is None, and `why_undefined` says why.
    """
    positive, values = known_of(labels, scores)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    pairs_in_order = midranks(values)[positive].sum() - positives * (positives + 1) / 2
    return float(pairs_in_order / (positives * negatives))


def midranks(values: Floats) -> Floats:
    """Rank values from 1 upwards; equal ones share the mean of their ranks, which counts a tie half."""
    _, place, ties = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(ties) - (ties - 1) / 2)[place]
    return ranks


def average_precision(labels: Sequence[int | None], scores: Sequence[float]) -> float | None:
    """Compute the mean precision over the steps of recall, without interpolation; None where a class is absent."""
    positive, values = known_of(labels, scores)
    if positive.all() or not positive.any():
        return None
    true_positives, called, _ = counts_by_threshold(positive, values)
    gained = np.diff(true_positives, prepend=0.0)
    return float((gained * true_positives / called).sum() / positive.sum())


def roc_curve(labels: Sequence[int | None], scores: Sequence[float]) -> Curve | None:
    """Trace false positive rate, true positive rate and threshold, from (0, 0) to (1, 1) through every distinct score.

    A call is score >= threshold; the first threshold is infinite. None where a class is absent.
    """
    positive, values = known_of(labels, scores)
    if positive.all() or not positive.any():
        return None
    true_positives, called, thresholds = counts_by_threshold(positive, values)
    false_positives = called - true_positives
    return (
        np.concatenate([[0.0], false_positives / false_positives[-1]]),
        np.concatenate([[0.0], true_positives / true_positives[-1]]),
        np.concatenate([[np.inf], thresholds]),
    )


def precision_recall_curve(labels: Sequence[int | None], scores: Sequence[float]) -> Curve | None:
    """Trace precision, recall and threshold, thresholds rising; a last point (1, 0) without threshold closes it.

    None where a class is absent.
    """
    positive, values = known_of(labels, scores)
    if positive.all() or not positive.any():
        return None
    true_positives, called, thresholds = counts_by_threshold(positive, values)
    return (
        np.concatenate([(true_positives / called)[::-1], [1.0]]),
        np.concatenate([(true_positives / true_positives[-1])[::-1], [0.0]]),
        thresholds[::-1].copy(),
    )


def counts_by_threshold(positive: Flags, values: Floats) -> Curve:
    """Count true positives and calls at each distinct score as threshold, from the highest down."""
    thresholds, place = np.unique(-values, return_inverse=True)
    true_positives: Floats = np.cumsum(np.bincount(place, weights=positive), dtype=np.float64)
    called: Floats = np.cumsum(np.bincount(place), dtype=np.float64)
    return true_positives, called, -thresholds


def why_undefined(labels: Sequence[int | None], unit: str = "slide") -> str:
    """Say why there is no AUC, for example "no positive slide among 12"; nothing where there is one."""
    known = [label for label in labels if label is not None]
    if not known:
        return f"no labelled {unit} among {len(labels)}"
    if 1 not in known:
        return f"no positive {unit} among {len(known)}"
    if 0 not in known:
        return f"no negative {unit} among {len(known)}"
    return ""
