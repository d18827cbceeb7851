"""What every slide promises, whichever library opens it.

Frames: `_px0` is a length or position in pixels of level 0, the slide at full resolution; `_px` is one in pixels of the
image at hand. Points are (x, y), from the top left. A region may reach over the slide's edge: background is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]  # (height, width, 3), RGB
Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)
COPY_AGAIN = "The file is damaged: copy it again from where it was scanned."  # what to do about pixels that are lost
CACHE_BYTES = 32 * 2**20  # of decoded pixels for each open slide; OpenSlide's own default


@dataclass(frozen=True)
class Level:
    """One resolution of the pyramid; a downsample is level-0 pixels per pixel of this level, across and down.

    They differ where a narrow slide's shorter side was rounded: their mean would shift the far end of its longer one.
    """

    width_px: int
    height_px: int
    downsample_x: float
    downsample_y: float

    @property
    def downsample(self) -> float:
        """Their mean, to choose a level by."""
        return (self.downsample_x + self.downsample_y) / 2

    @classmethod
    def of(cls, width_px: int, height_px: int, width_px0: int, height_px0: int) -> Level:
        """Find the downsamples: one whole number where both sides are that, rounded; their own ratios elsewhere."""
        for factor in (round(width_px0 / width_px), round(height_px0 / height_px)):
            if abs(width_px0 / factor - width_px) < 1 and abs(height_px0 / factor - height_px) < 1:
                return cls(width_px, height_px, factor, factor)
        return cls(width_px, height_px, width_px0 / width_px, height_px0 / height_px)


@dataclass(frozen=True)
class Box:
    """A rectangle on the slide, in level-0 pixels."""

    x_px0: int
    y_px0: int
    width_px0: int
    height_px0: int


@dataclass(frozen=True)
class SlideFacts:
    """What the file says of itself; nothing here is judged yet (see scale.py)."""

    path: Path
    format: str
    vendor: str
    reader: str
    levels: tuple[Level, ...]
    mpp_in_file: float | None
    objective_power: float | None
    bounds: Box  # where the scanner put pixels; the whole slide where the file does not say
    background: Colour = WHITE
    note: str = ""  # something odd that does not stop us

    @property
    def width_px0(self) -> int:
        """Width of level 0."""
        return self.levels[0].width_px

    @property
    def height_px0(self) -> int:
        """Height of level 0."""
        return self.levels[0].height_px


@dataclass(frozen=True)
class Thumbnail:
    """A small picture of a part of the slide, and which part: `downsample` level-0 pixels per pixel."""

    pixels: Pixels
    box: Box

    @property
    def downsample(self) -> tuple[float, float]:
        """Level-0 pixels per pixel across and down; almost equal, as both sides are whole numbers."""
        height_px, width_px = self.pixels.shape[:2]
        return self.box.width_px0 / width_px, self.box.height_px0 / height_px


class Slide(Protocol):
    """An open slide. Reading is safe from several threads; a forked or spawned worker opens its own (pool.py)."""

    @property
    def facts(self) -> SlideFacts:
        """What the file says of itself."""
        ...

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Read pixels of one level, in that level's own pixels, unscaled."""
        ...

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        """Read the square at (x_px0, y_px0) with a side of `side_px0` as a tile of `tile_px`."""
        ...

    def thumbnail(self, longest_px: int) -> Thumbnail:
        """Make a picture of the slide's bounds whose longer side has at most `longest_px`."""
        ...

    def close(self) -> None:
        """Give back the file and the cache."""
        ...
