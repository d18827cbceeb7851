"""Where to call a slide positive, and how right the calls are. A call is probability >= threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tapfm.errors import SettingError
from tapfm.metrics.arrays import Flags, Floats, check_scores
from tapfm.metrics.ranking import why_undefined


@dataclass(frozen=True)
class Rates:
    """How right the calls at a threshold are; a share of nothing is None."""

    sensitivity: float | None
    specificity: float | None
    ppv: float | None
    npv: float | None
    balanced_accuracy: float | None
    f1: float | None


def youden(positive: Flags, probabilities: Floats) -> float | None:
    """Find the observed probability with the largest sensitivity + specificity; None where a class is absent.

    Among equally good ones that with the smallest |sensitivity - specificity|, then the highest.
    """
    check_scores(positive, probabilities)
    if why_undefined(positive):
        return None
    thresholds, place = np.unique(-probabilities, return_inverse=True)
    thresholds = -thresholds  # from the highest down
    true_positives, called = np.cumsum(np.bincount(place, weights=positive)), np.cumsum(np.bincount(place))
    positives, negatives = int(positive.sum()), int((~positive).sum())
    # in whole numbers, times positives * negatives: equal sums must not differ in their last digit
    found = true_positives * negatives
    spared = (negatives - called + true_positives) * positives
    best = np.lexsort((-thresholds, np.abs(found - spared), -(found + spared)))[0]
    return float(thresholds[best])


def at_sensitivity(positive: Flags, probabilities: Floats, sensitivity: float) -> float | None:
    """Find the highest observed probability that calls at least this share of positives; None without positives."""
    if not 0 < sensitivity <= 1:
        raise SettingError(f"sensitivity must be above 0 and at most 1; got {sensitivity}.")
    check_scores(positive, probabilities)
    if not positive.any():
        return None
    of_positives = np.sort(probabilities[positive])[::-1]
    needed = math.ceil(sensitivity * len(of_positives) - 1e-9)  # 0.9 of 10 is 9, however it is rounded
    return float(of_positives[needed - 1])


def rates(positive: Flags, probabilities: Floats, threshold: float) -> Rates:
    """Measure the calls at a threshold."""
    check_scores(positive, probabilities)
    called = probabilities >= threshold
    true_positives, false_positives = int((called & positive).sum()), int((called & ~positive).sum())
    false_negatives, true_negatives = int((~called & positive).sum()), int((~called & ~positive).sum())
    sensitivity = _share(true_positives, true_positives + false_negatives)
    specificity = _share(true_negatives, true_negatives + false_positives)
    both = sensitivity is not None and specificity is not None
    return Rates(
        sensitivity=sensitivity,
        specificity=specificity,
        ppv=_share(true_positives, true_positives + false_positives),
        npv=_share(true_negatives, true_negatives + false_negatives),
        balanced_accuracy=((sensitivity or 0.0) + (specificity or 0.0)) / 2 if both else None,
        # without positives it would be 0 whatever is called
        f1=_share(2 * true_positives, 2 * true_positives + false_positives + false_negatives)
        if sensitivity is not None
        else None,
    )


def _share(part: int, whole: int) -> float | None:
    """Divide, where there is something to divide by."""
    return part / whole if whole else None
