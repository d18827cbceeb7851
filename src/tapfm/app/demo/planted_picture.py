"""One painted slide four times: what was planted, attention before and after, and what tiles said."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tapfm.app.demo.sizes import TARGET
from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.heatmap import heated, png_of
from tapfm.prediction.layers import Layer
from tapfm.prediction.tile_table import TileTable
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import WHITE, Pixels, Thumbnail
from tapfm.storage import write_atomically
from tapfm.synthetic.truth import SlideTruth
from tapfm.tiles.lettering import Column, font

PANEL_PX = 420
LETTERS_PX = 15
MARGIN_PX = 14
PLANTED = np.array((0, 140, 60))


def draw_planted(
    path: Path,
    slide: PredictedSlide,
    table: TileTable,
    values: Mapping[str, NDArray[np.float64]],
    truth: SlideTruth,
) -> None:
    """Draw the slide with the planted nests in green, then a map for each of the values."""
    with closing(open_slide(slide.path)) as opened:
        thumbnail = opened.thumbnail(PANEL_PX)
    panels = [("planted nests", planted(thumbnail, truth))]
    for name, each in values.items():
        kind = (
            Layer("value", "contribution", TARGET) if name.startswith("contribution") else Layer("value", "attention")
        )
        mapped = TileTable(table.positions, {"value": each})
        # percentiles of attention, whose values before and after are of different sizes
        panels.append((name, heated(thumbnail, slide, mapped, kind, percentile=kind.kind == "attention")))
    pictures = [panel(title, pixels) for title, pixels in panels]
    width_px = sum(picture.width for picture in pictures)
    sheet = Image.new("RGB", (width_px, max(picture.height for picture in pictures)), WHITE)
    left = 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width
    write_atomically(path, png_of(sheet))


def planted(thumbnail: Thumbnail, truth: SlideTruth) -> Pixels:
    """Colour the nests that carry the signal."""
    mask = truth.focus == truth.foci.index(TARGET) + 1
    height_px, width_px = thumbnail.pixels.shape[:2]
    down_x, down_y = thumbnail.downsample
    rows = np.clip((thumbnail.box.y_px0 + np.arange(height_px) * down_y) / truth.height_px0 * mask.shape[0], 0, None)
    columns = np.clip((thumbnail.box.x_px0 + np.arange(width_px) * down_x) / truth.width_px0 * mask.shape[1], 0, None)
    shown = mask[
        np.minimum(rows.astype(int), mask.shape[0] - 1)[:, None], np.minimum(columns.astype(int), mask.shape[1] - 1)
    ]
    pixels = thumbnail.pixels.copy()
    pixels[shown] = ((pixels[shown] + 2 * PLANTED) // 3).astype(np.uint8)
    return pixels


def panel(title: str, pixels: Pixels) -> Image.Image:
    """Put a title above a picture."""
    picture = Image.fromarray(pixels)
    head = Column(max(picture.width, 200) + 2 * MARGIN_PX, MARGIN_PX)
    head.y_px += MARGIN_PX
    head.write(title, font(LETTERS_PX, bold=True), LETTERS_PX)
    head.y_px += MARGIN_PX // 2
    sheet = Image.new("RGB", (head.picture.width, head.y_px + picture.height + MARGIN_PX), WHITE)
    sheet.paste(head.paper(), (0, 0))
    sheet.paste(picture, (MARGIN_PX, head.y_px))
    return sheet
