"""Intervals and paired tests of AUC by DeLong's method, in the fast form with midranks.

References: DeLong, DeLong & Clarke-Pearson, Biometrics 1988; Sun & Xu, IEEE Signal Processing Letters 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.ranking import auc, why_undefined
from tapfm.results.estimate import Estimate


@dataclass(frozen=True)
class PairedTest:
    """A difference of two AUCs on the same units, and the two-sided p value of no difference."""

    difference: Estimate
    p: float | None


def auc_interval(positive: Flags, scores: Floats, level: float = 0.95) -> Estimate:
    """Estimate an AUC with its interval, which is symmetric on the logit scale.

    There it cannot leave 0..1, and near 1, where AUCs of interest are, it covers better than the plain one.
    """
    from scipy.special import expit, logit

    value = auc(positive, scores)
    if value is None:
        return Estimate(None, why=why_undefined(positive))
    if why := _too_few(positive):
        return Estimate(value, why=why)
    deviation = math.sqrt(_covariance(positive, [scores])[0, 0])
    if value in (0.0, 1.0):
        return Estimate(value, why=f"an AUC of {value:g} has no DeLong interval: its estimated variance is 0")
    if not deviation:
        return Estimate(value, why="the estimated variance is 0")
    middle = logit(value)
    reach = _quantile(level) * deviation / (value * (1 - value))
    return Estimate(value, float(expit(middle - reach)), float(expit(middle + reach)))


def auc_difference(positive: Flags, a: Floats, b: Floats, level: float = 0.95) -> PairedTest:
    """Test whether two scores of the same units have the same AUC; the difference is that of a minus that of b."""
    of_a, of_b = auc(positive, a), auc(positive, b)
    if of_a is None or of_b is None:
        return PairedTest(Estimate(None, why=why_undefined(positive)), None)
    difference = of_a - of_b
    if why := _too_few(positive):
        return PairedTest(Estimate(difference, why=why), None)
    covariances = _covariance(positive, [a, b])
    variance = covariances[0, 0] + covariances[1, 1] - 2 * covariances[0, 1]
    # what is left of equal terms by rounding is no variance
    if variance <= 1e-12 * (covariances[0, 0] + covariances[1, 1]):
        same = abs(difference) < 1e-12
        why = "the two rank all pairs alike" if same else "the estimated variance of the difference is 0"
        return PairedTest(Estimate(0.0 if same else difference, why=why), 1.0 if same else None)
    deviation = math.sqrt(variance)
    reach = _quantile(level) * deviation
    p = math.erfc(abs(difference) / deviation / math.sqrt(2))
    return PairedTest(Estimate(difference, max(-1.0, difference - reach), min(1.0, difference + reach)), p)


def _covariance(positive: Flags, scores: Sequence[Floats]) -> Floats:
    """Estimate the covariance of the AUCs of several scores of the same units."""
    from scipy.stats import rankdata

    positives, negatives = int(positive.sum()), int((~positive).sum())
    among_positives, among_negatives = [], []
    for values in scores:
        ranks = rankdata(values)
        # share of negatives below each positive, and of positives above each negative
        among_positives.append((ranks[positive] - rankdata(values[positive])) / negatives)
        among_negatives.append(1 - (ranks[~positive] - rankdata(values[~positive])) / positives)
    spread = np.cov(np.array(among_positives)) / positives + np.cov(np.array(among_negatives)) / negatives
    return np.atleast_2d(spread)


def _too_few(positive: Flags) -> str:
    """Say which class has a single unit: its spread cannot be estimated."""
    for name, count in (("positive", int(positive.sum())), ("negative", int((~positive).sum()))):
        if count < 2:
            return f"one {name} unit: its spread cannot be estimated"
    return ""


def _quantile(level: float) -> float:
    """Find the normal quantile of a two-sided interval."""
    from scipy.special import ndtri

    return float(ndtri((1 + level) / 2))
