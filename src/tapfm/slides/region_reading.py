"""Read a region of a slide at any size: from the best pyramid level, resized once.

All readers share this code, so that they return the same tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import cv2
import numpy as np
from PIL import Image

from tapfm.errors import TileReadError
from tapfm.slides.slide import Box, Level, Pixels, SlideMetadata, Thumbnail

# A level may be this much coarser than requested, because level sizes are rounded (downsample 4.0003 instead of 4).
_LEVEL_TOLERANCE = 0.005
_MAX_UNSPLIT_PX = 8  # thumbnail pixels; larger blocks with undecodable pixels are split
MAX_UNREADABLE_FRACTION = 0.05  # of the tiles of a slide, or of the area of an image; above it, reading fails
BLOCK_PX = 4096  # side of the blocks of a thumbnail, in level pixels; limits memory for slides without a pyramid


class SlideWithLevels(Protocol):
    """The part of the Slide interface that reading a region needs."""

    @property
    def metadata(self) -> SlideMetadata:
        """The slide's metadata."""
        ...

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Read a region of one level."""
        ...


def best_level(levels: Sequence[Level], downsample: float) -> int:
    """Return the coarsest level whose downsample is at most `downsample`; level 0 if there is none."""
    fine_enough = [i for i, level in enumerate(levels) if level.downsample <= downsample * (1 + _LEVEL_TOLERANCE)]
    return max(fine_enough, key=lambda i: levels[i].downsample, default=0)


def read_tile(slide: SlideWithLevels, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
    """Read a square of `side_px0` level-0 pixels as a tile of `tile_px`."""
    return read_region(slide, x_px0, y_px0, side_px0, side_px0, tile_px, tile_px)


def read_region(
    slide: SlideWithLevels,
    x_px0: float,
    y_px0: float,
    width_px0: float,
    height_px0: float,
    width_px: int,
    height_px: int,
) -> Pixels:
    """Read a rectangle given in level-0 pixels, resized to `width_px` x `height_px`."""
    levels = slide.metadata.levels
    index = best_level(levels, min(width_px0 / width_px, height_px0 / height_px))
    level = levels[index]
    # Read the whole pixels that cover the rectangle; the resize receives its exact position in them.
    left, top = x_px0 / level.downsample_x, y_px0 / level.downsample_y
    right, bottom = left + width_px0 / level.downsample_x, top + height_px0 / level.downsample_y
    if x_px0 + width_px0 <= slide.metadata.width_px0:
        left, right = _clip_to_level(left, right, level.width_px)
    if y_px0 + height_px0 <= slide.metadata.height_px0:
        top, bottom = _clip_to_level(top, bottom, level.height_px)
    x_px, y_px = math.floor(left + 1e-6), math.floor(top + 1e-6)
    region = slide.read_level(index, x_px, y_px, math.ceil(right - 1e-6) - x_px, math.ceil(bottom - 1e-6) - y_px)
    return _resize(region, (left - x_px, top - y_px, right - x_px, bottom - y_px), width_px, height_px)


def _clip_to_level(start: float, end: float, length_px: int) -> tuple[float, float]:
    """Clip a span to the level's length, which may have been rounded down."""
    return (min(start, length_px - 1), length_px) if end > length_px else (start, end)


def _resize(pixels: Pixels, box: tuple[float, float, float, float], width_px: int, height_px: int) -> Pixels:
    """Resize the part `box` = (left, top, right, bottom) of an image, with antialiasing.

    If the box is the whole image and both sides are divided by the same integer, blocks of pixels are averaged. Other
    reductions use Pillow's Hamming filter, a similar average whose weights fall smoothly to zero. Enlargements use
    Pillow's bicubic filter.
    """
    full_height_px, full_width_px = pixels.shape[:2]
    left, top, right, bottom = box
    whole = max(abs(left), abs(top), abs(right - full_width_px), abs(bottom - full_height_px)) < 1e-6
    if whole and (full_width_px, full_height_px) == (width_px, height_px):
        return pixels
    if whole and full_width_px % width_px == 0 and full_width_px * height_px == full_height_px * width_px:
        return np.asarray(cv2.resize(pixels, (width_px, height_px), interpolation=cv2.INTER_AREA), dtype=np.uint8)
    shrinks = (right - left) >= width_px and (bottom - top) >= height_px
    kernel = Image.Resampling.HAMMING if shrinks else Image.Resampling.BICUBIC
    inside = (max(left, 0.0), max(top, 0.0), min(right, full_width_px), min(bottom, full_height_px))
    return np.array(Image.fromarray(pixels).resize((width_px, height_px), kernel, box=inside))


def make_thumbnail(slide: SlideWithLevels, longest_px: int, threads: int = 1) -> Thumbnail:
    """Read a thumbnail of the slide's bounds whose longer side has at most `longest_px`, in blocks on `threads`."""
    bounds = slide.metadata.bounds
    shrink = max(1.0, max(bounds.width_px0, bounds.height_px0) / longest_px)
    width_px = max(1, round(bounds.width_px0 / shrink))
    height_px = max(1, round(bounds.height_px0 / shrink))
    return Thumbnail(read_blockwise(slide, bounds, width_px, height_px, threads), bounds)


def read_blockwise(slide: SlideWithLevels, box: Box, width_px: int, height_px: int, threads: int = 1) -> Pixels:
    """Read a large rectangle at a small size in blocks, to limit memory.

    Blocks that cannot be decoded keep the background colour; too many of them raise TileReadError.
    """
    scale_x, scale_y = box.width_px0 / width_px, box.height_px0 / height_px
    levels = slide.metadata.levels
    shrink = max(scale_x, scale_y) / levels[best_level(levels, min(scale_x, scale_y))].downsample
    block_px = max(1, int(BLOCK_PX / max(shrink, 1)))
    image = np.full((height_px, width_px, 3), slide.metadata.background, np.uint8)
    blocks = [
        (left, top, min(block_px, width_px - left), min(block_px, height_px - top))
        for top in range(0, height_px, block_px)
        for left in range(0, width_px, block_px)
    ]
    unreadable_px: list[int] = []

    # Not recursive: a function that refers to itself would keep the slide open until the next garbage collection.
    def read(block: tuple[int, int, int, int]) -> None:
        todo = [block]
        while todo:
            left, top, columns, rows = todo.pop()
            x_px0, y_px0 = box.x_px0 + left * scale_x, box.y_px0 + top * scale_y
            try:
                pixels = read_region(slide, x_px0, y_px0, columns * scale_x, rows * scale_y, columns, rows)
            except TileReadError:
                if max(columns, rows) > _MAX_UNSPLIT_PX:
                    todo += reversed(_split_block(left, top, columns, rows))
                    continue
                unreadable_px.append(columns * rows)  # keeps the background colour
                if sum(unreadable_px) > MAX_UNREADABLE_FRACTION * width_px * height_px:
                    raise
            else:
                image[top : top + rows, left : left + columns] = pixels

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, blocks))
    return image


def _split_block(left: int, top: int, columns: int, rows: int) -> list[tuple[int, int, int, int]]:
    """Split a block into up to four parts."""
    half_columns, half_rows = (columns + 1) // 2, (rows + 1) // 2
    return [
        (x, y, width, height)
        for x, width in ((left, half_columns), (left + half_columns, columns - half_columns))
        for y, height in ((top, half_rows), (top + half_rows, rows - half_rows))
        if width and height
    ]
