"""The picture that people judge the tiles by: everything on it is where it is on the slide."""

import io

import numpy as np
import pytest
from PIL import Image
from slide_files import section, write_scn, write_slide

from tapfm.slides.opening import open_slide
from tapfm.slides.scale import resolve_scale
from tapfm.tiles.grid import TileSpec, TileStatus
from tapfm.tiles.overlay import _COLOURS as COLOURS
from tapfm.tiles.overlay import draw_overlay
from tapfm.tiles.tiling import tile_slide


def overlay_of(path):
    slide = open_slide(path)
    scale = resolve_scale(slide.metadata)
    tiled = tile_slide(slide, scale, TileSpec())
    with Image.open(io.BytesIO(draw_overlay(slide, tiled, scale, "case-17"))) as image:
        return np.asarray(image.convert("RGB")).astype(int), tiled


@pytest.mark.parametrize("bounded", [False, True])
def test_inked_tiles_are_painted_where_they_are_and_nothing_else_is(tmp_path, bounded):
    pixels = section(1120, 1120, tissue=(0, 0, 1, 1))
    pixels[448:672, 448:672] = (30, 60, 170)
    if bounded:
        path = write_scn(tmp_path / "s.scn", [(512, 256, pixels)], (4096, 2048))
    else:
        path = write_slide(tmp_path / "s.svs", pixels)
    picture, tiled = overlay_of(path)
    left, top = (512, 256) if bounded else (0, 0)
    inked = {tuple(place) for place in (tiled.positions[tiled.statuses == TileStatus.PEN] - [left, top]).tolist()}
    assert (448, 448) in inked
    for x in range(0, 1120, 224):
        for y in range(0, 1120, 224):
            # away from the lines of the grid
            before, after = (each[y + 40 : y + 180, x + 40 : x + 180].mean(axis=(0, 1)) for each in (pixels, picture))
            painted = 0.55 * np.array(COLOURS[TileStatus.PEN]) + 0.45 * before
            expected = painted if (x, y) in inked else before
            assert np.abs(after - expected).max() < 12, (x, y)


def test_a_narrow_slide_has_room_for_its_caption(tmp_path):
    picture, _ = overlay_of(write_slide(tmp_path / "s.svs", section(300, 2400, tissue=(0, 0, 1, 1))))
    assert picture.shape[1] > 200
    assert (picture[:, -5:] == 255).all()
    caption = picture[-60:]
    assert (caption < 100).any()
