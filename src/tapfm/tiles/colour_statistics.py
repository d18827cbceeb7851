"""Colour statistics of a slide: 21 values without any spatial information, for the colour baseline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapfm.tiles.reading import TilePixels

# Version of the statistics. Increase it when the same pixels give different values. tests/versions/ fails if the output
# changes and this version does not.
COLOURS_VERSION = 1

_CHANNELS = ("red", "green", "blue")
_PERCENTILES = (5, 25, 75, 95)
_STATISTICS = ("mean", "sd", "skewness", *(f"percentile_{percent}" for percent in _PERCENTILES))
COLOUR_STATISTICS = tuple(f"{channel}_{statistic}" for channel in _CHANNELS for statistic in _STATISTICS)

Histograms = NDArray[np.int64]  # (3, 256): number of pixels with each value


def colour_histograms(pixels: TilePixels) -> Histograms:
    """Return the histogram of each channel. Histograms of several parts of a slide can be added."""
    return np.stack([np.bincount(pixels[:, channel].reshape(-1), minlength=256) for channel in range(3)])


def colour_statistics(histograms: Histograms) -> list[float]:
    """Return the statistics of all pixels, in the order of COLOUR_STATISTICS."""
    return [value for counts in histograms for value in _channel_statistics(counts)]


def _channel_statistics(counts: NDArray[np.int64]) -> list[float]:
    """Return mean, standard deviation, skewness and percentiles of one channel; a constant channel has skewness 0."""
    values, weights = np.arange(256, dtype=np.float64), counts / counts.sum()
    mean = float(weights @ values)
    deviation = float(np.sqrt(weights @ (values - mean) ** 2))
    skewness = float(weights @ (values - mean) ** 3) / deviation**3 if deviation > 0 else 0.0
    cumulative = np.cumsum(counts)
    # nearest-rank percentile: the smallest value v such that at least this percentage of the pixels is <= v
    percentiles = [int(np.searchsorted(cumulative, percent / 100 * cumulative[-1])) for percent in _PERCENTILES]
    return [mean, deviation, skewness, *map(float, percentiles)]
