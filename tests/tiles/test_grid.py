"""The tile grid at any slide resolution: exact tile sizes and positions, no drift."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import SettingError
from tapfm.slides.slide import Box, Thumbnail
from tapfm.tiles.grid import TileSpec, mask_coverage, tile_grid

MPPS = [0.23, 0.25, 0.2645, 0.33, 0.499, 0.5]


@pytest.mark.parametrize(
    ("mpp", "side_px0"), [(0.23, 487), (0.25, 448), (0.2645, 423), (0.33, 339), (0.499, 224), (0.5, 224), (1.0, 112)]
)
def test_side_in_level_0_pixels(mpp, side_px0):
    assert TileSpec().side_px0(mpp) == side_px0


@given(mpp=st.floats(0.1, 1.2), tile_px=st.integers(64, 1024), target=st.floats(0.2, 2))
def test_side_is_within_half_a_pixel_of_the_exact_value(mpp, tile_px, target):
    spec = TileSpec(tile_px=tile_px, mpp=target)
    side_px0 = spec.side_px0(mpp)
    assert abs(side_px0 - tile_px * target / mpp) <= 0.5 + 1e-9
    assert spec.achieved_mpp(mpp) * tile_px == pytest.approx(side_px0 * mpp)


@pytest.mark.parametrize("mpp", MPPS)
@pytest.mark.parametrize("overlap_px", [0, 64])
def test_grid_does_not_drift(mpp, overlap_px):
    spec = TileSpec(overlap_px=overlap_px)
    grid = tile_grid(Box(0, 0, 100_000, 2_000), spec, mpp)
    x = np.unique(grid[:, 0])
    exact = np.arange(len(x)) * (224 - overlap_px) * 0.5 / mpp
    assert len(x) > 190
    assert np.abs(x - exact).max() <= 0.5  # the last tile too, 100,000 pixels away


def test_grid_at_20x_and_40x():
    at_20x = tile_grid(Box(0, 0, 2220, 2967), TileSpec(), 0.5)
    assert len(at_20x) == 9 * 13
    np.testing.assert_array_equal(at_20x[:3], [[0, 0], [224, 0], [448, 0]])
    np.testing.assert_array_equal(at_20x[-1], [8 * 224, 12 * 224])
    at_40x = tile_grid(Box(0, 0, 4440, 5934), TileSpec(), 0.25)
    np.testing.assert_array_equal(at_40x, 2 * at_20x)


@pytest.mark.parametrize("mpp", MPPS)
def test_tiles_are_inside_the_bounds_and_adjacent(mpp):
    spec = TileSpec()
    side_px0 = spec.side_px0(mpp)
    grid = tile_grid(Box(1000, 700, 9_999, 8_888), spec, mpp)
    assert grid.min(axis=0).tolist() == [1000, 700]
    assert (grid.max(axis=0) + side_px0 <= [1000 + 9_999, 700 + 8_888]).all()
    assert (grid.max(axis=0) + 2 * side_px0 + 1 > [1000 + 9_999, 700 + 8_888]).all()  # no space for another tile
    gaps = np.diff(np.unique(grid[:, 0])) - side_px0
    assert set(gaps.tolist()) <= {-1, 0, 1}


def test_slide_smaller_than_a_tile_has_no_tiles():
    assert tile_grid(Box(0, 0, 223, 5000), TileSpec(), 0.5).shape == (0, 2)


@given(data=st.data())
def test_mask_coverage_is_exact(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    mask = rng.random((12, 17)) < 0.5
    scale = 10  # level-0 pixels per mask pixel, so that the expected value can be counted
    full = mask.repeat(scale, axis=0).repeat(scale, axis=1)
    side_px0 = data.draw(st.integers(1, 60))
    positions = np.stack([rng.integers(0, 170 - side_px0 + 1, 8), rng.integers(0, 120 - side_px0 + 1, 8)], axis=1)
    thumbnail = Thumbnail(np.zeros((12, 17, 3), np.uint8), Box(300, 500, 170, 120))
    coverage = mask_coverage(mask, thumbnail, positions + np.array([300, 500]), side_px0)
    expected = [full[y : y + side_px0, x : x + side_px0].mean() for x, y in positions]
    np.testing.assert_allclose(coverage, expected, atol=1e-9)


def test_all_invalid_settings_are_reported_together():
    with pytest.raises(SettingError) as error:
        TileSpec(tile_px=3, mpp=0.0, overlap_px=-5, min_tissue=0.0, tissue="magic")
    for name in ("size is 3", "mpp is 0", "overlap is -5", "min-tissue is 0", "tissue is 'magic'", "otsu, darkness"):
        assert name in str(error.value)
