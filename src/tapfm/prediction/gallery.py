"""Galleries: the tiles with the highest and the lowest values of a layer, at the resolution of the encoder's input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.heatmap import GREY_TEXT, LINE_COLOUR, encode_png
from tapfm.prediction.heatmap_text import describe_predictions, format_layer_heading, format_value
from tapfm.prediction.layers import Layer, Values, layer_values
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.messages import format_count
from tapfm.slides.slide import Slide
from tapfm.tiles.image_text import TEXT_COLOUR, ScaleBar, TextBlock, load_font, wrap_text
from tapfm.tiles.reading import format_error

_TILES_PER_END = 8
_TILES_PER_ROW = 4
_SIZE_PX, _MARGIN_PX, _GAP_PX, _FRAME_PX = 15, 28, 18, 6
_MIN_WIDTH_PX = 560
_MIN_TILE_PX = 140  # side of a tile on the sheet; smaller tiles are enlarged by an integer factor
_UNREADABLE_BACKGROUND, _UNREADABLE_TEXT = (244, 244, 246), (150, 30, 40)


def read_tile_image(slide: Slide, predicted: PredictedSlide, x: int, y: int) -> Image.Image:
    """Read a tile at the encoder's resolution. Return a crossed box with the reason if it cannot be read."""
    try:
        return Image.fromarray(slide.read(x, y, predicted.side_px0, predicted.tile_px))
    except Exception as error:  # libraries raise anything for damaged files
        return _draw_unreadable_tile(predicted.tile_px, format_error(error))


