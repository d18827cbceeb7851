"""How well scores put positives above negatives."""

from __future__ import annotations

import numpy as np

from tapfm.metrics.arrays import Flags, Floats, check_scores

Curve = tuple[Floats, Floats, Floats]


def auc(positive: Flags, scores: Floats) -> float | None:
    """Compute the area under the ROC curve: how often a positive scores above a negative, a tie counting half.

    Where a class is absent it is None, and `why_undefined` says why.
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
    """Compute the mean precision over the steps of recall, without interpolation; None where a class is absent."""
    from sklearn.metrics import average_precision_score

    check_scores(positive, scores)
    return None if why_undefined(positive) else float(average_precision_score(positive, _without_infinity(scores)))


def roc_curve(positive: Flags, scores: Floats) -> Curve | None:
    """Trace false positive rate, true positive rate and threshold, from (0, 0) to (1, 1) through every distinct score.

    A call is score >= threshold; the first threshold is infinite. None where a class is absent.
    """
    from sklearn import metrics

    check_scores(positive, scores)
    if why_undefined(positive):
        return None
    curve: Curve = metrics.roc_curve(positive, _without_infinity(scores), drop_intermediate=False)
    return curve


def precision_recall_curve(positive: Flags, scores: Floats) -> Curve | None:
    """Trace precision, recall and threshold, thresholds rising; a last point (1, 0) without threshold closes it.

    None where a class is absent.
    """
    from sklearn import metrics

    check_scores(positive, scores)
    if why_undefined(positive):
        return None
    curve: Curve = metrics.precision_recall_curve(positive, _without_infinity(scores))
    return curve


def why_undefined(positive: Flags, unit: str = "unit") -> str:
    """Say why there is no AUC, for example "no positive slide among 12"; nothing where there is one."""
    if not len(positive):
        return f"no labelled {unit}"
    if not positive.any():
        return f"no positive {unit} among {len(positive)}"
    if positive.all():
        return f"no negative {unit} among {len(positive)}"
    return ""


def _without_infinity(scores: Floats) -> Floats:
    """Replace infinite scores, which scikit-learn refuses, by the largest floats."""
    finite: Floats = np.nan_to_num(scores)
    return finite
