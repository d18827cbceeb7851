"""Where the tiles of a slide lie on a picture of its bounds: a pixel shows the tile that its centre is in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import InputError
from tapfm.prediction.folder import PredictedSlide
from tapfm.prediction.layers import Values
from tapfm.slides.slide import SlideFacts
from tapfm.tiles.grid import Positions

Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TileSquares:
    """Tiles in pixels of a picture: from `left` to before `right`, from `top` to before `bottom`."""

    left: Whole
    top: Whole
    right: Whole
    bottom: Whole
    width_px: int
    height_px: int

    def paint(self, values: Values, top_px: int, rows_px: int) -> tuple[Values, Mask]:
        """Paint some rows of the picture; gives their values, the mean where tiles overlap, and where there are any."""
        total, count = np.zeros((rows_px, self.width_px)), np.zeros((rows_px, self.width_px), np.int32)
        here = (self.top < top_px + rows_px) & (self.bottom > top_px)
        edges = np.stack([self.left, np.maximum(self.top - top_px, 0), self.right, self.bottom - top_px], axis=1)
        for (left, top, right, bottom), value in zip(edges[here].tolist(), values[here].tolist(), strict=True):
            total[top:bottom, left:right] += value
            count[top:bottom, left:right] += 1
        return total / np.maximum(count, 1), count > 0


def place(
    predicted: PredictedSlide, positions: Positions, px0_per_px: tuple[float, float], width_px: int, height_px: int
) -> TileSquares:
    """Place tiles on a picture of the bounds; a pixel is `px0_per_px` level-0 pixels wide and high."""
    bounds = predicted.bounds
    spans = []
    for axis, (corner_px0, length_px) in enumerate([(bounds.x_px0, width_px), (bounds.y_px0, height_px)]):
        starts = positions[:, axis] - corner_px0
        ends = _ends_of(starts, predicted.side_px0)
        start, end = (_first_centre(edges / px0_per_px[axis]) for edges in (starts, ends))
        # a tile smaller than a pixel still has one
        start = np.clip(start, 0, length_px - 1)
        spans.append((start, np.clip(end, start + 1, length_px)))
    (left, right), (top, bottom) = spans
    return TileSquares(left, top, right, bottom, width_px, height_px)


def _ends_of(starts_px0: Whole, side_px0: int) -> Whole:
    """Say where tiles end: where the next one starts, if it does so within a pixel of level 0.

    Starts are rounded each by itself (tiles/grid.py), so neighbours on a grid whose stride is no whole number are up to
    a pixel apart or over each other: on a picture that would be a line of no tile, or of two.
    """
    ends, starts = starts_px0 + side_px0, np.unique(starts_px0)
    met = ends
    for near in (ends - 1, ends + 1, ends):  # the last that fits is taken
        met = np.where(np.isin(near, starts), near, met)
    return met


def _first_centre(edges_px: NDArray[np.float64]) -> Whole:
    """Find the first pixel whose centre is at an edge or after it."""
    return np.ceil(edges_px - 0.5).astype(np.int64)


def is_same_slide(facts: SlideFacts, predicted: PredictedSlide) -> bool:
    """Say whether a file can be the slide that was predicted; on another one tiles would lie somewhere."""
    same_size = (facts.width_px0, facts.height_px0) == (predicted.width_px0, predicted.height_px0)
    return same_size and facts.bounds == predicted.bounds


def refuse_other_slide(facts: SlideFacts, predicted: PredictedSlide) -> None:
    """Stop where the file is not the slide that was predicted."""
    if not is_same_slide(facts, predicted):
        found, expected = (facts.width_px0, facts.height_px0), (predicted.width_px0, predicted.height_px0)
        raise InputError(
            f"{facts.path} has {found[0]:,} x {found[1]:,} pixels; {predicted.slide_id} had {expected[0]:,} x "
            f"{expected[1]:,} when it was predicted{'' if found != expected else ', and other bounds'}.",
            hint="It is another slide, or was scanned again: predict it again with tapfm predict.",
        )
