"""Galleries: the tiles with the highest and lowest values, each once, and unreadable tiles."""

import io
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from predicted_slides import CONTRIBUTION, make_tile_table, predicted_file, tile_positions
from slide_files import damage, section, write_slide

from tapfm.errors import TileReadError
from tapfm.prediction.gallery import _FRAME_PX as FRAME_PX
from tapfm.prediction.gallery import _GAP_PX as GAP_PX
from tapfm.prediction.gallery import _MARGIN_PX as MARGIN_PX
from tapfm.prediction.gallery import _draw_unreadable_tile as draw_unreadable_tile
from tapfm.prediction.gallery import _find_extreme_tiles as highest_and_lowest
from tapfm.prediction.gallery import draw_gallery, read_tile_image
from tapfm.prediction.layers import layer_values
from tapfm.slides.opening import open_slide
from tapfm.slides.readers.openslide import OpenSlideSlide


@given(st.lists(st.integers(-3, 3), max_size=40), st.integers(1, 8))
def test_no_tile_is_both_highest_and_lowest_or_repeated(values, count):
    array = np.array(values, float)
    highest, lowest = highest_and_lowest(array, count)
    chosen = [*highest.tolist(), *lowest.tolist()]
    assert len(set(chosen)) == len(chosen) == min(2 * count, len(values))
    assert len(highest) - len(lowest) in (0, 1)
    ordered = sorted(values)
    assert sorted(array[highest].tolist()) == ordered[len(ordered) - len(highest) :]
    assert sorted(array[lowest].tolist()) == ordered[: len(lowest)]
    assert (np.diff(array[highest]) <= 0).all()
    assert (np.diff(array[lowest]) >= 0).all()


@pytest.fixture
def slide(tmp_path):
    """A slide whose tiles all have different grey levels."""
    pixels = np.zeros((224 * 4, 224 * 5, 3), np.uint8)
    for number in range(20):
        x, y = 224 * (number % 5), 224 * (number // 5)
        pixels[y : y + 224, x : x + 224] = 10 * number + 20
    path = write_slide(tmp_path / "s.tif", pixels, downsamples=(1,), compression="zlib", aperio=False)
    opened = open_slide(path)
    yield opened
    opened.close()


def test_tiles_are_sorted_by_value_and_framed_in_their_colours(slide):
    predicted = predicted_file(slide.metadata.path)
    values = np.random.default_rng(0).permutation(20) - 9.5
    table = make_tile_table(predicted, tile_positions(predicted), values)
    with Image.open(io.BytesIO(draw_gallery(slide, predicted, table, CONTRIBUTION, count=4))) as image:
        sheet = np.asarray(image)
    cell = 224 + 2 * FRAME_PX
    _, scale = layer_values(values, "contribution")
    colours = scale.colours(values)
    tops = []
    for chosen in highest_and_lowest(values, 4):
        for place, row in enumerate(chosen.tolist()):
            left = MARGIN_PX + place * (cell + GAP_PX)
            # the first rows of this colour in the column are the frame
            rows = np.flatnonzero((sheet[:, left : left + cell] == colours[row]).all(axis=(1, 2)))
            top = int(rows[0])
            tops.append(top)
            inner = sheet[top + FRAME_PX : top + FRAME_PX + 224, left + FRAME_PX : left + FRAME_PX + 224]
            assert (inner == 10 * row + 20).all()
    assert len(set(tops)) == 2
    assert tops[0] < tops[-1]


def test_padded_tiles_are_marked_and_white_outside_the_slide(slide):
    predicted = predicted_file(slide.metadata.path)
    table = make_tile_table(predicted, [[0, 0], [224 * 5 - 24, 0]], [1.0, -1.0])

    def draw(padded):
        marked = replace(table, padded=None if padded is None else np.array(padded))
        with Image.open(io.BytesIO(draw_gallery(slide, predicted, marked, CONTRIBUTION))) as image:
            return np.asarray(image).astype(int)

    unmarked, marked = draw([False, False]), draw([False, True])
    changed = np.flatnonzero((unmarked != marked).any(axis=(1, 2)))
    assert 0 < np.ptp(changed) < 20  # a word in one line
    assert draw(None).shape[0] < unmarked.shape[0]  # the word is explained only for tiles of --edge-tiles pad
    tile = np.asarray(read_tile_image(slide, predicted, 224 * 5 - 24, 0))
    assert (tile[:, 24:] == 255).all()
    assert (tile[:, :24] == 60).all()


@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 9])
def test_gallery_shrinks_with_few_tiles(slide, tiles):
    predicted = predicted_file(slide.metadata.path)
    table = make_tile_table(predicted, tile_positions(predicted)[:tiles], np.zeros(tiles))
    with Image.open(io.BytesIO(draw_gallery(slide, predicted, table, CONTRIBUTION))) as image:
        assert image.height < 300 + 330 * (-(-tiles // 8) + (tiles > 1))
        pixels = np.asarray(image)
    for row in range(20):
        found = (pixels == 10 * row + 20).all(axis=2).sum()
        assert found >= 224 * 224 if row < tiles else found < 2000


def test_small_tiles_are_enlarged(slide):
    predicted = predicted_file(slide.metadata.path, tile_px=32)
    table = make_tile_table(predicted, np.array([[0, 0], [448, 448]]), [1.0, 2.0])
    with Image.open(io.BytesIO(draw_gallery(slide, predicted, table, CONTRIBUTION))) as image:
        pixels = np.asarray(image)
    assert [(pixels == 10 * row + 20).all(axis=2).sum() >= 160 * 160 for row in (0, 12, 5)] == [True, True, False]


def test_unreadable_tile_is_drawn_as_a_crossed_box(tmp_path):
    path = damage(write_slide(tmp_path / "s.svs", section(1024, 1024, tissue=(0, 0, 1, 1))), [5])
    slide = OpenSlideSlide(path)
    predicted = predicted_file(path)
    with pytest.raises(TileReadError):
        slide.read(224, 224, 224, 224)
    box = np.asarray(read_tile_image(slide, predicted, 224, 224))
    assert box.shape == (224, 224, 3)
    assert (box == box[0, 5]).all(axis=2).mean() > 0.5
    assert (box.astype(int)[..., 0] - box[..., 1] > 60).any()  # red text
    assert read_tile_image(slide, predicted, 672, 672).size == (224, 224)
    table = make_tile_table(predicted, tile_positions(predicted))
    assert draw_gallery(slide, predicted, table, CONTRIBUTION)
    slide.close()


@pytest.mark.parametrize("side_px", [16, 64, 224, 1024])
def test_box_of_an_unreadable_tile_has_any_size(side_px):
    assert draw_unreadable_tile(side_px, "the region cannot be decoded " * 20).size == (side_px, side_px)
