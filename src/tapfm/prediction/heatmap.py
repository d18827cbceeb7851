"""A map of a slide: its tiles in the colours of a layer, over the slide itself, with all that is needed to read it."""

from __future__ import annotations

import io
import json

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import ColourScale, Layer, layer_values, palette
from tapfm.prediction.placing import place
from tapfm.prediction.tile_table import TileTable
from tapfm.prediction.wording import beyond_line, end_words, heading, prediction_lines, sum_line, tick_texts, tiles
from tapfm.slides.slide import WHITE, Colour, Pixels, Thumbnail
from tapfm.tiles.lettering import INK, Column, ScaleBar, font

LONGEST_PX = 1600
_NARROWEST_PX = 640  # of a sheet, so that words have room beside a small slide
_OPACITY = 0.6
FAINT: Colour = (98, 102, 114)
LINE: Colour = (150, 154, 164)
_ABOUT = "tapfm"  # the PNG's text that says what the picture shows, and where on the sheet the slide is


def draw_tiles_over(
    thumbnail: Thumbnail, predicted: PredictedSlide, table: TileTable, layer: Layer, *, percentile: bool = False
) -> Pixels:
    """Lay the tiles' colours over a picture of the slide."""
    values, scale = layer_values(table.values[layer.column], layer.kind, percentile=percentile)
    pixels = thumbnail.pixels.copy()
    height_px, width_px = pixels.shape[:2]
    squares = place(predicted, table.positions, thumbnail.downsample, width_px, height_px)
    means, painted = squares.paint(values, 0, height_px)
    # grey tissue shines through: pink and purple would turn the colours into others than those of the colour bar
    grey = pixels[painted] @ np.array([0.299, 0.587, 0.114])
    pixels[painted] = np.rint(_mixed(scale.colours(means[painted]), grey[:, None])).astype(np.uint8)
    return pixels


def _mixed(colours: NDArray[np.uint8], grey: NDArray[np.float64]) -> NDArray[np.float64]:
    """Let grey shine through colours."""
    return np.asarray(_OPACITY * colours + (1 - _OPACITY) * grey)


def draw_heatmap(
    thumbnail: Thumbnail, predicted: PredictedSlide, table: TileTable, layer: Layer, *, percentile: bool = False
) -> bytes:
    """Draw a sheet with the map between its title and its scale and colour bars, as a PNG."""
    values, scale = layer_values(table.values[layer.column], layer.kind, percentile=percentile)
    picture = Image.fromarray(draw_tiles_over(thumbnail, predicted, table, layer, percentile=percentile))
    size_px = max(13, round(min(picture.width, LONGEST_PX) / 76))
    margin_px = 2 * size_px
    width_px = max(picture.width + 2 * margin_px, _NARROWEST_PX)

    head = Column(width_px, margin_px)
    head.y_px += size_px
    title_px = round(1.5 * size_px)
    if font(title_px, bold=True).getlength(predicted.slide_id) > head.inner_px:
        title_px = size_px
    head.write(predicted.slide_id, font(title_px, bold=True), title_px)
    for line in prediction_lines(predicted, layer):
        head.write(line, font(size_px), size_px)
    head.y_px += size_px

    foot = Column(width_px, margin_px)
    mpp = predicted.mpp * float(np.mean(thumbnail.downsample))
    foot.y_px += 2 * size_px
    ScaleBar.of(mpp, picture.width / 5).draw(foot.draw, margin_px + picture.width, foot.y_px, font(size_px))
    foot.y_px += size_px // 2
    foot.write(heading(layer, percentile=percentile), font(size_px, bold=True), size_px)
    foot.y_px += round(0.4 * size_px)
    _draw_colour_bar(foot, scale, end_words(layer, percentile=percentile), size_px)
    smaller = max(12, round(0.85 * size_px))
    side_um = predicted.side_px0 * predicted.mpp
    notes = [
        f"Unit: {scale.unit}.",
        "" if percentile else sum_line(predicted, layer, values),
        beyond_line(values, scale),
        f"{tiles(len(table))} of {side_um:.0f} µm; tissue below them is shown in grey.",
    ]
    for note in filter(None, notes):
        foot.write(note, font(smaller), smaller, FAINT)
    foot.y_px += size_px

    corner = (margin_px, head.y_px)
    sheet = Image.new("RGB", (width_px, head.y_px + picture.height + foot.y_px), WHITE)
    sheet.paste(head.paper(), (0, 0))
    sheet.paste(picture, corner)
    sheet.paste(foot.paper(), (0, head.y_px + picture.height))
    about = {
        "slide_id": predicted.slide_id,
        "layer": layer.column,
        "percentile": percentile,
        "unit": scale.unit,
        "low": scale.low,
        "high": scale.high,
        "slide_in_picture_px": [*corner, picture.width, picture.height],
        "px0_per_px": list(thumbnail.downsample),
        "bounds_corner_px0": [thumbnail.box.x_px0, thumbnail.box.y_px0],
    }
    return png_of(sheet, about)


def _draw_colour_bar(column: Column, scale: ColourScale, ends: tuple[str, str], size_px: int) -> None:
    """Draw the colours from low to high, with round values below and what the ends mean beside them."""
    letters = font(size_px)
    left_end, right_end = (round(letters.getlength(each)) for each in ends)
    gap = size_px
    left = column.margin_px + left_end + gap
    length = min(34 * size_px, column.inner_px - left_end - right_end - 2 * gap - 2 * size_px)
    top, height = column.y_px, round(1.1 * size_px)
    # from top to bottom as each colour looks over bright and over dark tissue
    tissue = np.linspace(245, 90, height)[:, None, None].repeat(256, axis=1)
    colours = np.rint(_mixed(palette(diverging=scale.diverging)[None], tissue)).astype(np.uint8)
    strip = Image.fromarray(colours).resize((length, height), Image.Resampling.NEAREST)
    column.picture.paste(strip, (left, top))
    middle = top + height // 2
    column.draw.text((left - gap, middle), ends[0], INK, letters, anchor="rm")
    column.draw.text((left + length + gap, middle), ends[1], INK, letters, anchor="lm")
    ticks = scale.ticks()
    for place_px, text in zip(scale.fractions(np.array(ticks)) * (length - 1), tick_texts(ticks), strict=True):
        x = left + round(float(place_px))
        column.draw.line((x, top + height, x, top + height + size_px // 3), LINE)
        column.draw.text((x, top + height + size_px // 2), text, INK, letters, anchor="ma")
    column.y_px = top + height + 2 * size_px + size_px // 4


def png_of(picture: Image.Image, about: dict[str, object] | None = None) -> bytes:
    """Write a PNG; the same picture gives the same bytes."""
    texts = PngInfo()
    if about is not None:
        texts.add_text(_ABOUT, json.dumps(about))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", pnginfo=texts, compress_level=3)  # more takes much longer for a few percent
    return buffer.getvalue()
