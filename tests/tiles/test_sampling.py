"""Sampling of tiles for an epoch: without replacement, reproducible, uniform."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import SettingError
from tapfm.tiles.sampling import sample_tiles


@given(count=st.integers(0, 500), tiles_per_slide=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_sampled_tiles_are_distinct_and_sorted(count, tiles_per_slide, seed):
    sampled = sample_tiles(count, tiles_per_slide, seed, 3, "case-1")
    assert sampled.dtype == np.int64
    assert len(sampled) == min(count, tiles_per_slide)
    assert (np.diff(sampled) > 0).all()
    assert set(sampled.tolist()) <= set(range(count))


@pytest.mark.parametrize("tiles_per_slide", [None, 10, 11])
def test_small_slide_gives_all_tiles(tiles_per_slide):
    assert sample_tiles(10, tiles_per_slide, 0, 1, "case-1").tolist() == list(range(10))


def test_sample_depends_on_the_address():
    first = sample_tiles(1000, 100, 7, 3, "case-1")
    np.testing.assert_array_equal(first, sample_tiles(1000, 100, 7, 3, "case-1"))
    for other in [(7, 4, "case-1"), (8, 3, "case-1"), (7, 3, "case-2")]:
        assert not np.array_equal(first, sample_tiles(1000, 100, *other))


def test_tiles_are_sampled_uniformly_over_epochs():
    epochs, count, tiles_per_slide = 400, 60, 15
    times = np.zeros(count)
    for epoch in range(epochs):
        times[sample_tiles(count, tiles_per_slide, 0, epoch, "case-1")] += 1
    fraction = tiles_per_slide / count
    deviation = np.sqrt(epochs * fraction * (1 - fraction))
    assert times.sum() == epochs * tiles_per_slide
    assert np.abs(times - epochs * fraction).max() < 4 * deviation
    assert times.std() == pytest.approx(deviation, rel=0.3)  # as variable as independent sampling


def test_zero_tiles_per_slide_is_rejected():
    with pytest.raises(SettingError, match="at least 1"):
        sample_tiles(10, 0, 0, 1, "case-1")
