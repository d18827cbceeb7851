"""The map of a slide: tiles without gaps, colours as the colour bar has them, words that say what is shown."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from predicted_slides import ATTENTION, CONTRIBUTION, SAID, TARGET, grid_of, predicted_file, predicted_slide, table_of
from slide_files import REAL, needs_real_slides, section, write_slide

from tapfm.prediction.heatmap import _NARROWEST_PX as NARROWEST_PX
from tapfm.prediction.heatmap import _OPACITY as OPACITY
from tapfm.prediction.heatmap import LONGEST_PX, draw_heatmap, draw_tiles_over
from tapfm.prediction.layers import UNITS, ColourScale, Layer, layer_values
from tapfm.prediction.placing import place
from tapfm.prediction.wording import beyond_line, format_value, heading, prediction_lines, sum_line, tick_texts
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import Box, Thumbnail


def pixels_of(data):
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).astype(int)


def paper(width_px, height_px, box):
    return Thumbnail(np.full((height_px, width_px, 3), 240, np.uint8), box)


# --- where tiles are


@example(mpp=0.59765625, shrink=27.0, tile_px=32)
@given(mpp=st.floats(0.2, 0.6), shrink=st.floats(1, 40), tile_px=st.sampled_from([32, 64, 224]))
@settings(max_examples=60)
def test_neighbours_share_their_edges_on_every_grid_and_at_every_size(mpp, shrink, tile_px):
    predicted = predicted_slide(mpp=mpp, tile_px=tile_px, bounds=Box(100, 50, 2000, 1500), size_px0=(2200, 1600))
    positions = grid_of(predicted)
    width_px, height_px = round(2000 / shrink), round(1500 / shrink)
    px0_per_px = (2000 / width_px, 1500 / height_px)
    squares = place(predicted, positions, px0_per_px, width_px, height_px)
    if predicted.side_px0 - 1 < max(px0_per_px):
        return  # tiles smaller than a pixel share pixels; starts may be a pixel of level 0 nearer than a side
    area = ((squares.right - squares.left) * (squares.bottom - squares.top)).sum()
    _, painted = squares.paint(np.ones(len(positions)), 0, height_px)
    assert painted.sum() == area == squares.right.max() * squares.bottom.max()


def test_a_tile_without_neighbours_has_its_own_size():
    predicted = predicted_slide()
    squares = place(predicted, np.array([[224, 448], [1000, 1000]]), (1.0, 1.0), 2240, 1792)
    assert (squares.right - squares.left).tolist() == [224, 224]


def test_tiles_smaller_than_a_pixel_are_still_there():
    predicted = predicted_slide(tile_px=16)
    squares = place(predicted, np.array([[0, 0], [1000, 1000], [2224, 1776]]), (100.0, 100.0), 23, 18)
    _, painted = squares.paint(np.ones(3), 0, 18)
    assert painted.sum() == 3


def test_rows_painted_one_by_one_are_the_whole():
    predicted = predicted_slide(mpp=0.496)
    positions = grid_of(predicted)
    values = np.arange(len(positions), dtype=float)
    squares = place(predicted, positions, (7.0, 7.0), 320, 256)
    whole, painted = squares.paint(values, 0, 256)
    for top in range(0, 256, 50):
        rows = min(50, 256 - top)
        part, here = squares.paint(values, top, rows)
        np.testing.assert_array_equal(part, whole[top : top + rows])
        np.testing.assert_array_equal(here, painted[top : top + rows])


def test_overlapping_tiles_show_their_mean():
    predicted = predicted_slide()
    squares = place(predicted, np.array([[0, 0], [112, 0]]), (1.0, 1.0), 2240, 1792)
    values, painted = squares.paint(np.array([1.0, 3.0]), 0, 1792)
    assert painted.sum() == 336 * 224
    assert [values[0, x] for x in (0, 111, 112, 223, 224, 335)] == [1, 1, 2, 2, 3, 3]


# --- colours


def test_tiles_have_the_colours_of_their_layer_over_grey_tissue_and_the_rest_is_untouched():
    predicted = predicted_slide()
    positions = grid_of(predicted)[:40]
    table = table_of(predicted, positions)
    tissue = section(560, 448, tissue=(0, 0, 1, 1))
    picture = draw_tiles_over(Thumbnail(tissue, predicted.bounds), predicted, table, CONTRIBUTION, percentile=False)
    values, scale = layer_values(table.values[CONTRIBUTION.column], "contribution")
    colours = scale.colours(values)
    for (x, y), colour in zip(positions // 4, colours, strict=True):
        below = tissue[y : y + 56, x : x + 56] @ np.array([0.299, 0.587, 0.114])
        expected = OPACITY * colour + (1 - OPACITY) * below[..., None]
        np.testing.assert_allclose(picture[y : y + 56, x : x + 56], expected, atol=0.5001)
    np.testing.assert_array_equal(picture[224:], tissue[224:])


def test_percentiles_are_another_picture_of_the_same_tiles(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(1120, 896))
    predicted = predicted_file(path)
    table = table_of(predicted, grid_of(predicted))
    slide = open_slide(path)
    raw, ranks = (
        draw_tiles_over(slide.thumbnail(280), predicted, table, CONTRIBUTION, percentile=percentile)
        for percentile in (False, True)
    )
    assert raw.shape == ranks.shape == (224, 280, 3)
    changed = (raw != ranks).any(axis=2)
    assert changed.mean() > 0.9
    slide.close()


# --- the sheet


@pytest.mark.parametrize(("width_px", "height_px"), [(300, 260), (2600, 900), (260, 2600)])
def test_the_sheet_has_room_for_its_words_and_no_more_than_it_needs(tmp_path, width_px, height_px):
    path = write_slide(tmp_path / "s.svs", section(width_px, height_px, tissue=(0, 0, 1, 1)))
    predicted = replace(predicted_file(path), slide_id="a-very-long-identifier-" * 12)
    slide = open_slide(path)
    table = table_of(predicted, grid_of(predicted))
    sheet = pixels_of(draw_heatmap(slide.thumbnail(LONGEST_PX), predicted, table, CONTRIBUTION))
    slide.close()
    longest_px = min(LONGEST_PX, max(width_px, height_px))
    assert sheet.shape[1] >= NARROWEST_PX
    assert longest_px <= max(sheet.shape) < longest_px + 900
    assert (sheet[:, :8] == 255).all()  # words stay within the margins
    assert (sheet[:, -8:] == 255).all()
    assert (sheet[-8:] == 255).all()


def test_the_same_prediction_gives_the_same_bytes_and_another_layer_others(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(500, 400))
    predicted = predicted_file(path)
    table = table_of(predicted, grid_of(predicted))
    slide = open_slide(path)
    first = draw_heatmap(slide.thumbnail(LONGEST_PX), predicted, table, CONTRIBUTION)
    assert draw_heatmap(slide.thumbnail(LONGEST_PX), predicted, table, CONTRIBUTION) == first
    assert draw_heatmap(slide.thumbnail(LONGEST_PX), predicted, table, ATTENTION) != first
    slide.close()


def test_a_slide_without_tiles_is_drawn(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(500, 400))
    predicted = predicted_file(path)
    slide = open_slide(path)
    for percentile in (False, True):
        table = table_of(predicted, np.empty((0, 2), int))
        assert draw_heatmap(slide.thumbnail(LONGEST_PX), predicted, table, CONTRIBUTION, percentile=percentile)
    slide.close()


@needs_real_slides
def test_a_real_slide():
    predicted = predicted_file(REAL / "CMU-1-Small-Region.svs", mpp=0.499)
    slide = open_slide(predicted.path)
    table = table_of(predicted, grid_of(predicted))
    sheet = pixels_of(draw_heatmap(slide.thumbnail(LONGEST_PX), predicted, table, CONTRIBUTION))
    assert max(sheet.shape) > LONGEST_PX
    slide.close()


# --- words


def test_the_title_says_probability_threshold_and_call_of_the_layers_targets():
    predicted = predicted_slide(targets=("A", "B"))
    assert prediction_lines(predicted, Layer("contribution.B", "contribution", "B")) == [
        "B: probability 0.623, threshold 0.500, called positive"
    ]
    unsure = replace(SAID, threshold=None, call=None)
    predicted = replace(predicted, targets={"A": replace(SAID, call=0), "B": unsure})
    assert prediction_lines(predicted, ATTENTION) == [
        "A: probability 0.623, threshold 0.500, called negative",
        "B: probability 0.623",
    ]
    many = predicted_slide(targets=[f"T{number}" for number in range(20)])
    assert prediction_lines(many, ATTENTION)[-1] == "and 14 more targets"


def test_the_heading_says_whether_values_or_percentiles_are_shown():
    assert heading(ATTENTION, percentile=False) == "Raw attention of the encoder"
    assert heading(CONTRIBUTION, percentile=True) == "Contribution to the logit of FGFR3, as percentile"


def test_contributions_are_summed_up_to_the_logit():
    values = np.array([0.75, 0.25])
    assert sum_line(predicted_slide(), CONTRIBUTION, values) == (
        "The tiles add up to +1.00; with the constant −0.500 this is the logit +0.500."
    )
    assert sum_line(predicted_slide(), ATTENTION, values) == ""
    ensemble = replace(predicted_slide(), targets={TARGET: replace(SAID, constant=None)})
    assert sum_line(ensemble, CONTRIBUTION, values) == (
        "The tiles add up to +1.00: the mean of the members' logits, less their constants."
    )
    assert "constant" not in UNITS["contribution"]  # which an ensemble has not


def test_ends_that_are_cut_are_told():
    scale = ColourScale(-1, 1, "x")
    assert beyond_line(np.array([-1.0, 0.0, 1.0]), scale) == ""
    assert beyond_line(np.array([2.0]), scale) == "1 tile above 1.00 (up to 2.00) shares the end's colour."
    assert beyond_line(np.array([-2.0, -3.0, 2.0]), scale) == (
        "2 tiles below −1.00 (down to −3.00) and 1 tile above 1.00 (up to 2.00) share the end's colour."
    )


def test_numbers_are_as_long_as_they_have_to_be():
    numbers = [format_value(each) for each in (0.0, 0.02, -0.012345, 123.456, 1234.5, 1e-6)]
    assert numbers == ["0", "0.0200", "−0.0123", "123", "1.23e+03", "1.00e−06"]
    assert tick_texts([-0.02, -0.01, 0.0, 0.01]) == ["−0.02", "−0.01", "0.00", "0.01"]
    assert tick_texts([0, 0.25, 0.5]) == ["0.00", "0.25", "0.50"]
    assert tick_texts([0, 1000]) == ["0", "1,000"]
    assert tick_texts([0, 25, 50]) == ["0", "25", "50"]
    assert tick_texts([0.0025, 0.005]) == ["0.0025", "0.0050"]
    assert tick_texts([1e-9, 2e-9]) == ["1e-09", "2e-09"]
