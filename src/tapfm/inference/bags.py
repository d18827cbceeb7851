"""Bags of tiles: pixels read from slides, or stored features, for each visit of a plan.

The plan is known from the start (all epochs of a run with validation between, or the slides of a cohort), so one queue
reads ahead across slides and epochs. Draws of tiles are addressed by (seed, epoch, slide) and depend on nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfm.contracts import EncodedTiles, Tiles
from tapfm.encoders.features import read_features
from tapfm.errors import TapfmError
from tapfm.runtime.workers import WorkerPool
from tapfm.tiles.grid import Positions
from tapfm.tiles.reading import TilePixels, TileRequest, TilesRead, plain_memory
from tapfm.tiles.sampling import draw_tiles
from tapfm.tiles.store import TileSet
from tapfm.tiles.stream import TileStream

_PART_TILES = 256  # tiles of a slide that are in memory at a time during inference
AHEAD_BYTES = 2**30  # pixels read ahead
_MAX_MISSING = 0.05  # fraction of a slide's tiles that may be unreadable before the slide fails


@dataclass(frozen=True)
class BagRequest:
    """A request for `tiles` tiles of a slide, or all of them (None)."""

    purpose: Literal["train", "inference"]
    slide_id: str
    tiles: int | None = None
    address: tuple[int | str, ...] = ()  # of the random draw


@dataclass(frozen=True)
class Bag:
    """Tiles of one slide: uint8 pixels or features."""

    content: Tiles | EncodedTiles
    rows: NDArray[np.int64]  # which of the slide's tiles these are
    missing: Mapping[int, str] = field(default_factory=dict)  # unreadable tiles and the reason
    coordinates: Tensor | None = None  # (K, 2) on the slide, in tile sides; None where unknown

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return len(self.rows)


class SlideFailed(Exception):  # noqa: N818 - caught and reported for each slide, never shown as it is
    """A slide that cannot be used: at which stage, why, and what to do."""

    def __init__(self, reason: str, hint: str = "", stage: Literal["read", "predict"] = "read") -> None:
        super().__init__(reason)
        self.reason, self.hint, self.stage = " ".join(reason.split()), hint, stage


class Bags(Protocol):
    """Reads the bags of a plan, in its order."""

    @property
    def waited_s(self) -> float:
        """Seconds that the caller has waited for tiles."""
        ...

    def start(self, plan: Iterator[BagRequest]) -> None:
        """Start reading ahead."""
        ...

    def read(self, visit: BagRequest) -> Bag:
        """Return the next bag, whole. Raises SlideFailed when none of its tiles can be read."""
        ...

    def read_parts(self, visit: BagRequest) -> Iterator[Bag]:
        """Yield the next bag in parts of bounded size; parts may be empty."""
        ...

    def skip_rest(self) -> None:
        """Discard the parts of the current bag that were not read, so that the next bag can be."""
        ...

    def tile_count(self, slide_id: str) -> int:
        """Return the number of tiles of a slide, readable or not."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...


@dataclass(frozen=True)
class SlideTiles:
    """A slide's file and its tiles."""

    path: Path
    tiles: TileSet


class PixelBags:
    """Bags of pixels in the memory of the host, read from slides by worker processes.

    device: the device that the pixels are for; for a GPU they are in pinned memory.
    pool: workers that were started before.
    """

    def __init__(
        self,
        slides: Mapping[str, SlideTiles],
        *,
        tile_px: int,
        device: torch.device,
        workers: int,
        ahead_bytes: int,
        pool: WorkerPool | None = None,
    ) -> None:
        self._slides, self._tile_px, self._device = slides, tile_px, device
        self._workers, self._ahead_bytes, self._pool = workers, ahead_bytes, pool
        self._stream: TileStream | None = None
        self._parts_left = 0  # of the current bag

    @property
    def waited_s(self) -> float:
        """Seconds that the caller has waited for tiles."""
        return self._stream.waited_s if self._stream is not None else 0.0

    def start(self, plan: Iterator[BagRequest]) -> None:
        """Start reading ahead."""
        self._stream = TileStream(
            self._requests(plan),
            workers=self._workers,
            ahead_bytes=self._ahead_bytes,
            allocate=_pinned_memory if self._device.type == "cuda" else plain_memory,
            pool=self._pool,
        )

    def read(self, visit: BagRequest) -> Bag:
        """Return the next bag, whole."""
        drawn = self._drawn(visit)
        bag = self._next(visit, drawn)
        if not bag.tiles:
            raise no_tile_readable(tuple(bag.missing.values()))
        return bag

    def read_parts(self, visit: BagRequest) -> Iterator[Bag]:
        """Yield the next bag in parts: the pixels of a whole slide may not fit into memory."""
        drawn = self._drawn(visit)
        starts = range(0, len(drawn), _PART_TILES)
        self._parts_left = len(starts)
        for start in starts:
            self._parts_left -= 1
            yield self._next(visit, drawn[start : start + _PART_TILES])

    def skip_rest(self) -> None:
        """Discard the parts of the current bag that were not read."""
        assert self._stream is not None
        for _ in range(self._parts_left):
            next(self._stream)
        self._parts_left = 0

    def tile_count(self, slide_id: str) -> int:
        """Return the number of tiles of a slide, readable or not."""
        return len(self._slides[slide_id].tiles)

    def close(self) -> None:
        """Stop reading."""
        if self._stream is not None:
            self._stream.close()

    def _drawn(self, visit: BagRequest) -> NDArray[np.int64]:
        return draw_tiles(len(self._slides[visit.slide_id].tiles), visit.tiles, *visit.address)

    def _requests(self, plan: Iterable[BagRequest]) -> Iterator[TileRequest]:
        for visit in plan:
            slide = self._slides[visit.slide_id]
            positions = slide.tiles.positions[self._drawn(visit)]
            request = TileRequest(visit.slide_id, slide.path, positions, slide.tiles.side_px0, self._tile_px)
            if visit.purpose == "train":
                yield request
            else:
                starts = range(0, len(positions), _PART_TILES)
                yield from (request.part(start, start + _PART_TILES) for start in starts)

    def _next(self, visit: BagRequest, drawn: NDArray[np.int64]) -> Bag:
        assert self._stream is not None
        read = next(self._stream)
        if read.request.slide_id != visit.slide_id:
            raise RuntimeError(f"Tiles of {read.request.slide_id} were read instead of {visit.slide_id}.")
        pixels = _as_tensor(read.pixels)
        tiles, rows = self._slides[visit.slide_id].tiles, drawn[read.rows]
        coordinates = _tile_coordinates(tiles.positions[rows], tiles.side_px0)
        return Bag(pixels, rows, _missing_tiles(drawn, read), coordinates)


