"""One painted slide four times: as it is, attention before and after, and contributions; planted nests outlined."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tapfm.demo.sizes import TARGET
from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.heatmap import encode_png, overlay_tiles
from tapfm.prediction.layers import Layer
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.files import write_atomically
from tapfm.slides.opening import open_slide
from tapfm.slides.slide import WHITE, Pixels, Thumbnail
from tapfm.slides.tissue import Mask
from tapfm.synthetic.truth import SlideTruth
from tapfm.tiles.image_text import TextBlock, load_font

_PANEL_PX = 440
_LETTERS_PX = 15
_MARGIN_PX = 12
_BLACK = (0, 0, 0)


def draw_attention_check(
    path: Path,
    slide: PredictedSlide,
    table: TileTable,
    values: Mapping[str, NDArray[np.float64]],
    truth: SlideTruth,
) -> None:
    """Draw the slide, then a map for each of the values."""
    with closing(open_slide(slide.path)) as opened:
        thumbnail = opened.thumbnail(_PANEL_PX)
    panels = {f"{slide.slide_id}, planted nests outlined": thumbnail.pixels}
    for name, each in values.items():
        # attention as percentiles: its values before and after are of different sizes
        percentile = name.startswith("attention")
        layer = Layer("value", "attention") if percentile else Layer("value", "contribution", TARGET)
        shown = TileTable(table.positions, {"value": each})
        title = f"{name}, percentiles" if percentile else f"{name}: red supports {TARGET}"
        panels[title] = overlay_tiles(thumbnail, slide, shown, layer, percentile=percentile)
    planted = _planted_mask(thumbnail, truth)
    pictures = [_panel(title, _draw_outlines(pixels, planted)) for title, pixels in panels.items()]
    sheet = Image.new("RGB", (sum(each.width for each in pictures), max(each.height for each in pictures)), WHITE)
    left = 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width
    write_atomically(path, encode_png(sheet))


def _planted_mask(thumbnail: Thumbnail, truth: SlideTruth) -> Mask:
    """Return the pixels of a thumbnail that show nests with the signal."""
    mask = truth.focus == truth.foci.index(TARGET) + 1
    height_px, width_px = thumbnail.pixels.shape[:2]
    down_x, down_y = thumbnail.downsample
    y_px0 = thumbnail.box.y_px0 + (np.arange(height_px) + 0.5) * down_y
    x_px0 = thumbnail.box.x_px0 + (np.arange(width_px) + 0.5) * down_x
    rows = (y_px0 * mask.shape[0] / truth.height_px0).astype(int).clip(0, mask.shape[0] - 1)
    columns = (x_px0 * mask.shape[1] / truth.width_px0).astype(int).clip(0, mask.shape[1] - 1)
    return np.asarray(mask[rows[:, None], columns])


def _draw_outlines(pixels: Pixels, mask: Mask) -> Pixels:
    """Return a picture with lines around the areas of a mask."""
    drawn = pixels.copy()
    lines, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(drawn, lines, -1, _BLACK, 1, cv2.LINE_AA)
    return drawn


def _panel(title: str, pixels: Pixels) -> Image.Image:
    """Put a title above a picture."""
    picture = Image.fromarray(pixels)
    head = TextBlock(picture.width + 2 * _MARGIN_PX, _MARGIN_PX)
    head.y_px += _MARGIN_PX
    head.write(title, load_font(_LETTERS_PX, bold=True), _LETTERS_PX)
    head.y_px += _MARGIN_PX // 2
    sheet = Image.new("RGB", (head.image.width, head.y_px + picture.height + _MARGIN_PX), WHITE)
    sheet.paste(head.to_image(), (0, 0))
    sheet.paste(picture, (_MARGIN_PX, head.y_px))
    return sheet
