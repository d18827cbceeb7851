"""Bags of tiles: pixels read from slides, or stored features, for each requested bag.

All requests are known from the start (all epochs of a run with their validation, or the slides of a cohort), so one
queue prefetches pixels across slides and epochs. Stored features are read on request and cached. Which tiles are
sampled depends only on (seed, epoch, slide).
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
from tapfm.tiles.reading import TilePixels, TileReadResult, TileRequest, allocate_array
from tapfm.tiles.sampling import sample_tiles
from tapfm.tiles.store import TileSet
from tapfm.tiles.stream import TileStream

_PART_TILES = 256  # maximum number of tiles in a part of a bag during inference
PREFETCH_BYTES = 2**30  # of prefetched pixels, or of cached features
_MAX_UNREADABLE = 0.05  # fraction of a slide's tiles that may be unreadable before the slide fails


@dataclass(frozen=True)
class BagRequest:
    """A request for `tiles` tiles of a slide, or all of them (None)."""

    purpose: Literal["train", "inference"]  # use `Bags.read` for "train", `Bags.read_parts` for "inference"
    slide_id: str
    tiles: int | None = None
    rng_key: tuple[int | str, ...] = ()  # seeds the random sample, such as (seed, epoch, slide)


@dataclass(frozen=True)
class Bag:
    """Tiles of one slide: uint8 pixels or features."""

    content: Tiles | EncodedTiles
    rows: NDArray[np.int64]  # which of the slide's tiles these are
    unreadable_tiles: Mapping[int, str] = field(default_factory=dict)  # rows of unreadable tiles, with the reason
    coordinates: Tensor | None = None  # (K, 2) on the slide, in units of the tile side; None if unknown

    @property
    def tiles(self) -> int:
        return len(self.rows)


class SlideFailed(Exception):  # noqa: N818 - caught and reported for each slide
    """Raised for a slide that cannot be used, with the stage, the reason and a hint."""

    def __init__(self, reason: str, hint: str = "", stage: Literal["read", "predict"] = "read") -> None:
        super().__init__(reason)
        self.reason, self.hint, self.stage = " ".join(reason.split()), hint, stage


class Bags(Protocol):
    """Protocol of classes that read the requested bags, in order."""

    @property
    def waited_s(self) -> float:
        """Seconds that the caller has waited for tiles."""
        ...

    def start(self, requests: Iterator[BagRequest]) -> None:
        """Start prefetching the bags of these requests."""
        ...

    def read(self, request: BagRequest) -> Bag:
        """Return the complete bag of a request. Requests have to be read in the order given to `start`.

        Raises SlideFailed if none of the tiles can be read.
        """
        ...

    def read_parts(self, request: BagRequest) -> Iterator[Bag]:
        """Yield the bag of a request in parts of bounded size; parts may be empty. The order is that of `start`."""
        ...

    def skip_rest(self) -> None:
        """Discard the unread parts of the current bag, so that the next bag can be read."""
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
    """Bags of pixels in host memory, read from slides by worker processes.

    device: the device that will use the pixels; for a GPU they are in pinned memory.
    pool: workers that are already running.
    """

    def __init__(
        self,
        slides: Mapping[str, SlideTiles],
        *,
        tile_px: int,
        device: torch.device,
        workers: int,
        prefetch_bytes: int,
        pool: WorkerPool | None = None,
    ) -> None:
        self._slides, self._tile_px, self._device = slides, tile_px, device
        self._workers, self._prefetch_bytes, self._pool = workers, prefetch_bytes, pool
        self._stream: TileStream | None = None
        self._parts_left = 0  # of the current bag

    @property
    def waited_s(self) -> float:
        return self._stream.waited_s if self._stream is not None else 0.0

    def start(self, requests: Iterator[BagRequest]) -> None:
        self._stream = TileStream(
            self._iter_part_requests(requests),
            workers=self._workers,
            prefetch_bytes=self._prefetch_bytes,
            allocate=_allocate_pinned if self._device.type == "cuda" else allocate_array,
            pool=self._pool,
        )

    def read(self, request: BagRequest) -> Bag:
        sampled = self._sample_rows(request)
        bag = self._read_next(request, sampled)
        if not bag.tiles:
            raise make_unreadable_error(tuple(bag.unreadable_tiles.values()))
        return bag

    def read_parts(self, request: BagRequest) -> Iterator[Bag]:
        """Yield the next bag in parts, since the pixels of a whole slide may not fit into memory."""
        sampled = self._sample_rows(request)
        starts = range(0, len(sampled), _PART_TILES)
        self._parts_left = len(starts)
        for start in starts:
            self._parts_left -= 1
            yield self._read_next(request, sampled[start : start + _PART_TILES])

    def skip_rest(self) -> None:
        assert self._stream is not None
        for _ in range(self._parts_left):
            next(self._stream)
        self._parts_left = 0

    def tile_count(self, slide_id: str) -> int:
        return len(self._slides[slide_id].tiles)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _sample_rows(self, request: BagRequest) -> NDArray[np.int64]:
        return sample_tiles(len(self._slides[request.slide_id].tiles), request.tiles, *request.rng_key)

    def _iter_part_requests(self, requests: Iterable[BagRequest]) -> Iterator[TileRequest]:
        """Yield the tiles to read: a training bag as one request, other bags in parts of `_PART_TILES` tiles."""
        for request in requests:
            slide = self._slides[request.slide_id]
            positions = slide.tiles.positions[self._sample_rows(request)]
            tile_request = TileRequest(request.slide_id, slide.path, positions, slide.tiles.side_px0, self._tile_px)
            if request.purpose == "train":
                yield tile_request
            else:
                starts = range(0, len(positions), _PART_TILES)
                yield from (tile_request.select(start, start + _PART_TILES) for start in starts)

    def _read_next(self, request: BagRequest, sampled: NDArray[np.int64]) -> Bag:
        assert self._stream is not None
        read = next(self._stream)
        if read.request.slide_id != request.slide_id:
            raise RuntimeError(f"Tiles of {read.request.slide_id} were read instead of {request.slide_id}.")
        pixels = _as_tensor(read.pixels)
        tiles, rows = self._slides[request.slide_id].tiles, sampled[read.rows]
        coordinates = _compute_coordinates(tiles.positions[rows], tiles.side_px0)
        return Bag(pixels, rows, _find_unreadable_tiles(sampled, read), coordinates)


class FeatureBags:
    """Bags of stored features, one file per slide; up to `prefetch_bytes` of features are cached in memory."""

    def __init__(self, files: Mapping[str, Path], *, device: torch.device, prefetch_bytes: int) -> None:
        self._files, self._device, self._free_bytes = files, device, prefetch_bytes
        self._cache: dict[str, Bag] = {}
        self.waited_s = 0.0

    def start(self, requests: Iterator[BagRequest]) -> None:
        """Do nothing: features are read on request."""

    def read(self, request: BagRequest) -> Bag:
        """Return the features of the sampled tiles, on the device."""
        whole = self._read_slide(request.slide_id)
        assert isinstance(whole.content, EncodedTiles)
        rows = sample_tiles(whole.tiles, request.tiles, *request.rng_key)
        index = torch.from_numpy(rows)
        sampled = EncodedTiles(*(part[index].to(self._device) for part in whole.content))
        return Bag(sampled, rows, coordinates=None if whole.coordinates is None else whole.coordinates[index])

    def read_parts(self, request: BagRequest) -> Iterator[Bag]:
        """Yield the complete bag, since the features of a slide fit into memory."""
        yield self.read(request)

    def skip_rest(self) -> None:
        """Do nothing: a bag is one part."""

    def tile_count(self, slide_id: str) -> int:
        return self._read_slide(slide_id).tiles

    def close(self) -> None:
        """Free the cached features."""
        self._cache.clear()

    def _read_slide(self, slide_id: str) -> Bag:
        if slide_id in self._cache:
            return self._cache[slide_id]
        start = time.monotonic()
        try:
            stored = read_features(self._files[slide_id])
        except TapfmError as error:
            raise SlideFailed(error.message, error.hint) from error
        finally:
            self.waited_s += time.monotonic() - start
        if not len(stored):
            raise SlideFailed(
                f"{self._files[slide_id]} has no tiles", "Create the file again, for example with tapfm embed."
            )
        features = torch.from_numpy(stored.features)
        # not used: aggregators that need attention have raised an error before
        attention = torch.zeros(len(stored)) if stored.attention is None else torch.from_numpy(stored.attention)
        coordinates = None if stored.positions is None else _compute_coordinates(stored.positions, stored.side_px0)
        bag = Bag(EncodedTiles(features, attention), np.arange(len(stored)), coordinates=coordinates)
        if features.nbytes <= self._free_bytes:
            self._free_bytes -= features.nbytes
            self._cache[slide_id] = bag
        return bag


def _compute_coordinates(positions: Positions, side_px0: int | None) -> Tensor:
    """Return positions in units of the tile side; if that is unknown, tiles are assumed to be adjacent."""
    if side_px0 is None:
        steps = np.diff(np.sort(positions, axis=0), axis=0)
        side_px0 = int(steps[steps > 0].min(initial=np.iinfo(np.int64).max))
    return torch.from_numpy((positions / side_px0).astype(np.float32))


def make_unreadable_error(reasons: Sequence[str]) -> SlideFailed:
    return SlideFailed(f"none of {len(reasons):,} tiles can be read: {reasons[0]}")


def check_unreadable_tiles(unreadable: int, tiles: int, reason: str) -> None:
    """Raise SlideFailed if more than `_MAX_UNREADABLE` of the tiles are unreadable."""
    if unreadable > _MAX_UNREADABLE * tiles:
        raise SlideFailed(f"{unreadable:,} of its {tiles:,} tiles cannot be read; the first error: {reason}")


def _find_unreadable_tiles(sampled: NDArray[np.int64], read: TileReadResult) -> dict[int, str]:
    unreadable = np.setdiff1d(np.arange(len(sampled)), read.rows)
    return dict(zip(sampled[unreadable].tolist(), read.reasons, strict=True))  # reasons are in the order of the tiles


def _allocate_pinned(shape: tuple[int, ...]) -> TilePixels:
    """Allocate pinned memory for asynchronous copies to a GPU, or pageable memory if pinning fails."""
    try:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        return allocate_array(shape)


def _as_tensor(pixels: TilePixels) -> Tensor:
    """Return pixels as a tensor; if their memory belongs to a tensor, as rows of that tensor.

    torch reuses freed pinned memory after all copies from it have finished. It tracks copies from its own tensors, but
    not from a tensor that wraps an array.
    """
    owner = pixels
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner[: len(pixels)] if isinstance(owner, Tensor) else torch.from_numpy(pixels)