class FeatureBags:
    """Bags of stored features, one file per slide; as many as fit stay in memory."""

    def __init__(self, files: Mapping[str, Path], *, device: torch.device, ahead_bytes: int) -> None:
        self._files, self._device, self._free_bytes = files, device, ahead_bytes
        self._kept: dict[str, Bag] = {}
        self.waited_s = 0.0

    def start(self, plan: Iterator[BagRequest]) -> None:
        """Nothing to start."""

    def read(self, visit: BagRequest) -> Bag:
        """Return the features of the drawn tiles, on the device."""
        whole = self._read_slide(visit.slide_id)
        assert isinstance(whole.content, EncodedTiles)
        rows = draw_tiles(whole.tiles, visit.tiles, *visit.address)
        index = torch.from_numpy(rows)
        drawn = EncodedTiles(*(part[index].to(self._device) for part in whole.content))
        return Bag(drawn, rows, coordinates=None if whole.coordinates is None else whole.coordinates[index])

    def read_parts(self, visit: BagRequest) -> Iterator[Bag]:
        """Yield the whole bag: features of a slide fit into memory."""
        yield self.read(visit)

    def skip_rest(self) -> None:
        """Nothing to discard: a bag is one part."""

    def tile_count(self, slide_id: str) -> int:
        """Return the number of tiles of a slide."""
        return self._read_slide(slide_id).tiles

    def close(self) -> None:
        """Free the features in memory."""
        self._kept.clear()

    def _read_slide(self, slide_id: str) -> Bag:
        if slide_id in self._kept:
            return self._kept[slide_id]
        start = time.monotonic()
        try:
            stored = read_features(self._files[slide_id])
        except TapfmError as error:
            raise SlideFailed(error.message, error.hint) from error
        finally:
            self.waited_s += time.monotonic() - start
        if not len(stored):
            raise SlideFailed(f"{self._files[slide_id]} has no tiles")
        features = torch.from_numpy(stored.features)
        # aggregators that use the attention are refused before, where none is stored
        attention = torch.zeros(len(stored)) if stored.attention is None else torch.from_numpy(stored.attention)
        coordinates = None if stored.positions is None else _tile_coordinates(stored.positions, stored.side_px0)
        bag = Bag(EncodedTiles(features, attention), np.arange(len(stored)), coordinates=coordinates)
        if features.nbytes <= self._free_bytes:
            self._free_bytes -= features.nbytes
            self._kept[slide_id] = bag
        return bag


def _tile_coordinates(positions: Positions, side_px0: int | None) -> Tensor:
    """Return positions in tile sides; where the side is unknown, tiles are assumed to touch each other."""
    if side_px0 is None:
        steps = np.diff(np.sort(positions, axis=0), axis=0)
        side_px0 = int(steps[steps > 0].min(initial=np.iinfo(np.int64).max))
    return torch.from_numpy((positions / side_px0).astype(np.float32))


def no_tile_readable(reasons: Sequence[str]) -> SlideFailed:
    """Return the failure of a slide without a readable tile."""
    return SlideFailed(f"none of {len(reasons):,} tiles can be read: {reasons[0]}")


def refuse_too_many_missing(missing: int, tiles: int, reason: str) -> None:
    """Fail a slide that has more unreadable tiles than `_MAX_MISSING`."""
    if missing > _MAX_MISSING * tiles:
        raise SlideFailed(f"{missing:,} of its {tiles:,} tiles cannot be read, such as: {reason}")


def _missing_tiles(drawn: NDArray[np.int64], read: TilesRead) -> dict[int, str]:
    missing = np.setdiff1d(np.arange(len(drawn)), read.rows)
    return dict(zip(drawn[missing].tolist(), read.reasons, strict=True))  # reasons are in the order of the tiles


def _pinned_memory(shape: tuple[int, ...]) -> TilePixels:
    """Allocate pinned memory, from which a GPU copies asynchronously; pageable memory where none can be pinned."""
    try:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        return plain_memory(shape)


def _as_tensor(pixels: TilePixels) -> Tensor:
    """Return pixels as a tensor; where their memory belongs to a tensor, as rows of that tensor.

    torch reuses freed pinned memory once the copies it knows of have finished. It knows copies from its own tensors,
    not from a tensor that wraps an array.
    """
    owner = pixels
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner[: len(pixels)] if isinstance(owner, Tensor) else torch.from_numpy(pixels)
