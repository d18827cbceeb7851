"""Whether probabilities mean what they say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SettingError
from tapfm.metrics.arrays import Flags, Floats, check_scores


@dataclass(frozen=True)
class Bin:
    """Probabilities from low to high (the last bin holds 1 too); the means of an empty bin are None."""

    low: float
    high: float
    count: int
    mean_probability: float | None
    positive_rate: float | None


def brier(positive: Flags, probabilities: Floats) -> float | None:
    """Compute the mean squared distance of probability and label; None where nothing is labelled."""
    check_scores(positive, probabilities)
    return float(((probabilities - positive) ** 2).mean()) if len(positive) else None


def expected_calibration_error(positive: Flags, probabilities: Floats, bins: int = 10) -> float | None:
    """Compute |mean probability - rate of positives| over bins of equal width, weighted by what they hold."""
    filled = [each for each in reliability(positive, probabilities, bins) if each.count]
    if not filled:
        return None
    gaps = [each.count * abs((each.mean_probability or 0.0) - (each.positive_rate or 0.0)) for each in filled]
    return sum(gaps) / sum(each.count for each in filled)


def reliability(positive: Flags, probabilities: Floats, bins: int = 10) -> list[Bin]:
    """Compare mean probability and rate of positives in bins of equal width, empty ones included."""
    check_scores(positive, probabilities)
    place = bin_of(probabilities, bins)
    found = []
    for number in range(bins):
        here = place == number
        count = int(here.sum())
        mean = float(probabilities[here].mean()) if count else None
        rate = float(positive[here].mean()) if count else None
        found.append(Bin(number / bins, (number + 1) / bins, count, mean, rate))
    return found


def bin_of(probabilities: Floats, bins: int) -> NDArray[np.intp]:
    """Number the bin of each probability; one that lies on an edge belongs to the bin above."""
    if bins < 1:
        raise SettingError(f"bins must be at least 1; got {bins}.")
    # edges by division: 3 / 10 is the float 0.3, 3 * 0.1 is not
    return np.searchsorted(np.arange(1, bins) / bins, probabilities, side="right")
