"""Overlays: removed tiles are coloured at their positions, and the caption fits."""

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


def render_overlay(path, spec=TileSpec()):  # noqa: B008 - a frozen dataclass
    slide = open_slide(path)
    scale = resolve_scale(slide.metadata)
    tiled = tile_slide(slide, scale, spec)
    with Image.open(io.BytesIO(draw_overlay(slide, tiled, scale, "case-17"))) as image:
        return np.asarray(image.convert("RGB")).astype(int), tiled


@pytest.mark.parametrize("bounded", [False, True])
def test_only_pen_tiles_are_coloured(tmp_path, bounded):
    pixels = section(1120, 1120, tissue=(0, 0, 1, 1))
    pixels[448:672, 448:672] = (30, 60, 170)
    if bounded:
        path = write_scn(tmp_path / "s.scn", [(512, 256, pixels)], (4096, 2048))
    else:
        path = write_slide(tmp_path / "s.svs", pixels)
    overlay, tiled = render_overlay(path)
    left, top = (512, 256) if bounded else (0, 0)
    pen_tiles = {
        tuple(position) for position in (tiled.positions[tiled.statuses == TileStatus.PEN] - [left, top]).tolist()
    }
    assert (448, 448) in pen_tiles
    for x in range(0, 1120, 224):
        for y in range(0, 1120, 224):
            # without the lines of the grid
            before, after = (each[y + 40 : y + 180, x + 40 : x + 180].mean(axis=(0, 1)) for each in (pixels, overlay))
            coloured = 0.55 * np.array(COLOURS[TileStatus.PEN]) + 0.45 * before
            expected = coloured if (x, y) in pen_tiles else before
            assert np.abs(after - expected).max() < 12, (x, y)


@pytest.mark.parametrize("edge_tiles", ["skip", "pad"])
def test_edge_tiles_are_filled_if_removed_and_outlined_if_padded(tmp_path, edge_tiles):
    pixels = section(1000, 672, tissue=(0, 0, 1, 1))
    overlay, _ = render_overlay(write_slide(tmp_path / "s.svs", pixels), TileSpec(edge_tiles=edge_tiles))
    colour = np.array(COLOURS[TileStatus.EDGE])
    scale = 1200 / 1000 if overlay.shape[1] >= 1200 else 1
    for x, y in ((896, 0), (896, 224), (896, 448), (672, 224)):
        left, top, right = round(x * scale), round(y * scale), round(min(x + 224, 1000) * scale)
        inside = overlay[top + 40 : top + 180, left + 30 : right - 30].mean(axis=(0, 1))
        before = pixels[y + 40 : y + 180, x + 20 : min(x + 224, 1000) - 20].mean(axis=(0, 1))
        is_filled = edge_tiles == "skip" and x == 896
        assert np.abs(inside - (0.55 * colour + 0.45 * before if is_filled else before)).max() < 15, (x, y)
        line = overlay[top + 40 : top + 180, left + 1].mean(axis=0)
        assert (np.abs(line - 0.55 * colour - 0.45 * before).max() < 15) == (x == 896), (x, y)


def test_overlay_of_narrow_slide_is_widened_for_the_caption(tmp_path):
    overlay, _ = render_overlay(write_slide(tmp_path / "s.svs", section(300, 2400, tissue=(0, 0, 1, 1))))
    assert overlay.shape[1] > 200
    assert (overlay[:, -5:] == 255).all()
    caption = overlay[-60:]
    assert (caption < 100).any()
