"""The pixels of some tiles of a slide; what cannot be decoded is retried, skipped and told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tapfm.errors import SlideError, TapfmError
from tapfm.slides.pool import SlidePool
from tapfm.slides.slide import Pixels
from tapfm.tiles.grid import Positions

TilePixels = NDArray[np.uint8]  # (tiles, 3, side, side), as encoders take them
Allocate = Callable[[tuple[int, ...]], TilePixels]  # gives memory for pixels


@dataclass(frozen=True)
class TileRequest:
    """Tiles of one slide to read: squares of `side_px0` at `positions`, each as `tile_px`."""

    slide_id: str
    path: Path
    positions: Positions
    side_px0: int
    tile_px: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of its pixels."""
        return len(self.positions), 3, self.tile_px, self.tile_px

    @property
    def nbytes(self) -> int:
        """Memory of its pixels."""
        return len(self.positions) * 3 * self.tile_px**2

    def part(self, start: int, end: int) -> TileRequest:
        """Ask for some of its tiles only."""
        return TileRequest(self.slide_id, self.path, self.positions[start:end], self.side_px0, self.tile_px)


@dataclass(frozen=True)
class TilesRead:
    """What was read of a request: `pixels` of the tiles in `rows`, and why the others are missing."""

    request: TileRequest
    pixels: TilePixels
    rows: NDArray[np.int64]  # of request.positions
    reasons: tuple[str, ...] = ()  # one for each tile that is missing

    @property
    def failed(self) -> int:
        """How many tiles are missing."""
        return len(self.request.positions) - len(self.rows)


def plain_memory(shape: tuple[int, ...]) -> TilePixels:
    """Give memory for pixels."""
    return np.empty(shape, np.uint8)


def read_request(pool: SlidePool, request: TileRequest, allocate: Allocate = plain_memory) -> TilesRead:
    """Read tiles one by one; each gets a second chance, with the slide opened afresh."""
    pixels = allocate(request.shape)
    rows: list[int] = []
    reasons: list[str] = []
    for row, (x_px0, y_px0) in enumerate(request.positions.tolist()):
        try:
            tile = _with_second_chance(pool, request, x_px0, y_px0)
        except SlideError as error:  # it cannot even be opened: no other tile will do better
            reasons += [reason_of(error)] * (len(request.positions) - row)
            break
        except Exception as error:  # also what libraries raise over damage
            reasons.append(reason_of(error))
        else:
            pixels[len(rows)] = tile.transpose(2, 0, 1)
            rows.append(row)
    return TilesRead(request, pixels[: len(rows)], np.array(rows, np.int64), tuple(reasons))


def _with_second_chance(pool: SlidePool, request: TileRequest, x_px0: int, y_px0: int) -> Pixels:
    """Read a tile, if need be from the slide opened afresh: drives fail for a moment, and handles for good."""
    try:
        return pool.get(request.path).read(x_px0, y_px0, request.side_px0, request.tile_px)
    except Exception:
        pool.let_go(request.path)
        return pool.get(request.path).read(x_px0, y_px0, request.side_px0, request.tile_px)


def reason_of(error: Exception) -> str:
    """Say in one line what went wrong."""
    message = error.message if isinstance(error, TapfmError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())


@dataclass
class SkippedTiles:
    """Unreadable tiles of a slide, and the reason of one of them."""

    tiles: list[int]
    reason: str
