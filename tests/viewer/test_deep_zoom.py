"""Regions of the images in the pyramid."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.slides.slide import Box
from tapfm.viewer.deep_zoom import DeepZoomPyramid, PyramidImage


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(0, 999), st.integers(0, 20))
def test_the_images_of_a_level_cover_the_bounds_once(width, height, corner, level):
    pyramid = DeepZoomPyramid(Box(corner, 2 * corner, width, height))
    level = min(level, pyramid.last_level)
    downsample = 2 ** (pyramid.last_level - level)
    columns, rows = (math.ceil(length / downsample / 512) for length in (width, height))
    assert pyramid.find_image(level, columns, 0) is None
    assert pyramid.find_image(level, 0, rows) is None
    across = [pyramid.find_image(level, column, 0) for column in range(columns)]
    down = [pyramid.find_image(level, 0, row) for row in range(rows)]
    assert sum(image.box.width_px0 for image in across) == width
    assert sum(image.box.height_px0 for image in down) == height
    for image in (*across, *down):
        assert 1 <= image.width_px <= 512
        assert image.width_px == math.ceil(image.box.width_px0 / downsample)
    last = pyramid.find_image(level, columns - 1, rows - 1).box
    assert (last.x_px0 + last.width_px0, last.y_px0 + last.height_px0) == (corner + width, 2 * corner + height)


def test_the_first_level_is_one_image_and_the_last_has_full_resolution():
    pyramid = DeepZoomPyramid(Box(512, 256, 2304, 1280))
    assert pyramid.last_level == 3
    assert pyramid.find_image(0, 0, 0) == PyramidImage(Box(512, 256, 2304, 1280), 288, 160)
    assert pyramid.find_image(3, 1, 2) == PyramidImage(Box(1024, 1280, 512, 256), 512, 256)


@pytest.mark.parametrize("index", [(-1, 0, 0), (4, 0, 0), (3, -1, 0), (3, 0, -1), (3, 5, 0), (3, 0, 3), (0, 1, 0)])
def test_there_are_no_images_outside_the_pyramid(index):
    assert DeepZoomPyramid(Box(512, 256, 2304, 1280)).find_image(*index) is None
