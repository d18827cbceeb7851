"""Ranking metrics: AUC, average precision, and their curves."""

from __future__ import annotations

import numpy as np

from tapfm.metrics.arrays import Flags, Floats, check_scores

# as in scikit-learn: (false positive rates, true positive rates, thresholds) or (precision, recall, thresholds)
Curve = tuple[Floats, Floats, Floats]


def auc(positive: Flags, scores: Floats) -> float | None:
    """Return the area under the ROC curve; a tie of a positive and a negative counts half.

    None if a class is missing; `explain_undefined` returns the reason.
    """
    from scipy.stats import rankdata

    check_scores(positive, scores)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    pairs_in_order = rankdata(scores)[positive].sum() - positives * (positives + 1) / 2
    return float(pairs_in_order / (positives * negatives))


def average_precision(positive: Flags, scores: Floats) -> float | None:
    """Return the average precision, without interpolation; None if a class is missing."""
    from sklearn.metrics import average_precision_score

    check_scores(positive, scores)
    return None if explain_undefined(positive) else float(average_precision_score(positive, _replace_infinity(scores)))


def roc_curve(positive: Flags, scores: Floats) -> Curve | None:
    """Return false positive rates, true positive rates and thresholds, from (0, 0) to (1, 1), for every distinct score.

    A unit is predicted positive if score >= threshold; the first threshold is infinite. None if a class is missing.
    """
    from sklearn import metrics

    check_scores(positive, scores)
    if explain_undefined(positive):
        return None
    curve: Curve = metrics.roc_curve(positive, _replace_infinity(scores), drop_intermediate=False)
    return curve


def precision_recall_curve(positive: Flags, scores: Floats) -> Curve | None:
    """Return precision, recall and ascending thresholds; the last point (precision 1, recall 0) has no threshold.

    None if a class is missing.
    """
    from sklearn import metrics

    check_scores(positive, scores)
    if explain_undefined(positive):
        return None
    curve: Curve = metrics.precision_recall_curve(positive, _replace_infinity(scores))
    return curve


def explain_undefined(positive: Flags, unit: str = "unit") -> str:
    """Return why the AUC is undefined, such as "no positive slide among 12"; empty if it is defined."""
    if not len(positive):
        return f"no labelled {unit}"
    if not positive.any():
        return f"no positive {unit} among {len(positive)}"
    if positive.all():
        return f"no negative {unit} among {len(positive)}"
    return ""


def _replace_infinity(scores: Floats) -> Floats:
    """Replace infinite scores with the largest floats, because scikit-learn rejects infinity."""
    finite: Floats = np.nan_to_num(scores)
    return finite
