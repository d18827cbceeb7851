"""Heatmap of a slide: its tiles in the colours of a layer, over the slide, with title, scale bar and colour bar."""

from __future__ import annotations

import io
import json

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.heatmap_text import (
    colour_bar_labels,
    describe_clipped_tiles,
    describe_predictions,
    describe_sum,
    format_layer_heading,
    format_ticks,
)
from tapfm.prediction.layers import ColourScale, Layer, layer_values, palette
from tapfm.prediction.tile_squares import place_tiles
from tapfm.prediction.tile_table import TileTable
from tapfm.runtime.messages import format_count
from tapfm.slides.slide import WHITE, Colour, Pixels, Thumbnail
from tapfm.tiles.image_text import TEXT_COLOUR, ScaleBar, TextBlock, load_font

MAX_SIDE_PX = 1600
_MIN_WIDTH_PX = 640  # of a sheet, so that the text fits even if the slide is small
_OPACITY = 0.6
GREY_TEXT: Colour = (98, 102, 114)
LINE_COLOUR: Colour = (150, 154, 164)
_PNG_METADATA_KEY = "tapfm"  # key of the PNG text chunk with the metadata


def overlay_tiles(
    thumbnail: Thumbnail, predicted: PredictedSlide, table: TileTable, layer: Layer, *, percentile: bool = False
) -> Pixels:
    """Return the thumbnail with the colours of the tiles over it."""
    values, scale = layer_values(table.values[layer.column], layer.kind, percentile=percentile)
    pixels = thumbnail.pixels.copy()
    height_px, width_px = pixels.shape[:2]
    squares = place_tiles(predicted, table.positions, thumbnail.downsample, width_px, height_px)
    means, covered = squares.rasterise(values, 0, height_px)
    # blend with grey tissue: pink and purple would change the colours
    grey = pixels[covered] @ np.array([0.299, 0.587, 0.114])
    pixels[covered] = np.rint(_blend(scale.colours(means[covered]), grey[:, None])).astype(np.uint8)
    return pixels


def _blend(colours: NDArray[np.uint8], grey: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(_OPACITY * colours + (1 - _OPACITY) * grey)


def draw_heatmap(
    thumbnail: Thumbnail, predicted: PredictedSlide, table: TileTable, layer: Layer, *, percentile: bool = False
) -> bytes:
    """Draw a sheet with title, heatmap, scale bar and colour bar. Returns a PNG."""
    values, scale = layer_values(table.values[layer.column], layer.kind, percentile=percentile)
    image = Image.fromarray(overlay_tiles(thumbnail, predicted, table, layer, percentile=percentile))
    size_px = max(13, round(min(image.width, MAX_SIDE_PX) / 76))
    margin_px = 2 * size_px
    width_px = max(image.width + 2 * margin_px, _MIN_WIDTH_PX)

    header = TextBlock(width_px, margin_px)
    header.y_px += size_px
    title_px = round(1.5 * size_px)
    if load_font(title_px, bold=True).getlength(predicted.slide_id) > header.inner_width_px:
        title_px = size_px
    header.write(predicted.slide_id, load_font(title_px, bold=True), title_px)
    for line in describe_predictions(predicted, layer):
        header.write(line, load_font(size_px), size_px)
    header.y_px += size_px

    footer = TextBlock(width_px, margin_px)
    mpp = predicted.mpp * float(np.mean(thumbnail.downsample))
    footer.y_px += 2 * size_px
    ScaleBar.fit(mpp, image.width / 5).draw(footer.draw, margin_px + image.width, footer.y_px, load_font(size_px))
    footer.y_px += size_px // 2
    footer.write(format_layer_heading(layer, percentile=percentile), load_font(size_px, bold=True), size_px)
    footer.y_px += round(0.4 * size_px)
    _draw_colour_bar(footer, scale, colour_bar_labels(layer, percentile=percentile), size_px)
    smaller = max(12, round(0.85 * size_px))
    side_um = predicted.side_px0 * predicted.mpp
    notes = [
        f"Unit: {scale.unit}.",
        "" if percentile else describe_sum(predicted, layer, values),
        describe_clipped_tiles(values, scale),
        f"{format_count(len(table), 'tile')}, each {side_um:.0f} µm wide. Tissue under the tiles is shown in grey.",
    ]
    for note in filter(None, notes):
        footer.write(note, load_font(smaller), smaller, GREY_TEXT)
    footer.y_px += size_px

    corner = (margin_px, header.y_px)
    sheet = Image.new("RGB", (width_px, header.y_px + image.height + footer.y_px), WHITE)
    sheet.paste(header.to_image(), (0, 0))
    sheet.paste(image, corner)
    sheet.paste(footer.to_image(), (0, header.y_px + image.height))
    metadata = {
        "slide_id": predicted.slide_id,
        "layer": layer.column,
        "percentile": percentile,
        "unit": scale.unit,
        "low": scale.low,
        "high": scale.high,
        "slide_in_image_px": [*corner, image.width, image.height],
        "px0_per_px": list(thumbnail.downsample),
        "bounds_corner_px0": [thumbnail.box.x_px0, thumbnail.box.y_px0],
    }
    return encode_png(sheet, metadata)


def _draw_colour_bar(block: TextBlock, scale: ColourScale, end_labels: tuple[str, str], size_px: int) -> None:
    """Draw a colour bar with labels at both ends and ticks below."""
    font = load_font(size_px)
    left_end, right_end = (round(font.getlength(each)) for each in end_labels)
    gap = size_px
    left = block.margin_px + left_end + gap
    length = min(34 * size_px, block.inner_width_px - left_end - right_end - 2 * gap - 2 * size_px)
    top, height = block.y_px, round(1.1 * size_px)
    # each colour is shown over tissue that gets darker from top to bottom
    tissue = np.linspace(245, 90, height)[:, None, None].repeat(256, axis=1)
    colours = np.rint(_blend(palette(diverging=scale.diverging)[None], tissue)).astype(np.uint8)
    strip = Image.fromarray(colours).resize((length, height), Image.Resampling.NEAREST)
    block.image.paste(strip, (left, top))
    middle = top + height // 2
    block.draw.text((left - gap, middle), end_labels[0], TEXT_COLOUR, font, anchor="rm")
    block.draw.text((left + length + gap, middle), end_labels[1], TEXT_COLOUR, font, anchor="lm")
    ticks = scale.ticks()
    for place_px, text in zip(scale.fractions(np.array(ticks)) * (length - 1), format_ticks(ticks), strict=True):
        x = left + round(float(place_px))
        block.draw.line((x, top + height, x, top + height + size_px // 3), LINE_COLOUR)
        block.draw.text((x, top + height + size_px // 2), text, TEXT_COLOUR, font, anchor="ma")
    block.y_px = top + height + 2 * size_px + size_px // 4


def encode_png(image: Image.Image, metadata: dict[str, object] | None = None) -> bytes:
    """Return the image as PNG, with optional metadata. The output is deterministic."""
    texts = PngInfo()
    if metadata is not None:
        texts.add_text(_PNG_METADATA_KEY, json.dumps(metadata))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=texts, compress_level=3)  # higher levels are much slower and save a few percent
    return buffer.getvalue()
