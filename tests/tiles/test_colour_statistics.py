"""Colour statistics of tiles."""

import numpy as np
import pytest

from tapfm.tiles.colour_statistics import _PERCENTILES as PERCENTILES
from tapfm.tiles.colour_statistics import _STATISTICS as STATISTICS
from tapfm.tiles.colour_statistics import COLOUR_STATISTICS, colour_histograms, colour_statistics


def random_tiles(seed, tiles=3, side=20):
    return np.random.default_rng(seed).integers(0, 256, (tiles, 3, side, side), "uint8")


def test_statistics_equal_numpy():
    tiles = random_tiles(0)
    found = dict(zip(COLOUR_STATISTICS, colour_statistics(colour_histograms(tiles)), strict=True))
    assert len(found) == 21
    for channel, name in enumerate(("red", "green", "blue")):
        values = tiles[:, channel].astype(float).ravel()
        assert found[f"{name}_mean"] == pytest.approx(values.mean())
        assert found[f"{name}_sd"] == pytest.approx(values.std())
        cubed = ((values - values.mean()) ** 3).mean() / values.std() ** 3
        assert found[f"{name}_skewness"] == pytest.approx(cubed)
        for percent in PERCENTILES:
            expected = np.percentile(values, percent, method="inverted_cdf")
            assert found[f"{name}_percentile_{percent}"] == expected


def test_histograms_of_parts_can_be_added():
    tiles = random_tiles(1, tiles=5)
    parts = colour_histograms(tiles[:2]) + colour_histograms(tiles[2:])
    assert colour_statistics(parts) == colour_statistics(colour_histograms(tiles))


def test_statistics_do_not_depend_on_pixel_positions():
    tiles = random_tiles(2)
    shuffled = np.random.default_rng(3).permuted(tiles.reshape(3, 3, -1), axis=2).reshape(tiles.shape)
    assert colour_statistics(colour_histograms(shuffled)) == colour_statistics(colour_histograms(tiles))


def test_uniform_colour_has_zero_deviation_and_skewness():
    statistics = colour_statistics(colour_histograms(np.full((1, 3, 4, 4), 200, np.uint8)))
    assert statistics[: len(STATISTICS)] == [200.0, 0.0, 0.0, *[200.0] * len(PERCENTILES)]
