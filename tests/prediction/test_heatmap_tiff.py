"""Heatmaps as pyramidal TIFF: read back with OpenSlide and our own reader."""

import json

import numpy as np
import openslide
import pytest
import tifffile
from predicted_slides import ATTENTION, CONTRIBUTION, make_tile_table, predicted_slide, tile_positions

from tapfm.prediction.heatmap_tiff import _MAX_LAST_LEVEL_PX as MAX_LAST_LEVEL_PX
from tapfm.prediction.heatmap_tiff import _iter_blocks as iter_blocks
from tapfm.prediction.heatmap_tiff import _level_sizes as level_sizes
from tapfm.prediction.heatmap_tiff import write_heatmap_tiff
from tapfm.prediction.layers import layer_values
from tapfm.prediction.tile_squares import place_tiles
from tapfm.runtime.files import UNFINISHED_SUFFIX
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import Box


@pytest.fixture
def predicted():
    # 40x: a tile has 448 pixels, so the heatmap is downsampled by 14
    return predicted_slide(mpp=0.25, size_px0=(44_000, 30_000), bounds=Box(1_000, 2_000, 40_320, 27_000))


@pytest.fixture
def table(predicted):
    positions = tile_positions(predicted)
    return make_tile_table(predicted, positions[np.arange(len(positions)) % 7 != 0])


def test_openslide_reads_levels_and_scale(tmp_path, predicted, table):
    path = tmp_path / "heatmap.tif"
    write_heatmap_tiff(path, predicted, table, CONTRIBUTION)
    assert openslide.OpenSlide.detect_format(path) == "generic-tiff"
    with openslide.OpenSlide(path) as opened:
        assert opened.level_dimensions == ((2880, 1929), (1440, 965), (720, 483))
        assert float(opened.properties["openslide.mpp-x"]) == pytest.approx(0.25 * 14, rel=1e-6)
        assert float(opened.properties["openslide.mpp-y"]) == pytest.approx(0.25 * 14, rel=1e-6)
    slide = open_slide(path)
    assert slide.metadata.reader == "tiff"
    assert slide.metadata.mpp_in_file == pytest.approx(3.5, rel=1e-6)
    assert [level.downsample for level in slide.metadata.levels] == [1, 2, 4]
    slide.close()


def test_every_level_has_all_tiles_in_their_colours_on_white(tmp_path, predicted, table):
    path = tmp_path / "heatmap.tif"
    write_heatmap_tiff(path, predicted, table, CONTRIBUTION)
    values, scale = layer_values(table.values[CONTRIBUTION.column], "contribution")
    colours = scale.colours(values)
    with openslide.OpenSlide(path) as opened:
        for level, size in enumerate(opened.level_dimensions):
            image = np.asarray(opened.read_region((0, 0), level, size).convert("RGB"))
            side = 32 // 2**level
            expected = np.full_like(image, 255)
            for (x, y), colour in zip((table.positions - [1_000, 2_000]) // (14 * 2**level), colours, strict=True):
                expected[y : y + side, x : x + side] = colour
            np.testing.assert_array_equal(image, expected)


def test_file_describes_layer_unit_and_position(tmp_path, predicted, table):
    for percentile in (False, True):
        _, scale = layer_values(table.values[ATTENTION.column], ATTENTION.kind, percentile=percentile)
        path = tmp_path / "heatmap.tif"
        write_heatmap_tiff(path, predicted, table, ATTENTION, percentile=percentile)
        with tifffile.TiffFile(path) as file:
            about = json.loads(file.pages[0].description)
            assert [page.subfiletype for page in file.pages] == [0, 1, 1]
        assert about["slide_id"] == "case-17"
        assert (about["layer"], about["percentile"], about["unit"]) == ("attention", percentile, scale.unit)
        assert (about["downsample"], about["bounds_corner_px0"]) == (14, [1_000, 2_000])
        if percentile:
            assert (about["low"], about["high"]) == (0, 100)


def test_small_slide_without_tiles_is_one_white_level(tmp_path):
    predicted = predicted_slide(size_px0=(500, 400))
    write_heatmap_tiff(
        tmp_path / "heatmap.tif", predicted, make_tile_table(predicted, np.empty((0, 2), int)), CONTRIBUTION
    )
    image = tifffile.imread(tmp_path / "heatmap.tif")
    assert image.shape == (58, 72, 3)
    assert (image == 255).all()


def test_output_is_deterministic_and_replaces_a_file(tmp_path, predicted, table):
    first, second = tmp_path / "a.tif", tmp_path / "b.tif"
    write_heatmap_tiff(first, predicted, table, CONTRIBUTION)
    second.write_text("something else")
    write_heatmap_tiff(second, predicted, table, CONTRIBUTION)
    assert first.read_bytes() == second.read_bytes()
    assert not list(tmp_path.glob(f"*{UNFINISHED_SUFFIX}"))


def test_levels_stop_at_the_first_small_one():
    assert level_sizes(MAX_LAST_LEVEL_PX, 10) == [(MAX_LAST_LEVEL_PX, 10)]
    assert level_sizes(10, MAX_LAST_LEVEL_PX + 1) == [(10, MAX_LAST_LEVEL_PX + 1), (5, 513)]


def test_large_slide_is_drawn_one_row_of_blocks_at_a_time():
    predicted = predicted_slide(size_px0=(100_000, 100_000))
    positions = np.array([[0, 0], [99_680, 99_680]])
    squares = place_tiles(predicted, positions, (7.0, 7.0), 14_286, 14_286)
    values, scale = layer_values(np.array([-1.0, 1.0]), "contribution")
    blocks = iter_blocks(squares, values, scale)
    first = next(blocks)
    assert first.shape == (256, 256, 3)
    assert first.base.nbytes < 12e6  # not the 600 MB of the whole
    assert (first[:32, :32] == scale.colours(values)[0]).all()
