"""Calibration of predicted probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SettingError
from tapfm.metrics.arrays import Flags, Floats, check_scores


@dataclass(frozen=True)
class CalibrationBin:
    """Probabilities from low to high, high excluded except in the last bin. The means of an empty bin are None."""

    low: float
    high: float
    count: int
    mean_probability: float | None
    positive_fraction: float | None


def brier_score(positive: Flags, probabilities: Floats) -> float | None:
    """Return the Brier score: the mean squared difference between probability and label. None without labels."""
    check_scores(positive, probabilities)
    return float(((probabilities - positive) ** 2).mean()) if len(positive) else None


def expected_calibration_error(positive: Flags, probabilities: Floats, bins: int = 10) -> float | None:
    """Return the mean of |mean probability - fraction of positives| over bins of equal width, weighted by count."""
    filled = [each for each in reliability_bins(positive, probabilities, bins) if each.count]
    if not filled:
        return None
    gaps = [each.count * abs((each.mean_probability or 0.0) - (each.positive_fraction or 0.0)) for each in filled]
    return sum(gaps) / sum(each.count for each in filled)


def reliability_bins(positive: Flags, probabilities: Floats, bins: int = 10) -> list[CalibrationBin]:
    """Return mean probability and fraction of positives in bins of equal width, including empty bins."""
    check_scores(positive, probabilities)
    indices = bin_index(probabilities, bins)
    found = []
    for number in range(bins):
        here = indices == number
        count = int(here.sum())
        mean = float(probabilities[here].mean()) if count else None
        rate = float(positive[here].mean()) if count else None
        found.append(CalibrationBin(number / bins, (number + 1) / bins, count, mean, rate))
    return found


def bin_index(probabilities: Floats, bins: int) -> NDArray[np.intp]:
    """Return the index of the bin of each probability; an edge belongs to the upper bin."""
    if bins < 1:
        raise SettingError(f"bins must be at least 1; got {bins}.")
    # division gives exact edges: 3 / 10 equals 0.3, 3 * 0.1 does not
    return np.searchsorted(np.arange(1, bins) / bins, probabilities, side="right")
