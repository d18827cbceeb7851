"""Read the pixels of tiles; tiles that cannot be decoded are retried, then skipped with a reason."""

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

TilePixels = NDArray[np.uint8]  # (tiles, 3, side, side), the input of encoders
Allocate = Callable[[tuple[int, ...]], TilePixels]  # returns an array for pixels of this shape


@dataclass(frozen=True)
class TileRequest:
    """Tiles of one slide to read: squares of `side_px0` at `positions`, resized to `tile_px`."""

    slide_id: str
    path: Path
    positions: Positions
    side_px0: int
    tile_px: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the pixel array."""
        return len(self.positions), 3, self.tile_px, self.tile_px

    @property
    def nbytes(self) -> int:
        """Size of the pixel array in bytes."""
        return len(self.positions) * 3 * self.tile_px**2

    def select(self, start: int, end: int) -> TileRequest:
        """Return a request for the tiles from `start` to `end`."""
        return TileRequest(self.slide_id, self.path, self.positions[start:end], self.side_px0, self.tile_px)


@dataclass(frozen=True)
class TileReadResult:
    """Result of a request: `pixels` of the tiles in `rows`, and why the other tiles could not be read."""

    request: TileRequest
    pixels: TilePixels
    rows: NDArray[np.int64]  # indices into request.positions
    reasons: tuple[str, ...] = ()  # one for each tile that could not be read

    @property
    def failed(self) -> int:
        """Number of tiles that could not be read."""
        return len(self.request.positions) - len(self.rows)


def allocate_array(shape: tuple[int, ...]) -> TilePixels:
    """Return an uninitialised array in ordinary memory."""
    return np.empty(shape, np.uint8)


def read_request(pool: SlidePool, request: TileRequest, allocate: Allocate = allocate_array) -> TileReadResult:
    """Read the tiles of a request one by one. A tile that fails is retried once with the slide reopened."""
    pixels = allocate(request.shape)
    rows: list[int] = []
    reasons: list[str] = []
    for row, (x_px0, y_px0) in enumerate(request.positions.tolist()):
        try:
            tile = _read_with_retry(pool, request, x_px0, y_px0)
        except SlideError as error:  # the slide cannot be opened, so no other tile can be read
            reasons += [format_error(error)] * (len(request.positions) - row)
            break
        except Exception as error:  # including errors of libraries caused by damage
            reasons.append(format_error(error))
        else:
            pixels[len(rows)] = tile.transpose(2, 0, 1)
            rows.append(row)
    return TileReadResult(request, pixels[: len(rows)], np.array(rows, np.int64), tuple(reasons))


def _read_with_retry(pool: SlidePool, request: TileRequest, x_px0: int, y_px0: int) -> Pixels:
    """Read a tile; after a failure, reopen the slide and retry once.

    Network drives can fail temporarily, and a handle that failed once may keep failing.
    """
    try:
        return pool.get(request.path).read(x_px0, y_px0, request.side_px0, request.tile_px)
    except Exception:
        pool.discard(request.path)
        return pool.get(request.path).read(x_px0, y_px0, request.side_px0, request.tile_px)


def format_error(error: Exception) -> str:
    """Return an error as one line of text."""
    message = error.message if isinstance(error, TapfmError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())


@dataclass
class SkippedTiles:
    """Unreadable tiles of a slide, and the reason for one of them."""

    tiles: list[int]
    reason: str
