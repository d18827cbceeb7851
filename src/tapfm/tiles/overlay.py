"""Overlay image of a slide: tissue outline, tiles, and removed tiles coloured by reason."""

from __future__ import annotations

import io

import cv2
import numpy as np
from PIL import Image, ImageDraw

from tapfm.slides.annotations import trace_outlines
from tapfm.slides.scale import Scale
from tapfm.slides.slide import Colour, Pixels, Slide
from tapfm.tiles.grid import TileStatus
from tapfm.tiles.image_text import TEXT_COLOUR, ScaleBar, load_font
from tapfm.tiles.tiling import TiledSlide

_LONGEST_PX = 1200  # longer side of the overlay
_MIN_THUMBNAIL_PX = 600  # a smaller thumbnail is read again at a larger size
_MARGIN_PX, _LINE_PX = 12, 22
_OUTLINE = (16, 122, 87)
# distinguishable for colour-blind readers, and from the pink and purple of H&E
_COLOURS: dict[TileStatus, Colour] = {
    TileStatus.KEPT: (16, 122, 87),
    TileStatus.PEN: (0, 114, 189),
    TileStatus.BLUR: (230, 159, 0),
    TileStatus.UNREADABLE: (200, 30, 30),
    TileStatus.PADDING: (120, 120, 120),
    TileStatus.EDGE: (86, 180, 233),
    TileStatus.PADDED: (86, 180, 233),
}
_THICKNESS = {TileStatus.KEPT: 1, TileStatus.PADDED: 3}  # lines of tiles that are kept; removed tiles are filled
_LEGEND_TEXTS = {
    TileStatus.KEPT: "tiles",
    TileStatus.PEN: "removed (pen)",
    TileStatus.BLUR: "removed (out of focus)",
    TileStatus.UNREADABLE: "removed (unreadable)",
    TileStatus.PADDING: "removed (scanner padding)",
    TileStatus.EDGE: "removed (past the edge)",
    TileStatus.PADDED: "more, padded with white",
}


def draw_overlay(slide: Slide, tiled: TiledSlide, scale: Scale, title: str) -> bytes:
    """Return the overlay as a PNG file."""
    pixels = _overlay_background(slide, tiled)
    height_px, width_px = pixels.shape[:2]
    box = tiled.thumbnail.box
    downsample = np.array([box.width_px0 / width_px, box.height_px0 / height_px])

    canvas = pixels.copy()
    corners = (tiled.positions - [box.x_px0, box.y_px0]) / downsample
    ends = corners + tiled.side_px0 / downsample
    squares = np.concatenate([np.rint(corners), np.rint(ends)], axis=1).astype(int)
    for status, colour in _COLOURS.items():
        layer = canvas.copy()
        for left, top, right, bottom in squares[tiled.statuses == status].tolist():
            if status == TileStatus.PADDED:  # its right or lower line would be outside the image
                right, bottom = min(right, width_px - 1), min(bottom, height_px - 1)
            cv2.rectangle(layer, (left, top), (right, bottom), colour, _THICKNESS.get(status, cv2.FILLED))
        canvas = cv2.addWeighted(layer, 0.55, canvas, 0.45, 0)
    mask = cv2.resize(tiled.tissue_mask.astype(np.uint8), (width_px, height_px), interpolation=cv2.INTER_NEAREST)
    for piece in trace_outlines(mask.astype(bool)):
        cv2.polylines(canvas, piece, isClosed=True, color=_OUTLINE, thickness=2, lineType=cv2.LINE_AA)

    mpp = scale.mpp * float(downsample.mean())
    image = _add_caption(
        Image.fromarray(canvas), title, _format_caption(tiled, scale), _list_legend_entries(tiled), mpp
    )
    buffer = io.BytesIO()
    # higher compression levels would take ten times as long as the tiling and save a tenth of the bytes
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _overlay_background(slide: Slide, tiled: TiledSlide) -> Pixels:
    """Return the thumbnail used for tissue detection, resized or replaced if it is too large or too small."""
    height_px, width_px = tiled.thumbnail.pixels.shape[:2]
    longest_px = max(height_px, width_px)
    if longest_px < _MIN_THUMBNAIL_PX:
        return slide.thumbnail(_LONGEST_PX).pixels
    if longest_px <= _LONGEST_PX:
        return tiled.thumbnail.pixels
    size = (max(1, width_px * _LONGEST_PX // longest_px), max(1, height_px * _LONGEST_PX // longest_px))
    return np.asarray(cv2.resize(tiled.thumbnail.pixels, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)


def _format_caption(tiled: TiledSlide, scale: Scale) -> str:
    return f"{scale.mpp:.4g} µm/px (from {scale.source}), {tiled.tissue_mm2:,.2f} mm² of tissue"


def _list_legend_entries(tiled: TiledSlide) -> list[tuple[Colour, str]]:
    """Return colour and text of each tile status in the overlay, with counts."""
    counts = tiled.counts
    shown = [status for status in _COLOURS if counts[status] or status == TileStatus.KEPT]
    return [(_COLOURS[status], f"{counts[status]:,} {_LEGEND_TEXTS[status]}") for status in shown]


def _add_caption(
    image: Image.Image, title: str, caption: str, legend: list[tuple[Colour, str]], mpp: float
) -> Image.Image:
    """Add title, caption, legend and scale bar below the image, which is widened if the text needs it."""
    font, title_font = load_font(13), load_font(15)
    bar = ScaleBar.fit(mpp, image.width / 4)
    legend_px = sum(_LINE_PX + round(font.getlength(text)) + _MARGIN_PX for _, text in legend)
    needed_px = max(title_font.getlength(title), font.getlength(caption), legend_px + bar.width_px(font) + _MARGIN_PX)
    sheet = Image.new(
        "RGB", (max(image.width, round(needed_px) + 2 * _MARGIN_PX), image.height + 3 * _LINE_PX + 20), "white"
    )
    sheet.paste(image, (0, 0))
    draw = ImageDraw.Draw(sheet)
    y = image.height + 8
    draw.text((_MARGIN_PX, y), title, TEXT_COLOUR, title_font)
    draw.text((_MARGIN_PX, y + _LINE_PX), caption, TEXT_COLOUR, font)
    x = _MARGIN_PX
    for colour, text in legend:
        draw.rectangle((x, y + 2 * _LINE_PX + 3, x + 12, y + 2 * _LINE_PX + 15), fill=colour)
        draw.text((x + _LINE_PX - 4, y + 2 * _LINE_PX), text, TEXT_COLOUR, font)
        x += _LINE_PX + round(font.getlength(text)) + _MARGIN_PX
    bar.draw(draw, sheet.width - _MARGIN_PX, y + 2 * _LINE_PX + 16, font)
    return sheet
