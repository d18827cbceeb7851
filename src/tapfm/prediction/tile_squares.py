"""Tiles as squares on an image of the slide's bounds. A pixel belongs to the tile that contains its centre."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import Values
from tapfm.slides.slide import SlideMetadata
from tapfm.tiles.grid import Positions

IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TileSquares:
    """Tiles in image pixels. `right` and `bottom` are exclusive."""

    left: IntArray
    top: IntArray
    right: IntArray
    bottom: IntArray
    width_px: int
    height_px: int

    def rasterise(self, values: Values, top_px: int, rows_px: int) -> tuple[Values, Mask]:
        """Return the values of some rows of the image (the mean if tiles overlap), and which pixels have a tile."""
        total, count = np.zeros((rows_px, self.width_px)), np.zeros((rows_px, self.width_px), np.int32)
        visible = (self.top < top_px + rows_px) & (self.bottom > top_px)
        edges = np.stack([self.left, np.maximum(self.top - top_px, 0), self.right, self.bottom - top_px], axis=1)
        for (left, top, right, bottom), value in zip(edges[visible].tolist(), values[visible].tolist(), strict=True):
            total[top:bottom, left:right] += value
            count[top:bottom, left:right] += 1
        return total / np.maximum(count, 1), count > 0


def place_tiles(
    predicted: PredictedSlide, positions: Positions, px0_per_px: tuple[float, float], width_px: int, height_px: int
) -> TileSquares:
    """Place tiles on an image of the bounds. px0_per_px: level-0 pixels per image pixel, x and y."""
    bounds = predicted.bounds
    spans = []
    for axis, (corner_px0, length_px) in enumerate([(bounds.x_px0, width_px), (bounds.y_px0, height_px)]):
        starts = positions[:, axis] - corner_px0
        ends = _find_tile_ends(starts, predicted.side_px0)
        start, end = (_first_pixel_after(edges / px0_per_px[axis]) for edges in (starts, ends))
        # a tile that is smaller than a pixel still covers one pixel
        start = np.clip(start, 0, length_px - 1)
        spans.append((start, np.clip(end, start + 1, length_px)))
    (left, right), (top, bottom) = spans
    return TileSquares(left, top, right, bottom, width_px, height_px)


def _find_tile_ends(starts_px0: IntArray, side_px0: int) -> IntArray:
    """Return where tiles end: at the start of the next tile, if that is at most one level-0 pixel away.

    Tile positions are rounded individually (tiles/grid.py). If the stride is not an integer, neighbours can be one
    pixel apart or overlap by one pixel, which would show as a line on the image.
    """
    ends, starts = starts_px0 + side_px0, np.unique(starts_px0)
    snapped = ends
    for near in (ends - 1, ends + 1, ends):  # the last match wins
        snapped = np.where(np.isin(near, starts), near, snapped)
    return snapped


def _first_pixel_after(edges_px: NDArray[np.float64]) -> IntArray:
    """Return the first pixel whose centre is at or after an edge."""
    return np.ceil(edges_px - 0.5).astype(np.int64)


def is_same_slide(metadata: SlideMetadata, predicted: PredictedSlide) -> bool:
    """Return whether size and bounds of a file are those of the predicted slide."""
    same_size = (metadata.width_px0, metadata.height_px0) == (predicted.width_px0, predicted.height_px0)
    return same_size and metadata.bounds == predicted.bounds


def check_same_slide(metadata: SlideMetadata, predicted: PredictedSlide) -> None:
    """Raise if a file is not the slide that was predicted."""
    if not is_same_slide(metadata, predicted):
        found, expected = (metadata.width_px0, metadata.height_px0), (predicted.width_px0, predicted.height_px0)
        raise InputError(
            f"{metadata.path} has {found[0]:,} x {found[1]:,} pixels, but {predicted.slide_id} had {expected[0]:,} x "
            f"{expected[1]:,} pixels{'' if found != expected else ' and different bounds'} when it was predicted.",
            hint="The file is another slide or a new scan. Predict it again with tapfm predict.",
        )
