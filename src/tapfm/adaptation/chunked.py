"""Encode a bag piece by piece and back-propagate piece by piece: activation memory that does not grow with K.

Once the gradients at the tiles are known, L_PFM (eq. 7) is a sum over tiles. So the bag is first encoded in chunks,
mostly without a graph; `two_graph.py` takes the gradients at z and r; then chunk after chunk is encoded again, with a
graph, and back-propagated. The gradient is the same as with one graph over the whole bag, for one more forward pass.

    one pass   Chunking()                        one chunk, its graph kept: every tile encoded once, memory grows with K
    chunked    Chunking(tiles=64)                memory of 64 tiles; all but the first chunk are encoded twice
    hybrid     Chunking(tiles=64, keep="fit")    as many graphs kept as fit into the GPU, only the rest encoded twice
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tapfm.contracts import Encoded, TileEncoder
from tapfm.errors import SettingError, TileError


@dataclass(frozen=True)
class Chunking:
    """How a bag goes through the encoder.

    tiles: how many at once; None: all of them.
    keep: how many chunks keep their graph from the first pass. 1 costs nothing: the second pass has one graph at a
        time as well. "fit": as many as the GPU's free memory holds; 1 where that cannot be asked (CPU).
    """

    tiles: int | None = None
    keep: int | Literal["fit"] = 1

    def __post_init__(self) -> None:
        if self.tiles is not None and (not isinstance(self.tiles, int) or self.tiles < 1):
            raise SettingError(f"A chunk needs a whole number of tiles; got {self.tiles}.", hint="A usual value is 64.")
        if self.keep != "fit" and (not isinstance(self.keep, int) or self.keep < 0):
            raise SettingError(
                f"keep must be a number of chunks or 'fit'; got {self.keep!r}.", hint="The default is 1."
            )


class EncodedBag:
    """Features and raw attentions of a whole bag, detached, and the way back into the encoder."""

    def __init__(
        self, encoder: TileEncoder, tiles_K3hw: Tensor, chunking: Chunking, compute_dtype: torch.dtype | None
    ) -> None:
        self._encoder, self._tiles_K3hw, self._compute_dtype = encoder, tiles_K3hw, compute_dtype
        parameters = [parameter for _, parameter in encoder.named_parameters()]
        self._device = parameters[0].device
        self._trainable = any(parameter.requires_grad for parameter in parameters)
        self._kept: list[tuple[slice, Encoded]] = []
        self._released: list[tuple[slice, RandomState]] = []

        if len(tiles_K3hw) == 0:
            raise TileError("The slide has no tiles.", hint="Leave it out, or look at its tissue mask.")
        # Copies of weights that the caller's own autocast, if any, has cached are older than the last update.
        torch.clear_autocast_cache()
        size = chunking.tiles or len(tiles_K3hw)
        rows = [slice(start, start + size) for start in range(0, len(tiles_K3hw), size)]
        room = GraphRoom(self._device, chunking.keep, parameters)
        # One autocast for all kept graphs: they share the low-precision copies of the weights.
        with self._precision():
            while rows and room.for_another_graph():
                self._kept.append((rows[0], encoder(tiles_K3hw[rows.pop(0)])))
                room.measure()
        without_graph: list[Encoded] = []
        for chunk in rows:
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

    def backward(self, loss_of_rows: Callable[[Encoded, slice], Tensor]) -> None:
        """Back-propagate a loss that is a sum over tiles into the encoder's .grad, freeing each graph after use."""
        if not self._trainable:  # a fixed encoder
            return
        while self._kept:
            chunk, encoded = self._kept.pop()
            self._backward(loss_of_rows(encoded, chunk))
            del encoded
        for chunk, random_state in self._released:
            with random_state.replayed(), self._precision():
                encoded = self._encoder(self._tiles_K3hw[chunk])
            self._backward(loss_of_rows(encoded, chunk))
            del encoded

    def _backward(self, loss: Tensor) -> None:
        # Out of any outer autocast, which would run the float32 parts of the graph backward in low precision.
        with torch.autocast(self._device.type, enabled=False):
            torch.autograd.backward(loss)

    def _precision(self, *, cache: bool = True) -> torch.autocast:
        dtype = self._compute_dtype
        return torch.autocast(
            self._device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=cache
        )


class GraphRoom:
    """Decides whether one more chunk may keep its graph."""

    def __init__(self, device: torch.device, keep: int | Literal["fit"], parameters: list[torch.nn.Parameter]) -> None:
        self._device, self._kept, self._cost = device, 0, 0
        self._limit = keep if keep != "fit" or can_ask_for_memory(device) else 1
        # Gradients that backward will allocate while the graphs are there.
        self._pending = sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
        self._before = allocated_bytes(device)

    def for_another_graph(self) -> bool:
        """Is there room for it?"""
        if self._limit != "fit":
            return self._kept < self._limit
        if self._kept == 0:
            return True
        # What backward needs besides: a part of a graph, or, where blocks are recomputed, a block's worth.
        reserve = 0.25 * self._cost + 0.05 * total_bytes(self._device)
        return free_bytes(self._device) - self._pending > self._cost + reserve

    def measure(self) -> None:
        """Learn what the graph just kept has cost."""
        after = allocated_bytes(self._device)
        self._cost, self._before = max(self._cost, after - self._before), after
        self._kept += 1


def can_ask_for_memory(device: torch.device) -> bool:
    """Only CUDA tells what is free and what a graph takes."""
    return device.type == "cuda"


def allocated_bytes(device: torch.device) -> int:
    """Bytes in tensors on the device."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def total_bytes(device: torch.device) -> int:
    """Bytes the device has."""
    return torch.cuda.mem_get_info(device)[1]


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors can take: what the driver has left and what the allocator holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class RandomState:
    """The generators' state (CPU, CUDA) before a chunk, so that its second encoding draws the same dropout masks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._cpu_state = torch.get_rng_state()
        self._cuda_state = torch.cuda.get_rng_state(device) if self._cuda else None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw as then; afterwards go on as if nothing had been drawn."""
        with torch.random.fork_rng([self._cuda] if self._cuda else []):
            torch.set_rng_state(self._cpu_state)
            if self._cuda and self._cuda_state is not None:
                torch.cuda.set_rng_state(self._cuda_state, self._cuda)
            yield
