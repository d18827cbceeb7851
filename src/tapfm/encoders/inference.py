"""An encoder made ready to look: no graph, one precision, compiled or captured where that is worth its while.

Everything that only looks at tiles (predict, embed, evaluate) gets its encoder from here. Validation within a training
run uses the encoder that is being trained.

Two things take time besides the arithmetic. What a block does between its products moves memory; compiling fuses it,
but compiling itself takes a while, so that it is for much work. And each operation is launched by Python: a small
encoder computes faster than it is launched. Its launches are recorded once as a CUDA graph and replayed for each batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor

from tapfm.contracts import Encoded
from tapfm.device_memory import one_memory_error
from tapfm.encoders.float8 import use_float8
from tapfm.encoders.precision import can_compile, lower
from tapfm.encoders.vit import VitEncoder

Precision = Literal["float32", "bfloat16", "float16", "float8"]

# Of all tiles together: what compiling wins, about a sixth of the time, has to be more than what it takes. A large GPU
# needs some minutes for this much; it is a hundred thousand tiles of a ViT-g, or half a million of a ViT-L.
COMPILE_FROM_FLOP = 6e16
# Of one batch: below it launching takes longer than a large GPU takes to compute; a batch of a ViT-B is still below.
CAPTURE_UP_TO_FLOP = 1e13
BATCH_FLOP = 6e13  # of one batch: enough rows for a large GPU to be full, few enough for a small one's memory
BATCHES = (64, 256)  # the fewest and the most tiles at a time


class Looking:
    """An encoder that looks at batches of tiles, in a precision that it was made ready for."""

    def __init__(self, encoder: VitEncoder, precision: Precision, autocast: torch.dtype | None, work_flop: int) -> None:
        self.encoder, self.precision = encoder, precision
        self._autocast, self._work_flop = autocast, work_flop
        self._captured: Captured | None = None
        self._may_capture = self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.encoder.mean.device

    def encode(self, tiles: Tensor, chunk: int) -> Encoded:
        """Encode uint8 tiles, `chunk` at a time."""
        if self._may_capture and self._work_flop * chunk <= CAPTURE_UP_TO_FLOP:
            return in_batches(lambda batch: self._replayed(batch, chunk), tiles, chunk, self.device)
        return in_batches(self._plainly, tiles, chunk, self.device)

    def _plainly(self, tiles: Tensor) -> Encoded:
        return plainly(self.encoder, tiles, self._autocast)

    @torch.no_grad()
    def _replayed(self, tiles: Tensor, chunk: int) -> Encoded:
        if self._captured is None or not self._captured.is_of(self.encoder, chunk):
            self._captured = None  # its memory is free for the next one
            try:
                self._captured = Captured(self.encoder, chunk, self._plainly)
            except torch.OutOfMemoryError:
                raise  # a smaller batch may do
            except RuntimeError:  # something in this encoder cannot be recorded
                self._may_capture = False
        return self._plainly(tiles) if self._captured is None else self._captured(tiles)


class Captured:
    """The launches of an encoder for a fixed number of tiles, recorded as one CUDA graph."""

    def __init__(self, encoder: VitEncoder, batch: int, run: Callable[[Tensor], Encoded]) -> None:
        self._where = places_of_weights(encoder)
        device, side = encoder.mean.device, encoder.tile_px
        self._tiles = torch.zeros(batch, 3, side, side, dtype=torch.uint8, device=device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            # Once beforehand, on another stream as recording is: libraries take their memory at first use.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run(self._tiles)
            torch.cuda.current_stream().wait_stream(stream)
            # meanwhile the thread that reads tiles may take pinned memory
            with unharmed_generator(device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._encoded = run(self._tiles)

    def is_of(self, encoder: VitEncoder, batch: int) -> bool:
        """Say whether it was recorded for this batch, and the weights lie where they lay."""
        return len(self._tiles) == batch and self._where == places_of_weights(encoder)

    def __call__(self, tiles: Tensor) -> Encoded:
        """Encode as many tiles as it was recorded for, or fewer: places that are left keep older tiles."""
        self._tiles[: len(tiles)].copy_(tiles, non_blocking=True)
        self._graph.replay()
        return Encoded(*(part[: len(tiles)].clone() for part in self._encoded))


@contextmanager
def unharmed_generator(device: torch.device) -> Iterator[None]:
    """Give the device's generator a new state where recording fails: the old one would stay in the recording."""
    generator = torch.cuda.default_generators[device.index or 0]
    before = generator.get_state()
    try:
        yield
    except RuntimeError:
        fresh = torch.Generator(device)
        fresh.set_state(before)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise


