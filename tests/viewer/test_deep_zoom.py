"""Where each picture of the pyramid lies."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tapfm.slides.slide import Box
from tapfm.viewer.deep_zoom import DeepZoom, ZoomTile


@given(some.integers(1, 200_000), some.integers(1, 200_000), some.integers(0, 999), some.integers(0, 20))
def test_the_pictures_of_a_level_cover_the_bounds_once(width, height, corner, level):
    zoom = DeepZoom(Box(corner, 2 * corner, width, height))
    level = min(level, zoom.last_level)
    downsample = 2 ** (zoom.last_level - level)
    columns, rows = (math.ceil(length / downsample / 512) for length in (width, height))
    assert zoom.picture(level, columns, 0) is None
    assert zoom.picture(level, 0, rows) is None
    across = [zoom.picture(level, column, 0) for column in range(columns)]
    down = [zoom.picture(level, 0, row) for row in range(rows)]
    assert sum(picture.box.width_px0 for picture in across) == width
    assert sum(picture.box.height_px0 for picture in down) == height
    for picture in (*across, *down):
        assert 1 <= picture.width_px <= 512
        assert picture.width_px == math.ceil(picture.box.width_px0 / downsample)
    last = zoom.picture(level, columns - 1, rows - 1).box
    assert (last.x_px0 + last.width_px0, last.y_px0 + last.height_px0) == (corner + width, 2 * corner + height)


def test_the_first_level_is_one_picture_and_the_last_has_the_pixels_of_the_slide():
    zoom = DeepZoom(Box(512, 256, 2304, 1280))
    assert zoom.last_level == 3
    assert zoom.picture(0, 0, 0) == ZoomTile(Box(512, 256, 2304, 1280), 288, 160)
    assert zoom.picture(3, 1, 2) == ZoomTile(Box(1024, 1280, 512, 256), 512, 256)


@pytest.mark.parametrize("where", [(-1, 0, 0), (4, 0, 0), (3, -1, 0), (3, 0, -1), (3, 5, 0), (3, 0, 3), (0, 1, 0)])
def test_there_is_nothing_beyond(where):
    assert DeepZoom(Box(512, 256, 2304, 1280)).picture(*where) is None
