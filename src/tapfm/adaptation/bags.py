"""What a slide is to the trainer: a bag of pixels, or of stored features, for each visit of a plan.

The plan of a run, epoch after epoch with validation between, is known from the start, so that one queue can read ahead
across slides and epochs alike. Draws are addressed by (seed, epoch, slide): they depend on nothing else.
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

from tapfm.contracts import Encoded, Tiles
from tapfm.encoders.features import read_features
from tapfm.errors import TapfmError
from tapfm.model import joined
from tapfm.processes import Crew
from tapfm.tiles.augment import Augmentation, AugmentedTiles
from tapfm.tiles.grid import Positions
from tapfm.tiles.reading import TilePixels, TileRequest, TilesRead, plain_memory
from tapfm.tiles.sampling import draw_tiles
from tapfm.tiles.store import TileSet
from tapfm.tiles.stream import TileStream

PART = 256  # tiles of a slide that are encoded and let go at a time, when it is looked at as a whole
TOLERATED = 0.05  # part of a slide's tiles that may be missing before the slide fails


@dataclass(frozen=True)
class Visit:
    """One look at a slide: `tiles` of it, or all of them."""

    purpose: Literal["train", "look"]
    slide_id: str
    tiles: int | None
    address: tuple[int | str, ...]  # of the draw


@dataclass(frozen=True)
class Bag:
    """What is learnt from: uint8 tiles, or what an encoder said of them."""

    content: Tiles | Encoded
    rows: NDArray[np.int64]  # which of the slide's tiles these are
    missing: Mapping[int, str] = field(default_factory=dict)  # tiles that could not be read, and why
    places: Tensor | None = None  # (K, 2): where they are on the slide, in sides of a tile; None where nobody knows

    @property
    def tiles(self) -> int:
        """How many there are."""
        return len(self.rows)


class SlideFailed(Exception):  # noqa: N818 - caught and counted, never shown
    """A slide that cannot be used in this run."""


class Encodes(Protocol):
    """Encodes tiles, such as a `SlideModel`."""

    def encode(self, tiles: Tensor, chunk: int) -> Encoded:
        """Encode uint8 tiles without a graph, `chunk` at a time."""
        ...


class Bags(Protocol):
    """Gives the bags of a plan, in its order; `waited_s` is the time that was waited for them."""

    @property
    def waited_s(self) -> float:
        """Seconds waited so far."""
        ...

    def begin(self, plan: Iterator[Visit]) -> None:
        """Start reading ahead."""
        ...

    def training_bag(self, visit: Visit) -> Bag:
        """Give the next bag to learn from; SlideFailed when none of it can be read."""
        ...

    def encoded_bag(self, visit: Visit, model: Encodes) -> Bag:
        """Give the next bag as features, to look at."""
        ...

    def tiles_of(self, slide_id: str) -> int:
        """Say how many tiles a slide has, readable or not."""
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
    """Bags read from slides. `compiled`: tiles are augmented by compiled code; `crew`: workers that were hired"""

    def __init__(
        self,
        slides: Mapping[str, SlideTiles],
        *,
        tile_px: int,
        augmentation: Augmentation,
        device: torch.device,
        workers: int,
        ahead_bytes: int,
        chunk: int = PART,
        compiled: bool = False,
        crew: Crew | None = None,
    ) -> None:
        self._slides, self._tile_px, self._augmentation = slides, tile_px, augmentation
        self._device, self._workers, self._ahead_bytes, self._chunk = device, workers, ahead_bytes, chunk
        self._compiled, self._crew = compiled, crew
        self._stream: TileStream | None = None

    @property
    def waited_s(self) -> float:
        """Seconds waited so far."""
        return self._stream.waited_s if self._stream is not None else 0.0

    def begin(self, plan: Iterator[Visit]) -> None:
        """Start reading ahead."""
        self._stream = TileStream(
            self._requests(plan),
            workers=self._workers,
            ahead_bytes=self._ahead_bytes,
            allocate=pinned_memory if self._device.type == "cuda" else plain_memory,
            crew=self._crew,
        )

    def training_bag(self, visit: Visit) -> Bag:
        """Give the next bag to learn from."""
        drawn, read = self._drawn(visit), self._next(visit)
        refuse_empty(len(read.rows), read.reasons)
        content = AugmentedTiles(
            tensor_of(read.pixels),
            self._augmentation,
            *visit.address,
            device=self._device,
            compiled=self._compiled,
        )
        rows = drawn[read.rows]
        return Bag(content, rows, missing_tiles(drawn, read), self._places(visit, rows))

    def encoded_bag(self, visit: Visit, model: Encodes) -> Bag:
        """Encode the next bag part by part: the pixels of a whole slide would not fit into memory."""
        drawn = self._drawn(visit)
        parts: list[Encoded] = []
        rows: list[NDArray[np.int64]] = []
        missing: dict[int, str] = {}
        for start in range(0, len(drawn), PART):
            read = self._next(visit)
            of_part = drawn[start : start + PART]
            rows.append(of_part[read.rows])
            missing |= missing_tiles(of_part, read)
            if len(read.pixels):
                tiles = tensor_of(read.pixels).to(self._device, non_blocking=True)
                parts.append(model.encode(tiles, self._chunk))
        refuse_empty(len(parts), tuple(missing.values()))
        all_rows = np.concatenate(rows)
        return Bag(joined(parts), all_rows, missing, self._places(visit, all_rows))

    def tiles_of(self, slide_id: str) -> int:
        """Say how many tiles a slide has."""
        return len(self._slides[slide_id].tiles)

    def close(self) -> None:
        """Stop reading."""
        if self._stream is not None:
            self._stream.close()

    def _drawn(self, visit: Visit) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return draw_tiles(len(self._slides[visit.slide_id].tiles), visit.tiles, *visit.address)

    def _places(self, visit: Visit, rows: NDArray[np.int64]) -> Tensor:
        tiles = self._slides[visit.slide_id].tiles
        return places_of(tiles.positions[rows], tiles.side_px0)

    def _requests(self, plan: Iterable[Visit]) -> Iterator[TileRequest]:
        for visit in plan:
            slide = self._slides[visit.slide_id]
            positions = slide.tiles.positions[self._drawn(visit)]
            request = TileRequest(visit.slide_id, slide.path, positions, slide.tiles.side_px0, self._tile_px)
            if visit.purpose == "train":
                yield request
            else:
                yield from (request.part(start, start + PART) for start in range(0, len(positions), PART))

    def _next(self, visit: Visit) -> TilesRead:
        assert self._stream is not None
        read = next(self._stream)
        assert read.request.slide_id == visit.slide_id, "the plan was not followed"
        return read


class FeatureBags:
    """Bags of features that were stored once per slide; as many as fit stay in memory."""

    def __init__(self, files: Mapping[str, Path], *, device: torch.device, ahead_bytes: int) -> None:
        self._files, self._device, self._room = files, device, ahead_bytes
        self._kept: dict[str, Bag] = {}
        self.waited_s = 0.0

    def begin(self, plan: Iterator[Visit]) -> None:
        """Nothing to start."""

    def training_bag(self, visit: Visit) -> Bag:
        """Give the features of the drawn tiles."""
        whole = self._read(visit.slide_id)
        assert isinstance(whole.content, Encoded)
        rows = draw_tiles(whole.tiles, visit.tiles, *visit.address)
        index = torch.from_numpy(rows)
        drawn = Encoded(*(part[index].to(self._device) for part in whole.content))
        return Bag(drawn, rows, places=None if whole.places is None else whole.places[index])

    def encoded_bag(self, visit: Visit, model: Encodes) -> Bag:  # noqa: ARG002 - there is nothing to encode
        """Give the features of the drawn tiles."""
        return self.training_bag(visit)

    def tiles_of(self, slide_id: str) -> int:
        """Say how many tiles a slide has."""
        return self._read(slide_id).tiles

    def close(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()

    def _read(self, slide_id: str) -> Bag:
        if slide_id in self._kept:
            return self._kept[slide_id]
        start = time.monotonic()
        try:
            stored = read_features(self._files[slide_id])
        except TapfmError as error:
            raise SlideFailed(error.message) from error
        finally:
            self.waited_s += time.monotonic() - start
        if not len(stored):
            raise SlideFailed(f"{self._files[slide_id]} has no tiles")
        features = torch.from_numpy(stored.features)
        # aggregators that use the attention are refused before, where it is not stored
        attention = torch.zeros(len(stored)) if stored.attention is None else torch.from_numpy(stored.attention)
        places = None if stored.positions is None else places_of(stored.positions, stored.side_px0)
        bag = Bag(Encoded(features, attention), np.arange(len(stored)), places=places)
        if features.nbytes <= self._room:
            self._room -= features.nbytes
            self._kept[slide_id] = bag
        return bag


def pinned_memory(shape: tuple[int, ...]) -> TilePixels:
    """Give memory that a GPU copies from by itself; where the system has none left to lock, any other."""
    try:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        return plain_memory(shape)


def tensor_of(pixels: TilePixels) -> Tensor:
    """Give pixels as a tensor; where their memory is that of a tensor, as rows of that one.

    torch gives pinned memory to the next one as soon as it is let go of, but for copies to a GPU that it knows to be
    under way. It knows of those from tensors of its own, not of one that wraps an array.
    """
    owner = pixels
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner[: len(pixels)] if isinstance(owner, Tensor) else torch.from_numpy(pixels)


def places_of(positions: Positions, side_px0: int | None) -> Tensor:
    """Give positions in sides of a tile; where the side is not known, tiles are taken to lie side by side."""
    if side_px0 is None:
        steps = np.diff(np.sort(positions, axis=0), axis=0)
        side_px0 = int(steps[steps > 0].min(initial=np.iinfo(np.int64).max))
    return torch.from_numpy((positions / side_px0).astype(np.float32))


def missing_tiles(drawn: NDArray[np.int64], read: TilesRead) -> dict[int, str]:
    """Name the tiles that could not be read; reasons come in the order of the tiles."""
    lost = np.setdiff1d(np.arange(len(drawn)), read.rows)
    return dict(zip(drawn[lost].tolist(), read.reasons, strict=True))


def refuse_empty(read: int, reasons: Sequence[str]) -> None:
    """Fail a slide of which nothing came."""
    if not read:
        raise SlideFailed(f"none of {len(reasons):,} tiles can be read: {reasons[0]}")


def refuse_too_many_missing(missing: int, of_tiles: int, reason: str) -> None:
    """Fail a slide that is missing more of its tiles than is tolerated."""
    if missing > TOLERATED * of_tiles:
        raise SlideFailed(f"{missing:,} of its {of_tiles:,} tiles cannot be read, such as: {reason}")
