"""The tile grid at any slide resolution: exact tile sizes and positions, no drift."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import SettingError
from tapfm.slides.slide import Box, Thumbnail
from tapfm.tiles.grid import TileSpec, find_edge_tiles, mask_coverage, tile_grid

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


def test_edge_tiles_of_known_slides():
    bounds = Box(100, 50, 1000, 700)
    grid = tile_grid(bounds, TileSpec(), 0.5, with_edge=True)
    assert np.unique(grid[:, 0]).tolist() == [100, 324, 548, 772, 996]
    assert np.unique(grid[:, 1]).tolist() == [50, 274, 498, 722]
    at_edge = find_edge_tiles(bounds, grid, 224)
    assert grid[~at_edge].tolist() == tile_grid(bounds, TileSpec(), 0.5).tolist()
    assert at_edge.sum() == 4 + 5 - 1  # a column and a row, which share the corner
    exact = Box(0, 0, 896, 448)
    assert tile_grid(exact, TileSpec(), 0.5, with_edge=True).tolist() == tile_grid(exact, TileSpec(), 0.5).tolist()
    assert tile_grid(Box(7, 9, 223, 100), TileSpec(), 0.5, with_edge=True).tolist() == [[7, 9]]
    # with an overlap, one column suffices, although another would start inside the slide
    overlapping = tile_grid(Box(0, 0, 1000, 224), TileSpec(overlap_px=112), 0.5, with_edge=True)
    assert overlapping[:, 0].tolist() == [0, 112, 224, 336, 448, 560, 672, 784]


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    mpp=st.sampled_from(MPPS),
    overlap_px=st.sampled_from([0, 1, 60, 200]),
)
def test_edge_tiles_complete_the_coverage_of_the_slide(width, height, mpp, overlap_px):
    spec, bounds = TileSpec(overlap_px=overlap_px), Box(300, 200, width, height)
    side_px0 = spec.side_px0(mpp)
    grid = tile_grid(bounds, spec, mpp, with_edge=True)
    at_edge = find_edge_tiles(bounds, grid, side_px0)
    np.testing.assert_array_equal(grid[~at_edge], tile_grid(bounds, spec, mpp))
    for starts, corner, length in ((grid[:, 0], 300, width), (grid[:, 1], 200, height)):
        starts = np.unique(starts)
        assert starts.max() < corner + length, "a tile lies completely outside"
        assert corner + length - (starts.max() + side_px0) <= 1  # positions are rounded
        assert (starts + side_px0 > corner + length).sum() <= 1


def test_stored_settings_are_those_of_older_versions_unless_tiles_are_padded():
    old = {"tile_px": 224, "mpp": 0.5, "overlap_px": 0, "min_tissue": 0.25, "tissue": "otsu"}
    old |= {"drop_pen": True, "drop_blur": True}
    assert TileSpec().to_dict() == old
    assert TileSpec(**old) == TileSpec()
    padded = TileSpec(edge_tiles="pad")
    assert padded.to_dict() == old | {"edge_tiles": "pad"}
    assert TileSpec(**padded.to_dict()) == padded


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
        TileSpec(tile_px=3, mpp=0.0, overlap_px=-5, min_tissue=0.0, tissue="magic", edge_tiles="mirror")
    for name in ("size is 3", "mpp is 0", "overlap is -5", "min-tissue is 0", "tissue is 'magic'", "otsu, darkness"):
        assert name in str(error.value)
    assert "edge-tiles is 'mirror', but must be one of skip, pad" in str(error.value)
