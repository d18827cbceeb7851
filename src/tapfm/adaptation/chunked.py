"""Encode and backpropagate a bag chunk by chunk, so that activation memory does not grow with the number of tiles.

Once the gradients at the tiles are known, L_PFM (eq. 7) is a sum over tiles. So the bag is encoded in two passes:

    1. Encode all chunks, most of them without a graph. `two_graph.py` then computes the gradients at z and r.
    2. Encode the chunks that have no graph a second time, with a graph, and backpropagate each.

The gradient equals that of one graph over the whole bag. The price is a second forward pass for some tiles.

    one pass   Chunking()                         one chunk that keeps its graph; memory grows with K
    chunked    Chunking(tiles=64)                 memory of 64 tiles; all but the first chunk are encoded twice
    hybrid     Chunking(tiles=64, keep_graphs=3)  memory of 192 tiles; only the other chunks are encoded twice
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tapfm.adaptation.subset import TileSubset
from tapfm.contracts import EncodedTiles, TileEncoder, Tiles
from tapfm.errors import SettingError, TileError

# Returns the loss of each encoded tile. The second argument contains the rows of these tiles in the bag.
TileLosses = Callable[[EncodedTiles, slice | Tensor], Tensor]


@dataclass(frozen=True)
class Chunking:
    """How a bag is split for the encoder.

    tiles: maximum number of tiles per chunk. The chunks of a bag have nearly the same size. None: one chunk.
    keep_graphs: number of chunks that keep their graph from the first pass and are encoded only once. 1 needs no
        extra memory, because the second pass has one graph at a time as well.
    """

    tiles: int | None = None
    keep_graphs: int = 1

    def __post_init__(self) -> None:
        if self.tiles is not None and (not isinstance(self.tiles, int) or self.tiles < 1):
            raise SettingError(
                f"The number of tiles per chunk must be an integer of at least 1; got {self.tiles}.",
                hint="A typical value is 64.",
            )
        if not isinstance(self.keep_graphs, int) or self.keep_graphs < 0:
            raise SettingError(
                f"keep_graphs must be an integer of at least 0; got {self.keep_graphs!r}.", hint="The default is 1."
            )

    def split_bag(self, count: int) -> list[slice]:
        """Split `count` tiles into as few chunks as possible, of nearly the same size."""
        chunks = math.ceil(count / self.tiles) if self.tiles else 1
        ends = [count * chunk // chunks for chunk in range(chunks + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def halve(self, count: int) -> Chunking | None:
        """Return a chunking with half as many tiles per chunk for this bag, or None if a chunk is one tile."""
        largest = max(chunk.stop - chunk.start for chunk in self.split_bag(count))
        return Chunking(math.ceil(largest / 2), min(self.keep_graphs, 1)) if largest > 1 else None


class EncodedBag:
    """Detached features and raw attention of a whole bag, with methods to backpropagate into the encoder."""

    def __init__(
        self, encoder: TileEncoder, tiles_K3hw: Tiles, chunking: Chunking, compute_dtype: torch.dtype | None
    ) -> None:
        self._encoder, self._tiles_K3hw, self._compute_dtype = encoder, tiles_K3hw, compute_dtype
        self._chunking = chunking
        parameters = [parameter for _, parameter in encoder.named_parameters()]
        self._device = parameters[0].device
        self._trainable = any(parameter.requires_grad for parameter in parameters)
        self._with_graph: list[tuple[slice, EncodedTiles]] = []
        self._without_graph: list[tuple[slice, RandomState]] = []

        if len(tiles_K3hw) == 0:
            raise TileError("The slide has no tiles.", hint="Exclude it, or check its tissue mask.")
        # The caller may use autocast. Its cached low-precision weights are older than the last update.
        torch.clear_autocast_cache()
        chunks = chunking.split_bag(len(tiles_K3hw))
        # One autocast context for all kept graphs: they share the low-precision copies of the weights.
        with self._autocast():
            for chunk in chunks[: chunking.keep_graphs]:
                self._with_graph.append((chunk, encoder(tiles_K3hw[chunk])))
        encoded_without_graph: list[EncodedTiles] = []
        for chunk in chunks[chunking.keep_graphs :]:
            self._without_graph.append((chunk, RandomState(self._device)))
            # Without the cache: inside an outer autocast, some versions of torch would reuse the weight copies of this
            # pass, which have no graph, in the second pass.
            with torch.no_grad(), self._autocast(cache=False):
                encoded_without_graph.append(encoder(tiles_K3hw[chunk]))
        encoded = [encoded for _, encoded in self._with_graph] + encoded_without_graph
        self.z_KD = torch.cat([e.z_KD.detach() for e in encoded])
        self.r_K = torch.cat([e.r_K.detach() for e in encoded])

    @property
    def graphs_kept(self) -> int:
        """Number of chunks that do not need a second forward pass."""
        return len(self._with_graph)

    def backward(self, compute_losses: TileLosses, scale: Tensor | None = None) -> None:
        """Backpropagate the sum of the tiles' losses into the encoder's .grad. Each graph is freed after use."""
        if not self._trainable:  # a fixed encoder
            return
        while self._with_graph:
            chunk, encoded = self._with_graph.pop()
            self._backward(compute_losses(encoded, chunk).sum(), scale)
            del encoded
        for chunk, random_state in self._without_graph:
            with random_state.replay(), self._autocast():
                encoded = self._encoder(self._tiles_K3hw[chunk])
            self._backward(compute_losses(encoded, chunk).sum(), scale)
            del encoded

    def backward_subset(self, subset: TileSubset, compute_losses: TileLosses, scale: Tensor | None = None) -> None:
        """Backpropagate the weighted losses of a subset of the tiles. Dropout uses new random masks."""
        self._with_graph.clear()
        for chunk in self._chunking.split_bag(len(subset.rows)) if self._trainable else []:
            rows = subset.rows[chunk]
            with self._autocast():
                encoded = self._encoder(self._tiles_K3hw[rows])
            losses_K = compute_losses(encoded, rows.to(self._device, non_blocking=True))
            self._backward((subset.weights[chunk] * losses_K).sum(), scale)
            del encoded

    def _backward(self, loss: Tensor, scale: Tensor | None) -> None:
        # An outer autocast would run the float32 parts of the backward pass in low precision.
        with torch.autocast(self._device.type, enabled=False):
            torch.autograd.backward(loss if scale is None else loss * scale)

    def _autocast(self, *, cache: bool = True) -> torch.autocast:
        dtype = self._compute_dtype
        return torch.autocast(
            self._device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=cache
        )


class RandomState:
    """Snapshot of the CPU and CUDA random state, so that the second forward pass uses the same dropout masks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if self._cuda else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._cuda and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Use the saved state inside the context; the current state continues unchanged after it."""
        with torch.random.fork_rng([self._cuda] if self._cuda else []):
            self.restore()
            yield
