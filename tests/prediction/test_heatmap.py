"""Heatmaps: tiles without gaps, the colours of the colour bar, and the texts."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from predicted_slides import (
    ATTENTION,
    CONTRIBUTION,
    PREDICTION,
    TARGET,
    make_tile_table,
    predicted_file,
    predicted_slide,
    tile_positions,
)
from slide_files import REAL, needs_real_slides, section, write_slide

from tapfm.prediction.heatmap import _MIN_WIDTH_PX as MIN_WIDTH_PX
from tapfm.prediction.heatmap import _OPACITY as OPACITY
from tapfm.prediction.heatmap import MAX_SIDE_PX, draw_heatmap, overlay_tiles
from tapfm.prediction.heatmap_text import (
    describe_clipped_tiles,
    describe_predictions,
    describe_sum,
    format_layer_heading,
    format_ticks,
    format_value,
)
from tapfm.prediction.layers import UNITS, ColourScale, Layer, layer_values
from tapfm.prediction.tile_squares import place_tiles
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import Box, Thumbnail


def decode_png(data):
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


# --- positions of tiles


@example(mpp=0.59765625, shrink=27.0, tile_px=32)
@given(mpp=st.floats(0.2, 0.6), shrink=st.floats(1, 40), tile_px=st.sampled_from([32, 64, 224]))
@settings(max_examples=60)
def test_neighbouring_tiles_have_no_gap_on_any_grid_and_size(mpp, shrink, tile_px):
    predicted = predicted_slide(mpp=mpp, tile_px=tile_px, bounds=Box(100, 50, 2000, 1500), size_px0=(2200, 1600))
    positions = tile_positions(predicted)
    width_px, height_px = round(2000 / shrink), round(1500 / shrink)
    px0_per_px = (2000 / width_px, 1500 / height_px)
    squares = place_tiles(predicted, positions, px0_per_px, width_px, height_px)
    if predicted.side_px0 - 1 < max(px0_per_px):
        return  # tiles smaller than a pixel share pixels
    area = ((squares.right - squares.left) * (squares.bottom - squares.top)).sum()
    _, covered = squares.rasterise(np.ones(len(positions)), 0, height_px)
    assert covered.sum() == area == squares.right.max() * squares.bottom.max()


def test_tile_without_neighbours_keeps_its_size():
    predicted = predicted_slide()
    squares = place_tiles(predicted, np.array([[224, 448], [1000, 1000]]), (1.0, 1.0), 2240, 1792)
    assert (squares.right - squares.left).tolist() == [224, 224]


def test_tiles_smaller_than_a_pixel_are_visible():
    predicted = predicted_slide(tile_px=16)
    squares = place_tiles(predicted, np.array([[0, 0], [1000, 1000], [2224, 1776]]), (100.0, 100.0), 23, 18)
    _, covered = squares.rasterise(np.ones(3), 0, 18)
    assert covered.sum() == 3


def test_rows_rasterised_separately_equal_the_whole():
    predicted = predicted_slide(mpp=0.496)
    positions = tile_positions(predicted)
    values = np.arange(len(positions), dtype=float)
    squares = place_tiles(predicted, positions, (7.0, 7.0), 320, 256)
    whole, covered = squares.rasterise(values, 0, 256)
    for top in range(0, 256, 50):
        rows = min(50, 256 - top)
        part, part_covered = squares.rasterise(values, top, rows)
        np.testing.assert_array_equal(part, whole[top : top + rows])
        np.testing.assert_array_equal(part_covered, covered[top : top + rows])


def test_overlapping_tiles_show_their_mean():
    predicted = predicted_slide()
    squares = place_tiles(predicted, np.array([[0, 0], [112, 0]]), (1.0, 1.0), 2240, 1792)
    values, covered = squares.rasterise(np.array([1.0, 3.0]), 0, 1792)
    assert covered.sum() == 336 * 224
    assert [values[0, x] for x in (0, 111, 112, 223, 224, 335)] == [1, 1, 2, 2, 3, 3]


# --- colours


def test_tiles_have_the_layer_colours_over_grey_tissue_and_the_rest_is_unchanged():
    predicted = predicted_slide()
    positions = tile_positions(predicted)[:40]
    table = make_tile_table(predicted, positions)
    tissue = section(560, 448, tissue=(0, 0, 1, 1))
    image = overlay_tiles(Thumbnail(tissue, predicted.bounds), predicted, table, CONTRIBUTION, percentile=False)
    values, scale = layer_values(table.values[CONTRIBUTION.column], "contribution")
    colours = scale.colours(values)
    for (x, y), colour in zip(positions // 4, colours, strict=True):
        below = tissue[y : y + 56, x : x + 56] @ np.array([0.299, 0.587, 0.114])
        expected = OPACITY * colour + (1 - OPACITY) * below[..., None]
        np.testing.assert_allclose(image[y : y + 56, x : x + 56], expected, atol=0.5001)
    np.testing.assert_array_equal(image[224:], tissue[224:])


def test_percentiles_give_another_image_of_the_same_tiles(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(1120, 896))
    predicted = predicted_file(path)
    table = make_tile_table(predicted, tile_positions(predicted))
    slide = open_slide(path)
    raw, ranks = (
        overlay_tiles(slide.thumbnail(280), predicted, table, CONTRIBUTION, percentile=percentile)
        for percentile in (False, True)
    )
    assert raw.shape == ranks.shape == (224, 280, 3)
    changed = (raw != ranks).any(axis=2)
    assert changed.mean() > 0.9
    slide.close()


# --- the sheet


@pytest.mark.parametrize(("width_px", "height_px"), [(300, 260), (2600, 900), (260, 2600)])
def test_sheet_has_room_for_its_text_and_little_more(tmp_path, width_px, height_px):
    path = write_slide(tmp_path / "s.svs", section(width_px, height_px, tissue=(0, 0, 1, 1)))
    predicted = replace(predicted_file(path), slide_id="a-very-long-identifier-" * 12)
    slide = open_slide(path)
    table = make_tile_table(predicted, tile_positions(predicted))
    sheet = decode_png(draw_heatmap(slide.thumbnail(MAX_SIDE_PX), predicted, table, CONTRIBUTION))
    slide.close()
    longest_px = min(MAX_SIDE_PX, max(width_px, height_px))
    assert sheet.shape[1] >= MIN_WIDTH_PX
    assert longest_px <= max(sheet.shape) < longest_px + 900
    assert (sheet[:, :8] == 255).all()  # text stays within the margins
    assert (sheet[:, -8:] == 255).all()
    assert (sheet[-8:] == 255).all()


def test_heatmap_is_deterministic_and_differs_between_layers(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(500, 400))
    predicted = predicted_file(path)
    table = make_tile_table(predicted, tile_positions(predicted))
    slide = open_slide(path)
    first = draw_heatmap(slide.thumbnail(MAX_SIDE_PX), predicted, table, CONTRIBUTION)
    assert draw_heatmap(slide.thumbnail(MAX_SIDE_PX), predicted, table, CONTRIBUTION) == first
    assert draw_heatmap(slide.thumbnail(MAX_SIDE_PX), predicted, table, ATTENTION) != first
    slide.close()


def test_slide_without_tiles_is_drawn(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(500, 400))
    predicted = predicted_file(path)
    slide = open_slide(path)
    for percentile in (False, True):
        table = make_tile_table(predicted, np.empty((0, 2), int))
        assert draw_heatmap(slide.thumbnail(MAX_SIDE_PX), predicted, table, CONTRIBUTION, percentile=percentile)
    slide.close()


@needs_real_slides
def test_a_real_slide():
    predicted = predicted_file(REAL / "CMU-1-Small-Region.svs", mpp=0.499)
    slide = open_slide(predicted.path)
    table = make_tile_table(predicted, tile_positions(predicted))
    sheet = decode_png(draw_heatmap(slide.thumbnail(MAX_SIDE_PX), predicted, table, CONTRIBUTION))
    assert max(sheet.shape) > MAX_SIDE_PX
    slide.close()


# --- texts


def test_title_has_probability_threshold_and_call_of_the_layers_targets():
    predicted = predicted_slide(targets=("A", "B"))
    assert describe_predictions(predicted, Layer("contribution.B", "contribution", "B")) == [
        "B: probability 0.623, threshold 0.500, called positive"
    ]
    without_threshold = replace(PREDICTION, threshold=None, call=None)
    predicted = replace(predicted, targets={"A": replace(PREDICTION, call=0), "B": without_threshold})
    assert describe_predictions(predicted, ATTENTION) == [
        "A: probability 0.623, threshold 0.500, called negative",
        "B: probability 0.623",
    ]
    many = predicted_slide(targets=[f"T{number}" for number in range(20)])
    assert describe_predictions(many, ATTENTION)[-1] == "and 14 more targets"


def test_heading_names_layer_target_and_percentiles():
    assert format_layer_heading(ATTENTION, percentile=False) == "Raw attention"
    assert format_layer_heading(CONTRIBUTION, percentile=True).startswith("Contribution to the logit for FGFR3")
    assert "percentile" in format_layer_heading(CONTRIBUTION, percentile=True)


def test_sum_of_contributions_constant_and_logit_are_stated():
    values = np.array([0.75, 0.25])
    text = describe_sum(predicted_slide(), CONTRIBUTION, values)
    assert [number in text for number in ("+1.00", "−0.500", "+0.500")] == [True] * 3
    assert describe_sum(predicted_slide(), ATTENTION, values) == ""
    ensemble = replace(predicted_slide(), targets={TARGET: replace(PREDICTION, constant=None)})
    text = describe_sum(ensemble, CONTRIBUTION, values)
    assert "+1.00" in text
    assert "ensemble" in text
    assert "constant" not in UNITS["contribution"]  # an ensemble has none


def test_tiles_beyond_the_colour_scale_are_counted():
    scale = ColourScale(-1, 1, "x")
    assert describe_clipped_tiles(np.array([-1.0, 0.0, 1.0]), scale) == ""
    above = describe_clipped_tiles(np.array([2.0]), scale)
    assert "1 tile above 1.00 (maximum 2.00)" in above
    assert "below" not in above
    both = describe_clipped_tiles(np.array([-2.0, -3.0, 2.0]), scale)
    assert "2 tiles below −1.00 (minimum −3.00)" in both
    assert "1 tile above 1.00 (maximum 2.00)" in both
    close = describe_clipped_tiles(np.array([1.0001]), scale)
    assert "above 1.0000 (maximum 1.0001)" in close


def test_values_and_ticks_have_few_digits():
    texts = [format_value(each) for each in (0.0, 0.02, -0.012345, 123.456, 1234.5, 1e-6)]
    assert texts == ["0", "0.0200", "−0.0123", "123", "1.23e+03", "1.00e−06"]
    assert format_ticks([-0.02, -0.01, 0.0, 0.01]) == ["−0.02", "−0.01", "0.00", "0.01"]
    assert format_ticks([0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert format_ticks([0, 1000]) == ["0", "1,000"]
    assert format_ticks([0, 25, 50]) == ["0", "25", "50"]
    assert format_ticks([0.0025, 0.005]) == ["0.0025", "0.0050"]
    assert format_ticks([1e-9, 2e-9]) == ["1e-09", "2e-09"]
