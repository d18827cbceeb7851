"""Encode a bag piece by piece and back-propagate piece by piece: activation memory that does not grow with K.

Once the gradients at the tiles are known, L_PFM (eq. 7) is a sum over tiles. So the bag is first encoded in chunks,
mostly without a graph; `two_graph.py` takes the gradients at z and r; then chunk after chunk is encoded again, with a
graph, and back-propagated. The gradient is the same as with one graph over the whole bag, for one more forward pass.

    one pass   Chunking()                  one chunk, its graph kept: every tile encoded once, memory grows with K
    chunked    Chunking(tiles=64)          memory of 64 tiles; all but the first chunk are encoded twice
    hybrid     Chunking(tiles=64, keep=3)  memory of three such chunks, only the others are encoded twice
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tapfm.adaptation.subset import Subset
from tapfm.contracts import EncodedTiles, TileEncoder, Tiles
from tapfm.errors import SettingError, TileError


@dataclass(frozen=True)
class Chunking:
    """How a bag goes through the encoder.

    tiles: how many at once, at most: a bag is cut into chunks of nearly the same size; None: all of them at once.
    keep: how many chunks keep their graph from the first pass. 1 costs nothing: the second pass has one graph at a
        time as well.
    """

    tiles: int | None = None
    keep: int = 1

    def __post_init__(self) -> None:
        if self.tiles is not None and (not isinstance(self.tiles, int) or self.tiles < 1):
            raise SettingError(f"A chunk needs a whole number of tiles; got {self.tiles}.", hint="A usual value is 64.")
        if not isinstance(self.keep, int) or self.keep < 0:
            raise SettingError(f"keep must be a number of chunks; got {self.keep!r}.", hint="The default is 1.")

    def chunks_of(self, count: int) -> list[slice]:
        """Cut a bag into the fewest chunks, of nearly the same size: a last small one would waste a pass."""
        pieces = math.ceil(count / self.tiles) if self.tiles else 1
        ends = [count * piece // pieces for piece in range(pieces + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def halved(self, count: int) -> Chunking | None:
        """Half as many tiles at once, for a bag that did not fit; None where it is one tile already."""
        largest = max(chunk.stop - chunk.start for chunk in self.chunks_of(count))
        return Chunking(math.ceil(largest / 2), min(self.keep, 1)) if largest > 1 else None


class EncodedBag:
    """Features and raw attentions of a whole bag, detached, and the way back into the encoder."""

    def __init__(
        self, encoder: TileEncoder, tiles_K3hw: Tiles, chunking: Chunking, compute_dtype: torch.dtype | None
    ) -> None:
        self._encoder, self._tiles_K3hw, self._compute_dtype = encoder, tiles_K3hw, compute_dtype
        self._chunking = chunking
        parameters = [parameter for _, parameter in encoder.named_parameters()]
        self._device = parameters[0].device
        self._trainable = any(parameter.requires_grad for parameter in parameters)
        self._kept: list[tuple[slice, EncodedTiles]] = []
        self._released: list[tuple[slice, RandomState]] = []

        if len(tiles_K3hw) == 0:
            raise TileError("The slide has no tiles.", hint="Leave it out, or look at its tissue mask.")
        # Copies of weights that the caller's own autocast, if any, has cached are older than the last update.
        torch.clear_autocast_cache()
        chunks = chunking.chunks_of(len(tiles_K3hw))
        # One autocast for all kept graphs: they share the low-precision copies of the weights.
        with self._precision():
            for chunk in chunks[: chunking.keep]:
                self._kept.append((chunk, encoder(tiles_K3hw[chunk])))
        without_graph: list[EncodedTiles] = []
        for chunk in chunks[chunking.keep :]:
            self._released.append((chunk, RandomState(self._device)))
            # Without the cache: within an outer autocast, some versions of torch would use copies made here, which have
            # no graph, again in the second pass.
            with torch.no_grad(), self._precision(cache=False):
                without_graph.append(encoder(tiles_K3hw[chunk]))
        encoded = [encoded for _, encoded in self._kept] + without_graph
        self.z_KD = torch.cat([e.z_KD.detach() for e in encoded])
        self.r_K = torch.cat([e.r_K.detach() for e in encoded])

    @property
    def graphs_kept(self) -> int:
        """How many chunks need no second encoding."""
        return len(self._kept)

    def backward(
        self, loss_of_tiles: Callable[[EncodedTiles, slice | Tensor], Tensor], scale: Tensor | None = None
    ) -> None:
        """Back-propagate the sum of a loss of each tile into the encoder's .grad, freeing each graph after use."""
        if not self._trainable:  # a fixed encoder
            return
        while self._kept:
            chunk, encoded = self._kept.pop()
            self._backward(loss_of_tiles(encoded, chunk).sum(), scale)
            del encoded
        for chunk, random_state in self._released:
            with random_state.replayed(), self._precision():
                encoded = self._encoder(self._tiles_K3hw[chunk])
            self._backward(loss_of_tiles(encoded, chunk).sum(), scale)
            del encoded

    def backward_through(
        self,
        subset: Subset,
        loss_of_tiles: Callable[[EncodedTiles, slice | Tensor], Tensor],
        scale: Tensor | None = None,
    ) -> None:
        """Back-propagate through some tiles, each weighted for those that are left out; dropout draws new masks."""
        self._kept.clear()
        for piece in self._chunking.chunks_of(len(subset.rows)) if self._trainable else []:
            rows = subset.rows[piece]
            with self._precision():
                encoded = self._encoder(self._tiles_K3hw[rows])
            losses_K = loss_of_tiles(encoded, rows.to(self._device, non_blocking=True))
            self._backward((subset.weights[piece] * losses_K).sum(), scale)
            del encoded

    def _backward(self, loss: Tensor, scale: Tensor | None) -> None:
        # Out of any outer autocast, which would run the float32 parts of the graph backward in low precision.
        with torch.autocast(self._device.type, enabled=False):
            torch.autograd.backward(loss if scale is None else loss * scale)

    def _precision(self, *, cache: bool = True) -> torch.autocast:
        dtype = self._compute_dtype
        return torch.autocast(
            self._device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=cache
        )


class RandomState:
    """The generators' state (CPU, CUDA) before a chunk, so that its second encoding draws the same dropout masks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if self._cuda else None

    def put_back(self) -> None:
        """Draw as then from now on."""
        torch.set_rng_state(self._cpu_state)
        if self._cuda and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw as then; afterwards go on as if nothing had been drawn."""
        with torch.random.fork_rng([self._cuda] if self._cuda else []):
            self.put_back()
            yield
