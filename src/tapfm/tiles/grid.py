"""The grid of tiles on a slide, and why each tile is kept or left out. Positions are level-0 pixels, top left."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cv2
import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SettingError
from tapfm.slides.slide import Box, Thumbnail
from tapfm.slides.tissue import METHODS, Mask

Positions = NDArray[np.int64]  # (tiles, 2)


@dataclass(frozen=True)
class TileSpec:
    """Everything that decides which tiles a slide has. Its fingerprint is part of every stored file."""

    tile_px: int = 224
    mpp: float = 0.5
    overlap_px: int = 0
    min_tissue: float = 0.25
    tissue: str = "otsu"
    drop_pen: bool = True
    drop_blur: bool = True

    def __post_init__(self) -> None:
        rules = {
            f"size is {self.tile_px}: it has to be from 16 to 4096 px": not 16 <= self.tile_px <= 4096,
            f"mpp is {self.mpp:g}: it has to be from 0.1 to 8 um per pixel": not 0.1 <= self.mpp <= 8,
            f"overlap is {self.overlap_px}: it has to be from 0 to below the size, {self.tile_px} px": not (
                0 <= self.overlap_px < self.tile_px
            ),
            f"min-tissue is {self.min_tissue:g}: it has to be above 0 and at most 1": not 0 < self.min_tissue <= 1,
            f"tissue is '{self.tissue}': it has to be one of {', '.join(METHODS)}": self.tissue not in METHODS,
        }
        if broken := [rule for rule, is_broken in rules.items() if is_broken]:
            raise SettingError("; ".join(broken) + ".", hint="All settings: tapfm tile --help")

    def side_px0(self, slide_mpp: float) -> int:
        """Say how many level-0 pixels a tile covers; to within half a pixel."""
        return max(1, round(self.tile_px * self.mpp / slide_mpp))

    def stride_px0(self, slide_mpp: float) -> float:
        """Say how far apart tiles lie, unrounded: rounding it would let the grid drift."""
        return (self.tile_px - self.overlap_px) * self.mpp / slide_mpp

    def achieved_mpp(self, slide_mpp: float) -> float:
        """Say at which scale tiles really come out."""
        return self.side_px0(slide_mpp) * slide_mpp / self.tile_px


class TileVerdict(IntEnum):
    """What became of a place of the grid."""

    KEPT = 0
    BACKGROUND = 1
    PADDING = 2
    PEN = 3
    BLUR = 4
    UNREADABLE = 5


def tile_grid(bounds: Box, spec: TileSpec, slide_mpp: float) -> Positions:
    """Lay whole tiles over a slide's bounds, row by row."""
    side_px0, stride_px0 = spec.side_px0(slide_mpp), spec.stride_px0(slide_mpp)
    x = bounds.x_px0 + _starts(bounds.width_px0, side_px0, stride_px0)
    y = bounds.y_px0 + _starts(bounds.height_px0, side_px0, stride_px0)
    return np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)


def _starts(length_px0: int, side_px0: int, stride_px0: float) -> NDArray[np.int64]:
    """Place tiles along one side; each start is rounded by itself, so that no error adds up."""
    if length_px0 < side_px0:
        return np.empty(0, np.int64)
    count = int((length_px0 - side_px0) / stride_px0) + 2
    places = np.rint(np.arange(count) * stride_px0).astype(np.int64)
    return places[places + side_px0 <= length_px0]


def covered(mask: Mask, thumbnail: Thumbnail, positions: Positions, side_px0: int) -> NDArray[np.float64]:
    """Say which part of each tile a mask covers; exact, also where a tile cuts through the mask's pixels."""
    # sums[y, x] = covered area left of x and above y, linear in between
    sums = cv2.integral(mask.astype(np.uint8), sdepth=cv2.CV_64F)
    corner = np.array([thumbnail.box.x_px0, thumbnail.box.y_px0])
    step = np.array(thumbnail.downsample)
    start, end = (positions - corner) / step, (positions + side_px0 - corner) / step
    area = (
        _area_before(sums, end[:, 0], end[:, 1])
        - _area_before(sums, start[:, 0], end[:, 1])
        - _area_before(sums, end[:, 0], start[:, 1])
        + _area_before(sums, start[:, 0], start[:, 1])
    )
    return np.asarray(np.clip(area * step[0] * step[1] / side_px0**2, 0, 1))


def _area_before(sums: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Look up summed areas between their grid points."""
    height, width = sums.shape
    x, y = np.clip(x, 0, width - 1), np.clip(y, 0, height - 1)
    left, top = np.minimum(x.astype(int), width - 2), np.minimum(y.astype(int), height - 2)
    across, down = x - left, y - top
    upper = sums[top, left] * (1 - across) + sums[top, left + 1] * across
    lower = sums[top + 1, left] * (1 - across) + sums[top + 1, left + 1] * across
    return np.asarray(upper * (1 - down) + lower * down)
