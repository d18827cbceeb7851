"""Draw one synthetic slide with heatmaps of attention before and after adaptation, and of contributions."""

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
_FONT_PX = 15
_MARGIN_PX = 12
_BLACK = (0, 0, 0)
_TITLES = {
    "attention_before": "attention before adaptation, percentiles",
    "attention_after": "attention after adaptation, percentiles",
    "contribution_after": "contribution after adaptation (red: positive)",
}


def draw_attention_check(
    path: Path,
    slide: PredictedSlide,
    tile_table: TileTable,
    scores: Mapping[str, NDArray[np.float64]],
    truth: SlideTruth,
) -> None:
    """Draw the slide and a heatmap of each score, with the nests that have the planted signal outlined."""
    with closing(open_slide(slide.path)) as opened:
        thumbnail = opened.thumbnail(_PANEL_PX)
    panels = {f"{slide.slide_id}, nests with the planted signal outlined": thumbnail.pixels}
    for name, values in scores.items():
        percentile = name.startswith("attention")  # because its scale differs before and after adaptation
        layer = Layer("value", "attention") if percentile else Layer("value", "contribution", TARGET)
        tiles = TileTable(tile_table.positions, {"value": values})
        panels[_TITLES[name]] = overlay_tiles(thumbnail, slide, tiles, layer, percentile=percentile)
    signal = _make_signal_mask(thumbnail, truth)
    images = [_add_title(title, _draw_outlines(pixels, signal)) for title, pixels in panels.items()]
    sheet = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), WHITE)
    left = 0
    for image in images:
        sheet.paste(image, (left, 0))
        left += image.width
    write_atomically(path, encode_png(sheet))


def _make_signal_mask(thumbnail: Thumbnail, truth: SlideTruth) -> Mask:
    """Return the mask of the thumbnail pixels in nests with the signal."""
    mask = truth.foci_map == truth.focus_names.index(TARGET) + 1
    height_px, width_px = thumbnail.pixels.shape[:2]
    down_x, down_y = thumbnail.downsample
    y_px0 = thumbnail.box.y_px0 + (np.arange(height_px) + 0.5) * down_y
    x_px0 = thumbnail.box.x_px0 + (np.arange(width_px) + 0.5) * down_x
    rows = (y_px0 * mask.shape[0] / truth.height_px0).astype(int).clip(0, mask.shape[0] - 1)
    columns = (x_px0 * mask.shape[1] / truth.width_px0).astype(int).clip(0, mask.shape[1] - 1)
    return np.asarray(mask[rows[:, None], columns])


def _draw_outlines(pixels: Pixels, mask: Mask) -> Pixels:
    """Return a copy of the pixels with the contours of a mask."""
    outlined = pixels.copy()
    contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(outlined, contours, -1, _BLACK, 1, cv2.LINE_AA)
    return outlined


def _add_title(title: str, pixels: Pixels) -> Image.Image:
    """Return the pixels as an image with margins and a title above them."""
    image = Image.fromarray(pixels)
    head = TextBlock(image.width + 2 * _MARGIN_PX, _MARGIN_PX)
    head.y_px += _MARGIN_PX
    head.write(title, load_font(_FONT_PX, bold=True), _FONT_PX)
    head.y_px += _MARGIN_PX // 2
    sheet = Image.new("RGB", (head.image.width, head.y_px + image.height + _MARGIN_PX), WHITE)
    sheet.paste(head.to_image(), (0, 0))
    sheet.paste(image, (_MARGIN_PX, head.y_px))
    return sheet
