"""A picture of a slide with its tissue outline, its tiles, and what was left out and why."""

from __future__ import annotations

import io

import cv2
import numpy as np
from PIL import Image, ImageDraw

from tapfm.slides.regions import outlines
from tapfm.slides.scale import Scale
from tapfm.slides.slide import Colour, Pixels, Slide
from tapfm.tiles.grid import TileVerdict
from tapfm.tiles.lettering import INK, ScaleBar, font
from tapfm.tiles.tiling import TiledSlide

_LONGEST_PX, _ENOUGH_PX = 1200, 600
_MARGIN_PX, _LINE_PX = 12, 22
_OUTLINE = (16, 122, 87)
# told apart by people who see colours differently, and from pink and purple
_COLOURS: dict[TileVerdict, Colour] = {
    TileVerdict.KEPT: (16, 122, 87),
    TileVerdict.PEN: (0, 114, 189),
    TileVerdict.BLUR: (230, 159, 0),
    TileVerdict.UNREADABLE: (200, 30, 30),
    TileVerdict.PADDING: (120, 120, 120),
}
_MEANING = {
    TileVerdict.KEPT: "tiles",
    TileVerdict.PEN: "pen",
    TileVerdict.BLUR: "out of focus",
    TileVerdict.UNREADABLE: "unreadable",
    TileVerdict.PADDING: "scanner padding",
}


def draw_overlay(slide: Slide, tiled: TiledSlide, scale: Scale, title: str) -> bytes:
    """Draw the overlay as a PNG."""
    pixels = _picture_of(slide, tiled)
    height_px, width_px = pixels.shape[:2]
    box = tiled.thumbnail.box
    shrink = np.array([box.width_px0 / width_px, box.height_px0 / height_px])

    canvas = pixels.copy()
    corners = (tiled.positions - [box.x_px0, box.y_px0]) / shrink
    ends = corners + tiled.side_px0 / shrink
    squares = np.concatenate([np.rint(corners), np.rint(ends)], axis=1).astype(int)
    for verdict, colour in _COLOURS.items():
        layer = canvas.copy()
        for left, top, right, bottom in squares[tiled.verdicts == verdict].tolist():
            thickness = 1 if verdict == TileVerdict.KEPT else cv2.FILLED
            cv2.rectangle(layer, (left, top), (right, bottom), colour, thickness)
        canvas = cv2.addWeighted(layer, 0.55, canvas, 0.45, 0)
    mask = cv2.resize(tiled.tissue.astype(np.uint8), (width_px, height_px), interpolation=cv2.INTER_NEAREST)
    for piece in outlines(mask.astype(bool)):
        cv2.polylines(canvas, piece, isClosed=True, color=_OUTLINE, thickness=2, lineType=cv2.LINE_AA)

    mpp = scale.mpp * float(shrink.mean())
    picture = _with_caption(Image.fromarray(canvas), title, _caption_of(tiled, scale), _legend_of(tiled), mpp)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)  # more would cost ten times the tiling for a tenth of the bytes
    return buffer.getvalue()


def _picture_of(slide: Slide, tiled: TiledSlide) -> Pixels:
    """Take the segmented picture where it is large enough, otherwise a larger one."""
    height_px, width_px = tiled.thumbnail.pixels.shape[:2]
    longest_px = max(height_px, width_px)
    if longest_px < _ENOUGH_PX:
        return slide.thumbnail(_LONGEST_PX).pixels
    if longest_px <= _LONGEST_PX:
        return tiled.thumbnail.pixels
    shrunk = (max(1, width_px * _LONGEST_PX // longest_px), max(1, height_px * _LONGEST_PX // longest_px))
    return np.asarray(cv2.resize(tiled.thumbnail.pixels, shrunk, interpolation=cv2.INTER_AREA), dtype=np.uint8)


def _caption_of(tiled: TiledSlide, scale: Scale) -> str:
    """Say scale and amounts in a line."""
    return f"{scale.mpp:.4g} µm/px ({scale.source}), {tiled.tissue_mm2:,.2f} mm² of tissue"


def _legend_of(tiled: TiledSlide) -> list[tuple[Colour, str]]:
    """Name each colour that is on the picture, with its count."""
    counts = tiled.counts
    shown = [verdict for verdict in _COLOURS if counts[verdict] or verdict == TileVerdict.KEPT]
    return [(_COLOURS[verdict], f"{counts[verdict]:,} {_MEANING[verdict]}") for verdict in shown]


def _with_caption(
    picture: Image.Image, title: str, caption: str, legend: list[tuple[Colour, str]], mpp: float
) -> Image.Image:
    """Put a strip with title, legend and scale bar below the picture; never narrower than its text."""
    letters, larger = font(13), font(15)
    bar = ScaleBar.of(mpp, picture.width / 4)
    legend_px = sum(_LINE_PX + round(letters.getlength(text)) + _MARGIN_PX for _, text in legend)
    needed_px = max(larger.getlength(title), letters.getlength(caption), legend_px + bar.width_px(letters) + _MARGIN_PX)
    sheet = Image.new(
        "RGB", (max(picture.width, round(needed_px) + 2 * _MARGIN_PX), picture.height + 3 * _LINE_PX + 20), "white"
    )
    sheet.paste(picture, (0, 0))
    draw = ImageDraw.Draw(sheet)
    y = picture.height + 8
    draw.text((_MARGIN_PX, y), title, INK, larger)
    draw.text((_MARGIN_PX, y + _LINE_PX), caption, INK, letters)
    x = _MARGIN_PX
    for colour, text in legend:
        draw.rectangle((x, y + 2 * _LINE_PX + 3, x + 12, y + 2 * _LINE_PX + 15), fill=colour)
        draw.text((x + _LINE_PX - 4, y + 2 * _LINE_PX), text, INK, letters)
        x += _LINE_PX + round(letters.getlength(text)) + _MARGIN_PX
    bar.draw(draw, sheet.width - _MARGIN_PX, y + 2 * _LINE_PX + 16, letters)
    return sheet