def _draw_unreadable_tile(side_px: int, reason: str) -> Image.Image:
    box = Image.new("RGB", (side_px, side_px), _UNREADABLE_BACKGROUND)
    draw = ImageDraw.Draw(box)
    draw.line((0, 0, side_px, side_px), LINE_COLOUR)
    draw.line((0, side_px, side_px, 0), LINE_COLOUR)
    size_px = max(9, min(13, side_px // 16))
    font = load_font(size_px)
    lines = ["unreadable", *wrap_text(reason, font, side_px - 12)][: max(1, side_px // (2 * size_px))]
    height_px = round(1.4 * size_px)
    top = (side_px - height_px * len(lines)) // 2
    draw.rectangle((2, top - 4, side_px - 3, top + height_px * len(lines) + 4), fill=_UNREADABLE_BACKGROUND)
    for row, line in enumerate(lines):
        draw.text((side_px / 2, top + row * height_px), line, _UNREADABLE_TEXT, font, anchor="ma")
    return box


def _tile_zoom(predicted: PredictedSlide) -> int:
    """Return the number of sheet pixels per tile pixel."""
    return max(1, -(-_MIN_TILE_PX // predicted.tile_px))


def _find_extreme_tiles(values: Values, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of the highest and of the lowest values, most extreme first. No row is in both.

    Of equal values, the tile that comes first in the table counts as higher.
    """
    order = np.argsort(-values, kind="stable")
    highest = min(count, (len(order) + 1) // 2)
    lowest = min(count, len(order) - highest)
    return order[:highest], order[::-1][:lowest]


def draw_gallery(
    slide: Slide, predicted: PredictedSlide, table: TileTable, layer: Layer, *, count: int = _TILES_PER_END
) -> bytes:
    """Draw the tiles with the highest and the lowest values, with rank, value and position. Returns a PNG."""
    values = table.values[layer.column]
    highest, lowest = _find_extreme_tiles(values, count)
    cell_px = predicted.tile_px * _tile_zoom(predicted) + 2 * _FRAME_PX
    across = max(1, min(_TILES_PER_ROW, len(highest)))
    width_px = max(_MIN_WIDTH_PX, across * (cell_px + _GAP_PX) - _GAP_PX + 2 * _MARGIN_PX)
    rows = -(-len(highest) // across) + -(-len(lowest) // across)
    sheet = TextBlock(width_px, _MARGIN_PX, max_height_px=2048 + rows * (cell_px + 4 * _SIZE_PX + _GAP_PX))

    sheet.y_px += _SIZE_PX
    sheet.write(predicted.slide_id, load_font(22, bold=True), 22)
    for line in describe_predictions(predicted, layer):
        sheet.write(line, load_font(_SIZE_PX), _SIZE_PX)
    sheet.write(format_layer_heading(layer, percentile=False), load_font(_SIZE_PX), _SIZE_PX)
    for name, chosen, first in (("Highest values", highest, 1), ("Lowest values", lowest, len(table))):
        if len(chosen):
            sheet.y_px += _SIZE_PX
            sheet.write(name, load_font(_SIZE_PX, bold=True), _SIZE_PX)
            sheet.y_px += _SIZE_PX // 3
            ranks = range(first, first + len(chosen)) if first == 1 else range(first, first - len(chosen), -1)
            _draw_tiles(sheet, slide, predicted, table, layer, chosen.tolist(), ranks, across)
    _draw_footer(sheet, predicted, table, layer)
    return encode_png(sheet.to_image())


def _draw_tiles(
    sheet: TextBlock,
    slide: Slide,
    predicted: PredictedSlide,
    table: TileTable,
    layer: Layer,
    rows: Sequence[int],
    ranks: Sequence[int],
    across: int,
) -> None:
    """Draw tiles row by row, each in a frame of its heatmap colour."""
    values, scale = layer_values(table.values[layer.column], layer.kind)
    side_px = predicted.tile_px * _tile_zoom(predicted)
    cell_px = side_px + 2 * _FRAME_PX
    for place, (row, rank) in enumerate(zip(rows, ranks, strict=True)):
        column = place % across
        if place and column == 0:
            sheet.y_px += cell_px + 3 * _SIZE_PX + _GAP_PX
        left, top = _MARGIN_PX + column * (cell_px + _GAP_PX), sheet.y_px
        red, green, blue = scale.colours(values[row : row + 1])[0].tolist()
        sheet.draw.rectangle((left, top, left + cell_px - 1, top + cell_px - 1), fill=(red, green, blue))
        x, y = table.positions[row].tolist()
        image = read_tile_image(slide, predicted, x, y).resize((side_px, side_px), Image.Resampling.BICUBIC)
        sheet.image.paste(image, (left + _FRAME_PX, top + _FRAME_PX))
        caption = top + cell_px + _SIZE_PX + 4
        value = format_value(float(values[row]), signed=scale.diverging)
        sheet.draw.text((left, caption), f"{rank:,}", TEXT_COLOUR, load_font(_SIZE_PX, bold=True), anchor="ls")
        sheet.draw.text((left + cell_px, caption), value, TEXT_COLOUR, load_font(_SIZE_PX), anchor="rs")
        padded = "   padded" if table.padded is not None and table.padded[row] else ""
        sheet.draw.text((left, caption + 19), f"x {x:,}   y {y:,}{padded}", GREY_TEXT, load_font(12), anchor="ls")
    sheet.y_px += cell_px + 3 * _SIZE_PX


def _draw_footer(sheet: TextBlock, predicted: PredictedSlide, table: TileTable, layer: Layer) -> None:
    """Write the unit, the meaning of the ranks, and a scale bar."""
    _, scale = layer_values(table.values[layer.column], layer.kind)
    sheet.y_px += _SIZE_PX
    side_px = predicted.tile_px * _tile_zoom(predicted)
    bar = ScaleBar.fit(predicted.side_px0 * predicted.mpp / side_px, side_px / 2)
    bar.draw(sheet.draw, _MARGIN_PX + bar.width_px(load_font(13)), sheet.y_px + 20, load_font(13))
    sheet.y_px += 34
    notes = (
        f"Unit: {scale.unit}.",
        f"Bold: rank among {format_count(len(table), 'tile')}; rank 1 has the highest value. "
        "Frame: colour of the tile on the heatmap.",
        "x, y: top left corner of the tile in level-0 pixels.",
        "" if table.padded is None else "padded: the tile extends past the edge of the slide, and is white there.",
    )
    for note in filter(None, notes):
        sheet.write(note, load_font(13), 13, GREY_TEXT)
    sheet.y_px += _SIZE_PX
