"""Confidence intervals and paired tests of the AUC by DeLong's method, in the fast version with midranks.

References: DeLong, DeLong & Clarke-Pearson, Biometrics 1988; Sun & Xu, IEEE Signal Processing Letters 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.ranking import auc, explain_undefined
from tapfm.results.estimate import Estimate


@dataclass(frozen=True)
class PairedTest:
    """Difference of two AUCs on the same units, and its two-sided p value."""

    difference: Estimate
    p: float | None


def auc_interval(positive: Flags, scores: Floats, level: float = 0.95) -> Estimate:
    """Return the AUC with a confidence interval that is symmetric on the logit scale.

    On this scale the interval stays within 0..1, and its coverage near 1 is better than on the original scale.
    """
    from scipy.special import expit, logit

    value = auc(positive, scores)
    if value is None:
        return Estimate(None, reason=explain_undefined(positive))
    if reason := _explain_too_few(positive):
        return Estimate(value, reason=reason)
    deviation = math.sqrt(_covariance(positive, [scores])[0, 0])
    if value in (0.0, 1.0):
        return Estimate(value, reason=f"no DeLong interval: the estimated variance of an AUC of {value:g} is 0")
    if not deviation:
        return Estimate(value, reason="no DeLong interval: the estimated variance is 0")
    centre = logit(value)
    half_width = _normal_quantile(level) * deviation / (value * (1 - value))
    return Estimate(value, float(expit(centre - half_width)), float(expit(centre + half_width)))


def auc_difference(positive: Flags, a: Floats, b: Floats, level: float = 0.95) -> PairedTest:
    """Test whether two sets of scores of the same units have the same AUC; the difference is AUC(a) - AUC(b)."""
    auc_a, auc_b = auc(positive, a), auc(positive, b)
    if auc_a is None or auc_b is None:
        return PairedTest(Estimate(None, reason=explain_undefined(positive)), None)
    difference = auc_a - auc_b
    if reason := _explain_too_few(positive):
        return PairedTest(Estimate(difference, reason=reason), None)
    covariances = _covariance(positive, [a, b])
    variance = covariances[0, 0] + covariances[1, 1] - 2 * covariances[0, 1]
    # a variance this small is a rounding error
    if variance <= 1e-12 * (covariances[0, 0] + covariances[1, 1]):
        same = abs(difference) < 1e-12
        cause = "both models rank every positive-negative pair the same" if same else "the estimated variance is 0"
        reason = f"no DeLong interval: {cause}"
        return PairedTest(Estimate(0.0 if same else difference, reason=reason), 1.0 if same else None)
    deviation = math.sqrt(variance)
    half_width = _normal_quantile(level) * deviation
    p = math.erfc(abs(difference) / deviation / math.sqrt(2))
    return PairedTest(Estimate(difference, max(-1.0, difference - half_width), min(1.0, difference + half_width)), p)


def _covariance(positive: Flags, scores: Sequence[Floats]) -> Floats:
    """Return the estimated covariance matrix of the AUCs of several scores of the same units."""
    from scipy.stats import rankdata

    positives, negatives = int(positive.sum()), int((~positive).sum())
    among_positives, among_negatives = [], []
    for values in scores:
        ranks = rankdata(values)
        # fraction of negatives below each positive, and of positives above each negative
        among_positives.append((ranks[positive] - rankdata(values[positive])) / negatives)
        among_negatives.append(1 - (ranks[~positive] - rankdata(values[~positive])) / positives)
    spread = np.cov(np.array(among_positives)) / positives + np.cov(np.array(among_negatives)) / negatives
    return np.atleast_2d(spread)


def _explain_too_few(positive: Flags) -> str:
    """Return why the variance cannot be estimated: a class has only one unit; empty if both have more."""
    for name, count in (("positive", int(positive.sum())), ("negative", int((~positive).sum()))):
        if count < 2:
            return f"only one {name} unit: the variance cannot be estimated"
    return ""


def _normal_quantile(level: float) -> float:
    """Return the normal quantile of a two-sided interval."""
    from scipy.special import ndtri

    return float(ndtri((1 + level) / 2))
