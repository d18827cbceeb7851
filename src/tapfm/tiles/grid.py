"""The grid of tiles on a slide. Positions are the top left corners of tiles, in level-0 pixels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SettingError
from tapfm.slides.slide import Box, Thumbnail
from tapfm.slides.tissue import TISSUE_METHODS, Mask

Positions = NDArray[np.int64]  # (tiles, 2)
_EDGE_TILES = ("skip", "pad")


@dataclass(frozen=True)
class TileSpec:
    """All settings that determine the tiles of a slide.

    Field names and values are part of the fingerprint in every tile file: renaming a field invalidates tiled slides.
    """

    tile_px: int = 224
    mpp: float = 0.5
    overlap_px: int = 0
    min_tissue: float = 0.25
    tissue: str = "otsu"
    drop_pen: bool = True
    drop_blur: bool = True
    edge_tiles: str = "skip"  # "pad" keeps tiles that extend past the right or bottom edge

    def __post_init__(self) -> None:
        has_valid_size = 16 <= self.tile_px <= 4096
        rules = {
            f"size is {self.tile_px}, but must be from 16 to 4096 px": not has_valid_size,
            f"mpp is {self.mpp:g}, but must be from 0.1 to 8 um per pixel": not 0.1 <= self.mpp <= 8,
            f"overlap is {self.overlap_px}, but must be at least 0 and below the tile size of {self.tile_px} px": (
                self.overlap_px < 0 or (has_valid_size and self.overlap_px >= self.tile_px)
            ),
            f"min-tissue is {self.min_tissue:g}, but must be above 0 and at most 1": not 0 < self.min_tissue <= 1,
            f"tissue is '{self.tissue}', but must be one of {', '.join(TISSUE_METHODS)}": (
                self.tissue not in TISSUE_METHODS
            ),
            f"edge-tiles is '{self.edge_tiles}', but must be one of {', '.join(_EDGE_TILES)}": (
                self.edge_tiles not in _EDGE_TILES
            ),
        }
        if broken := [rule for rule, is_broken in rules.items() if is_broken]:
            raise SettingError("; ".join(broken) + ".", hint="All settings: tapfm tile --help")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as stored in tile files and in their fingerprints.

        `edge_tiles` is omitted if it is "skip": files of versions without this setting have the same tiles.
        """
        settings = asdict(self)
        if self.edge_tiles == "skip":
            del settings["edge_tiles"]
        return settings

    def side_px0(self, slide_mpp: float) -> int:
        """Return the side of a tile in level-0 pixels, rounded."""
        return max(1, round(self.tile_px * self.mpp / slide_mpp))

    def stride_px0(self, slide_mpp: float) -> float:
        """Return the distance between tiles in level-0 pixels. It is not rounded, so that the grid does not drift."""
        return (self.tile_px - self.overlap_px) * self.mpp / slide_mpp

    def achieved_mpp(self, slide_mpp: float) -> float:
        """Return the exact microns per pixel of the tiles, which differ from `mpp` because the side is rounded."""
        return self.side_px0(slide_mpp) * slide_mpp / self.tile_px


class TileStatus(IntEnum):
    """Whether a tile of the grid is kept, or why it is removed."""

    KEPT = 0
    BACKGROUND = 1
    PADDING = 2  # black padding of the scanner
    PEN = 3
    BLUR = 4
    UNREADABLE = 5
    EDGE = 6  # removed: extends past the right or bottom edge
    PADDED = 7  # kept, although it extends past the right or bottom edge; pixels outside the slide are white


def tile_grid(bounds: Box, spec: TileSpec, slide_mpp: float, *, with_edge: bool = False) -> Positions:
    """Return the positions of all tiles that lie completely within the bounds, row by row.

    with_edge: also return the tiles that extend past the right or bottom edge, at most one column and one row.
    """
    side_px0, stride_px0 = spec.side_px0(slide_mpp), spec.stride_px0(slide_mpp)
    x = bounds.x_px0 + _tile_starts(bounds.width_px0, side_px0, stride_px0, with_edge)
    y = bounds.y_px0 + _tile_starts(bounds.height_px0, side_px0, stride_px0, with_edge)
    return np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)


def _tile_starts(length_px0: int, side_px0: int, stride_px0: float, with_edge: bool) -> NDArray[np.int64]:
    """Return the starts of the tiles along one side; each is rounded on its own, so that errors do not add up."""
    count = int((length_px0 - side_px0) / stride_px0) + 2 if length_px0 >= side_px0 else 0
    starts = np.rint(np.arange(count) * stride_px0).astype(np.int64)
    starts = starts[starts + side_px0 <= length_px0]
    covered_px0 = starts[-1] + side_px0 if len(starts) else 0
    following = round(len(starts) * stride_px0)
    if with_edge and covered_px0 < length_px0 and following < length_px0:
        starts = np.append(starts, following)
    return starts


def find_edge_tiles(bounds: Box, positions: Positions, side_px0: int) -> NDArray[np.bool_]:
    """Return which tiles extend past the right or bottom edge of the bounds."""
    ends = np.array([bounds.x_px0 + bounds.width_px0, bounds.y_px0 + bounds.height_px0])
    return np.asarray((positions + side_px0 > ends).any(axis=1))


def mask_coverage(mask: Mask, thumbnail: Thumbnail, positions: Positions, side_px0: int) -> NDArray[np.float64]:
    """Return the fraction of each tile that a mask covers; exact even if tile edges cut through mask pixels."""
    # sums[y, x] = covered area left of x and above y, linear in between
    sums = cv2.integral(mask.astype(np.uint8), sdepth=cv2.CV_64F)
    corner = np.array([thumbnail.box.x_px0, thumbnail.box.y_px0])
    step = np.array(thumbnail.downsample)
    start, end = (positions - corner) / step, (positions + side_px0 - corner) / step
    area = (
        _interpolate_area(sums, end[:, 0], end[:, 1])
        - _interpolate_area(sums, start[:, 0], end[:, 1])
        - _interpolate_area(sums, end[:, 0], start[:, 1])
        + _interpolate_area(sums, start[:, 0], start[:, 1])
    )
    return np.asarray(np.clip(area * step[0] * step[1] / side_px0**2, 0, 1))


def _interpolate_area(sums: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate the summed area table linearly at (x, y)."""
    height, width = sums.shape
    x, y = np.clip(x, 0, width - 1), np.clip(y, 0, height - 1)
    left, top = np.minimum(x.astype(int), width - 2), np.minimum(y.astype(int), height - 2)
    weight_x, weight_y = x - left, y - top
    upper = sums[top, left] * (1 - weight_x) + sums[top, left + 1] * weight_x
    lower = sums[top + 1, left] * (1 - weight_x) + sums[top + 1, left + 1] * weight_x
    return np.asarray(upper * (1 - weight_y) + lower * weight_y)