@one_memory_error()
def plainly(encoder: VitEncoder, tiles: Tensor, autocast: torch.dtype | None) -> Encoded:
    """Run a batch, under autocast where that is asked for, or else in the precision of the weights."""
    with torch.autocast(encoder.mean.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        encoded: Encoded = encoder(tiles)
    return encoded


def make_ready(
    encoder: VitEncoder, precision: Precision = "float32", *, tiles: int = 0, compiled: bool | None = None
) -> Looking:
    """Make an encoder ready, in place, to look at so many `tiles`; `compiled` decides what their number would.

    bfloat16 on a GPU rounds the weights once. float16, and bfloat16 on a CPU, run under autocast, as in training.
    """
    device, flop = encoder.mean.device, flop_per_tile(encoder)
    encoder.eval().requires_grad_(False)
    lowered = precision == "float8" or (precision == "bfloat16" and device.type == "cuda")
    if lowered:
        lower(encoder, torch.bfloat16)
    if precision == "float8":
        use_float8(encoder)
    if compiled is None:
        # float8 is rounded to between products: without fusing, that would take more than the products win
        compiled = can_compile(device) and (precision == "float8" or tiles * flop >= COMPILE_FROM_FLOP)
    if compiled:
        encoder.compile_blocks()
    autocast = None if lowered or precision == "float32" else dtype_of(precision)
    return Looking(encoder, precision, autocast, flop)


def dtype_of(precision: Precision) -> torch.dtype:
    """Give the type that most of an encoder computes in."""
    return torch.bfloat16 if precision == "float8" else cast(torch.dtype, getattr(torch, precision))


def name_of(dtype: torch.dtype | None) -> Precision:
    """Name the type to compute in; None is float32."""
    return "float32" if dtype is None else cast(Precision, str(dtype).removeprefix("torch."))


@torch.no_grad()
def in_batches(run: Callable[[Tensor], Encoded], tiles: Tensor, chunk: int, device: torch.device) -> Encoded:
    """Run tiles `chunk` at a time, without waiting for the device: it computes while the next ones are copied."""
    batches = (tiles[start : start + chunk] for start in range(0, len(tiles), chunk))
    return joined([run(on_its_way(batch, device)) for batch in batches])


def on_its_way(tiles: Tensor, device: torch.device) -> Tensor:
    """Copy tiles to a GPU without waiting for it: from memory that the system may move, a copy would wait its turn."""
    if device.type != "cuda" or tiles.device.type != "cpu":
        return tiles
    return tiles.pin_memory().to(device, non_blocking=True)


def joined(parts: list[Encoded]) -> Encoded:
    """Put the parts of a bag together."""
    return Encoded(torch.cat([part.z_KD for part in parts]), torch.cat([part.r_K for part in parts]))


def usual_batch(encoder: VitEncoder) -> int:
    """Choose how many tiles to encode at a time: on a GPU by their arithmetic, as a power of two."""
    fewest, most = BATCHES
    if encoder.mean.device.type == "cpu":
        return fewest
    return min(max(2 ** round(math.log2(BATCH_FLOP / flop_per_tile(encoder))), fewest), most)


def flop_per_tile(encoder: VitEncoder) -> int:
    """Count the operations of a forward pass, roughly: two for each weight of the blocks and each token."""
    vit = encoder.vit
    weights = sum(tensor.numel() for tensor in (*vit.blocks.parameters(), *vit.blocks.buffers()))
    return 2 * weights * (int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens))


def places_of_weights(encoder: VitEncoder) -> tuple[int, ...]:
    """Say where in memory the weights lie."""
    return tuple(tensor.data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers()))
