"""The Slide interface that every reader implements, and the types it uses.

Units: `_px0` is a length or position in pixels of level 0, the full resolution; `_px` is in pixels of the image.
Points are (x, y) from the top left. A region may extend past the edge of the slide; it is white there.
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
DAMAGED_FILE_HINT = "The file may be damaged. Copy it again from its original."
CACHE_BYTES = 32 * 2**20  # decoded pixels per open slide; the default of OpenSlide


@dataclass(frozen=True)
class Level:
    """One level of the pyramid. A downsample is the number of level-0 pixels per pixel of this level.

    `downsample_x` and `downsample_y` differ if the shorter side of a narrow slide was rounded. Using their mean
    for both would shift positions at the far end of the longer side.
    """

    width_px: int
    height_px: int
    downsample_x: float
    downsample_y: float

    @property
    def downsample(self) -> float:
        """Mean downsample, used to choose a level."""
        return (self.downsample_x + self.downsample_y) / 2

    @classmethod
    def from_sizes(cls, width_px: int, height_px: int, width_px0: int, height_px0: int) -> Level:
        """Compute the downsamples from the sizes of this level and of level 0.

        If dividing both sides of level 0 by one integer gives this level's size, up to rounding, both downsamples are
        that integer. Otherwise they are the exact ratios.
        """
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
class SlideMetadata:
    """Metadata as stored in the file. The values are not validated here (see scale.py)."""

    path: Path
    format: str
    vendor: str
    reader: str
    levels: tuple[Level, ...]
    mpp_in_file: float | None
    objective_power: float | None
    bounds: Box  # the scanned area; the whole slide if the file does not define it
    background: Colour = WHITE
    note: str = ""  # warning about unusual metadata

    @property
    def width_px0(self) -> int:
        return self.levels[0].width_px

    @property
    def height_px0(self) -> int:
        return self.levels[0].height_px


@dataclass(frozen=True)
class Thumbnail:
    """A small image of a part of the slide, with the rectangle `box` that it shows."""

    pixels: Pixels
    box: Box

    @property
    def downsample(self) -> tuple[float, float]:
        """Level-0 pixels per thumbnail pixel, (x, y); they differ slightly because both sides are rounded."""
        height_px, width_px = self.pixels.shape[:2]
        return self.box.width_px0 / width_px, self.box.height_px0 / height_px


class Slide(Protocol):
    """An open slide. Reading is thread-safe; each worker process opens its own slides (pool.py)."""

    @property
    def metadata(self) -> SlideMetadata:
        """The slide's metadata."""
        ...

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Read a region of one level without resizing; positions and sizes are in pixels of that level."""
        ...

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        """Read the square at (x_px0, y_px0) with side `side_px0`, resized to `tile_px` x `tile_px`."""
        ...

    def thumbnail(self, longest_px: int) -> Thumbnail:
        """Return a thumbnail of the slide's bounds whose longer side has at most `longest_px`."""
        ...

    def close(self) -> None:
        """Close the file and free the cache."""
        ...
