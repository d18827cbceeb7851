"""The pyramid of pictures that the page asks for: where each picture lies on the slide.

Level 0 is one picture; each further level doubles the resolution, and the last one is the slide's own. Pictures count
from the corner of the slide's bounds, so that the padding of MRXS-like slides is never shown. A picture at the right or
lower edge covers what is left, to the pixel, as the page places it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tapfm.slides.slide import Box

_PICTURE_PX = 512


class ZoomTile(NamedTuple):
    """A part of the slide and the size it is shown at."""

    box: Box
    width_px: int
    height_px: int


@dataclass(frozen=True)
class DeepZoom:
    """The pyramid over the bounds of a slide."""

    bounds: Box
    picture_px: int = _PICTURE_PX

    @property
    def last_level(self) -> int:
        """Number the level that has the slide's own resolution."""
        longest = max(self.bounds.width_px0, self.bounds.height_px0)
        return max(0, math.ceil(math.log2(longest / self.picture_px)))

    def picture(self, level: int, column: int, row: int) -> ZoomTile | None:
        """Say what a picture shows; None where there is none."""
        if not 0 <= level <= self.last_level or column < 0 or row < 0:
            return None
        downsample = 2 ** (self.last_level - level)
        side_px0 = self.picture_px * downsample
        x, y = column * side_px0, row * side_px0
        width_px0 = min(side_px0, self.bounds.width_px0 - x)
        height_px0 = min(side_px0, self.bounds.height_px0 - y)
        if width_px0 <= 0 or height_px0 <= 0:
            return None
        box = Box(self.bounds.x_px0 + x, self.bounds.y_px0 + y, width_px0, height_px0)
        return ZoomTile(box, math.ceil(width_px0 / downsample), math.ceil(height_px0 / downsample))
