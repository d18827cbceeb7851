"""Geometry of the image pyramid that the page displays (Deep Zoom).

Levels are numbered in the opposite order of the levels of a slide file: level 0 is a single image, each further level
doubles the resolution, and the last level has the full resolution of the slide. Columns and rows start at the corner of
the slide's bounds, so the padding of formats such as MRXS is not shown. Images at the right and lower edge are smaller:
they end exactly at the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tapfm.slides.slide import Box

_IMAGE_PX = 512


class PyramidImage(NamedTuple):
    """An image of the pyramid: its region of the slide in level-0 pixels, and its own size in pixels."""

    box: Box
    width_px: int
    height_px: int


@dataclass(frozen=True)
class DeepZoomPyramid:
    """Image pyramid over the bounds of a slide."""

    bounds: Box
    image_px: int = _IMAGE_PX  # side of an image

    @property
    def last_level(self) -> int:
        """Index of the level with the full resolution of the slide."""
        longest = max(self.bounds.width_px0, self.bounds.height_px0)
        return max(0, math.ceil(math.log2(longest / self.image_px)))

    def find_image(self, level: int, column: int, row: int) -> PyramidImage | None:
        """Return an image of the pyramid, or None if there is none at this position."""
        if not 0 <= level <= self.last_level or column < 0 or row < 0:
            return None
        downsample = 2 ** (self.last_level - level)
        side_px0 = self.image_px * downsample
        x, y = column * side_px0, row * side_px0
        width_px0 = min(side_px0, self.bounds.width_px0 - x)
        height_px0 = min(side_px0, self.bounds.height_px0 - y)
        if width_px0 <= 0 or height_px0 <= 0:
            return None
        box = Box(self.bounds.x_px0 + x, self.bounds.y_px0 + y, width_px0, height_px0)
        return PyramidImage(box, math.ceil(width_px0 / downsample), math.ceil(height_px0 / downsample))
