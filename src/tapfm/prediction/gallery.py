"""The tiles at both ends of a layer, as the model saw them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.heatmap import FAINT, LINE, png_of
from tapfm.prediction.layers import Layer, Values, layer_values
from tapfm.prediction.tile_table import TileTable
from tapfm.prediction.wording import format_value, heading, prediction_lines, tiles
from tapfm.slides.slide import Slide
from tapfm.tiles.lettering import INK, Column, ScaleBar, font, lines_of
from tapfm.tiles.reading import reason_of

_COUNT = 8
_ACROSS = 4
_SIZE_PX, _MARGIN_PX, _GAP_PX, _FRAME_PX = 15, 28, 18, 6
_NARROWEST_PX = 560
_SMALLEST_PX = 140  # a tile is shown at; smaller ones are enlarged by a whole factor, so that their words have room
_UNREADABLE_PAPER, _UNREADABLE_INK = (244, 244, 246), (150, 30, 40)


def tile_picture(slide: Slide, predicted: PredictedSlide, x: int, y: int) -> Image.Image:
    """Read a tile as the model saw it; one that cannot be read is a crossed box that says why."""
    try:
        return Image.fromarray(slide.read(x, y, predicted.side_px0, predicted.tile_px))
    except Exception as error:  # also what libraries raise over damage
        return _crossed_box(predicted.tile_px, reason_of(error))


def _crossed_box(side_px: int, reason: str) -> Image.Image:
    """Draw a box for a tile without pixels."""
    box = Image.new("RGB", (side_px, side_px), _UNREADABLE_PAPER)
    draw = ImageDraw.Draw(box)
    draw.line((0, 0, side_px, side_px), LINE)
    draw.line((0, side_px, side_px, 0), LINE)
    size_px = max(9, min(13, side_px // 16))
    letters = font(size_px)
    lines = ["unreadable", *lines_of(reason, letters, side_px - 12)][: max(1, side_px // (2 * size_px))]
    height_px = round(1.4 * size_px)
    top = (side_px - height_px * len(lines)) // 2
    draw.rectangle((2, top - 4, side_px - 3, top + height_px * len(lines) + 4), fill=_UNREADABLE_PAPER)
    for row, line in enumerate(lines):
        draw.text((side_px / 2, top + row * height_px), line, _UNREADABLE_INK, letters, anchor="ma")
    return box


def _enlargement_of(predicted: PredictedSlide) -> int:
    """Say how many pixels of the sheet a pixel of a tile is wide."""
    return max(1, -(-_SMALLEST_PX // predicted.tile_px))


def _both_ends(values: Values, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the rows of the highest values and of the lowest, outermost first; none is in both, nor twice.

    Of equal values the tile that comes first in the table counts as higher.
    """
    order = np.argsort(-values, kind="stable")
    highest = min(count, (len(order) + 1) // 2)
    lowest = min(count, len(order) - highest)
    return order[:highest], order[::-1][:lowest]


def draw_gallery(
    slide: Slide, predicted: PredictedSlide, table: TileTable, layer: Layer, *, count: int = _COUNT
) -> bytes:
    """Draw the highest and the lowest tiles of a layer with rank, value and place, as a PNG."""
    values = table.values[layer.column]
    highest, lowest = _both_ends(values, count)
    cell_px = predicted.tile_px * _enlargement_of(predicted) + 2 * _FRAME_PX
    across = max(1, min(_ACROSS, len(highest)))
    width_px = max(_NARROWEST_PX, across * (cell_px + _GAP_PX) - _GAP_PX + 2 * _MARGIN_PX)
    rows = -(-len(highest) // across) + -(-len(lowest) // across)
    sheet = Column(width_px, _MARGIN_PX, tallest_px=2048 + rows * (cell_px + 4 * _SIZE_PX + _GAP_PX))

    sheet.y_px += _SIZE_PX
    sheet.write(predicted.slide_id, font(22, bold=True), 22)
    for line in prediction_lines(predicted, layer):
        sheet.write(line, font(_SIZE_PX), _SIZE_PX)
    sheet.write(heading(layer, percentile=False), font(_SIZE_PX), _SIZE_PX)
    for name, chosen, first in (("Highest", highest, 1), ("Lowest", lowest, len(table))):
        if len(chosen):
            sheet.y_px += _SIZE_PX
            sheet.write(name, font(_SIZE_PX, bold=True), _SIZE_PX)
            sheet.y_px += _SIZE_PX // 3
            ranks = range(first, first + len(chosen)) if first == 1 else range(first, first - len(chosen), -1)
            _draw_tiles(sheet, slide, predicted, table, layer, chosen.tolist(), ranks, across)
    _draw_foot(sheet, predicted, table, layer)
    return png_of(sheet.paper())


def _draw_tiles(
    sheet: Column,
    slide: Slide,
    predicted: PredictedSlide,
    table: TileTable,
    layer: Layer,
    rows: Sequence[int],
    ranks: Sequence[int],
    across: int,
) -> None:
    """Draw some tiles, row by row, each in a frame of its colour on the map."""
    values, scale = layer_values(table.values[layer.column], layer.kind)
    side_px = predicted.tile_px * _enlargement_of(predicted)
    cell_px = side_px + 2 * _FRAME_PX
    for place, (row, rank) in enumerate(zip(rows, ranks, strict=True)):
        column = place % across
        if place and column == 0:
            sheet.y_px += cell_px + 3 * _SIZE_PX + _GAP_PX
        left, top = _MARGIN_PX + column * (cell_px + _GAP_PX), sheet.y_px
        red, green, blue = scale.colours(values[row : row + 1])[0].tolist()
        sheet.draw.rectangle((left, top, left + cell_px - 1, top + cell_px - 1), fill=(red, green, blue))
        x, y = table.positions[row].tolist()
        picture = tile_picture(slide, predicted, x, y).resize((side_px, side_px), Image.Resampling.BICUBIC)
        sheet.picture.paste(picture, (left + _FRAME_PX, top + _FRAME_PX))
        caption = top + cell_px + _SIZE_PX + 4
        value = format_value(float(values[row]), signed=scale.diverging)
        sheet.draw.text((left, caption), f"{rank:,}", INK, font(_SIZE_PX, bold=True), anchor="ls")
        sheet.draw.text((left + cell_px, caption), value, INK, font(_SIZE_PX), anchor="rs")
        sheet.draw.text((left, caption + 19), f"x {x:,}   y {y:,}", FAINT, font(12), anchor="ls")
    sheet.y_px += cell_px + 3 * _SIZE_PX


def _draw_foot(sheet: Column, predicted: PredictedSlide, table: TileTable, layer: Layer) -> None:
    """Say what the numbers are, and how large the tiles."""
    _, scale = layer_values(table.values[layer.column], layer.kind)
    sheet.y_px += _SIZE_PX
    side_px = predicted.tile_px * _enlargement_of(predicted)
    bar = ScaleBar.of(predicted.side_px0 * predicted.mpp / side_px, side_px / 2)
    bar.draw(sheet.draw, _MARGIN_PX + bar.width_px(font(13)), sheet.y_px + 20, font(13))
    sheet.y_px += 34
    notes = (
        f"Unit: {scale.unit}.",
        f"Rank among {tiles(len(table))}, 1 has the highest value. Frame: the tile's colour on the map.",
        "x and y: top left corner in pixels of the slide's level 0.",
    )
    for note in notes:
        sheet.write(note, font(13), 13, FAINT)
    sheet.y_px += _SIZE_PX
