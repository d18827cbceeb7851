"""Tiles drawn for an epoch: without replacement, by address, every tile as often as any other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import SettingError
from tapfm.tiles.sampling import sample_tiles


@given(count=st.integers(0, 500), tiles_per_slide=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_a_draw_has_distinct_tiles_of_the_slide_in_order(count, tiles_per_slide, seed):
    drawn = sample_tiles(count, tiles_per_slide, seed, 3, "case-1")
    assert drawn.dtype == np.int64
    assert len(drawn) == min(count, tiles_per_slide)
    assert (np.diff(drawn) > 0).all()
    assert set(drawn.tolist()) <= set(range(count))


@pytest.mark.parametrize("tiles_per_slide", [None, 10, 11])
def test_a_slide_with_no_more_tiles_than_wanted_gives_all_of_them(tiles_per_slide):
    assert sample_tiles(10, tiles_per_slide, 0, 1, "case-1").tolist() == list(range(10))


def test_a_draw_belongs_to_its_address():
    first = sample_tiles(1000, 100, 7, 3, "case-1")
    np.testing.assert_array_equal(first, sample_tiles(1000, 100, 7, 3, "case-1"))
    for other in [(7, 4, "case-1"), (8, 3, "case-1"), (7, 3, "case-2")]:
        assert not np.array_equal(first, sample_tiles(1000, 100, *other))


def test_over_the_epochs_every_tile_is_drawn_about_as_often():
    epochs, count, wanted = 400, 60, 15
    times = np.zeros(count)
    for epoch in range(epochs):
        times[sample_tiles(count, wanted, 0, epoch, "case-1")] += 1
    share = wanted / count
    deviation = np.sqrt(epochs * share * (1 - share))
    assert times.sum() == epochs * wanted
    assert np.abs(times - epochs * share).max() < 4 * deviation
    assert times.std() == pytest.approx(deviation, rel=0.3)  # neither favourites nor a rota


def test_no_tiles_at_all_are_refused():
    with pytest.raises(SettingError, match="at least 1"):
        sample_tiles(10, 0, 0, 1, "case-1")
