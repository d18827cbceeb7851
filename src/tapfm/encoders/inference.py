"""Encoders for inference: without gradients, in one precision, compiled or captured as a CUDA graph if that is faster.

Every inference (embed, predict, evaluate, validation) encodes tiles with an `InferenceEncoder`.

Large jobs are compiled: this fuses the element-wise operations between matrix products, which are limited by memory
bandwidth, but takes minutes. For small encoders, Python launches kernels more slowly than the GPU runs them, so the
launches are captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor

from tapfm.contracts import EncodedTiles
from tapfm.encoders.float8 import convert_to_float8
from tapfm.encoders.precision import can_compile_on_gpu, cast_weights
from tapfm.encoders.vit import VitEncoder
from tapfm.runtime.device_memory import unify_memory_errors

Precision = Literal["float32", "bfloat16", "float16", "float8"]

# Floating-point operations of a job from which compiling saves time: it makes encoding about a sixth faster, but takes
# minutes. Corresponds to a hundred thousand tiles with a ViT-g, or half a million with a ViT-L.
_COMPILE_FROM_FLOP = 6e16
# Floating-point operations of a batch up to which a CUDA graph saves time: on a large GPU, launching the kernels of a
# ViT-B, for example, takes longer than running them.
_CAPTURE_UP_TO_FLOP = 1e13
_BATCH_FLOP = 6e13  # of a default batch: uses a large GPU fully, and fits into the memory of a small one
SMALLEST_BATCH, _LARGEST_BATCH = 64, 256  # tiles


class InferenceEncoder:
    """An encoder that encodes batches of tiles without gradients, in one precision."""

    def __init__(
        self, encoder: VitEncoder, precision: Precision, *, autocast: torch.dtype | None, capture: bool
    ) -> None:
        self.encoder, self.precision = encoder, precision
        self._autocast, self._flop = autocast, _estimate_flop_per_tile(encoder)
        self._captured: _CapturedGraph | None = None
        self._may_capture = capture and self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.encoder.mean.device

    @torch.no_grad()
    def encode(self, tiles: Tensor, batch: int) -> EncodedTiles:
        """Encode uint8 tiles, `batch` at a time; the host does not wait for the device."""
        captured = self._may_capture and self._flop * batch <= _CAPTURE_UP_TO_FLOP
        parts = []
        for start in range(0, len(tiles), batch):
            part = _copy_to_device(tiles[start : start + batch], self.device)
            parts.append(self._replay(part, batch) if captured else self._run(part))
        return concatenate(parts)

    @unify_memory_errors()
    def _run(self, tiles: Tensor) -> EncodedTiles:
        with torch.autocast(self.device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            encoded: EncodedTiles = self.encoder(tiles)
        return encoded

    def _replay(self, tiles: Tensor, batch: int) -> EncodedTiles:
        if self._captured is None or not self._captured.matches(self.encoder, batch):
            self._captured = None  # frees its memory
            try:
                self._captured = _CapturedGraph(self.encoder, batch, self._run)
            except torch.OutOfMemoryError:
                raise  # the caller retries with a smaller batch
            except RuntimeError:  # an operation of this encoder cannot be captured
                self._may_capture = False
        return self._run(tiles) if self._captured is None else self._captured(tiles)


class _CapturedGraph:
    """The kernel launches of an encoder for a fixed batch size, recorded as one CUDA graph."""

    def __init__(self, encoder: VitEncoder, batch: int, run: Callable[[Tensor], EncodedTiles]) -> None:
        self._addresses = _weight_addresses(encoder)
        device, side = encoder.mean.device, encoder.tile_px
        self._tiles = torch.zeros(batch, 3, side, side, dtype=torch.uint8, device=device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            # Warm up on a side stream, as capturing does: libraries allocate their memory at first use.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run(self._tiles)
            torch.cuda.current_stream().wait_stream(stream)
            # thread_local: the thread that reads tiles may allocate pinned memory during the capture
            with _restore_generator_on_error(device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._encoded = run(self._tiles)

    def matches(self, encoder: VitEncoder, batch: int) -> bool:
        """Return whether it was captured for this batch size and these weights."""
        return len(self._tiles) == batch and self._addresses == _weight_addresses(encoder)

    def __call__(self, tiles: Tensor) -> EncodedTiles:
        """Encode one batch. If it is smaller than the captured batch, the rest of the buffer contains older tiles."""
        self._tiles[: len(tiles)].copy_(tiles, non_blocking=True)
        self._graph.replay()
        return EncodedTiles(*(part[: len(tiles)].clone() for part in self._encoded))


@contextmanager
def _restore_generator_on_error(device: torch.device) -> Iterator[None]:
    """Restore the random generator of the device if capturing fails; it would stay in capture mode otherwise."""
    generator = torch.cuda.default_generators[device.index or 0]
    before = generator.get_state()
    try:
        yield
    except RuntimeError:
        fresh = torch.Generator(device)
        fresh.set_state(before)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise


def prepare_encoder(
    encoder: VitEncoder, precision: Precision = "float32", *, tiles: int = 0, compiled: bool | None = None
) -> InferenceEncoder:
    """Prepare an encoder, in place, for inference on `tiles` tiles in total; it cannot be trained afterwards.

    bfloat16 on a GPU rounds the weights once. float16, and bfloat16 on a CPU, run under autocast, as in training.
    compiled: compile the blocks; None: on a GPU, compile for float8, or if there are enough tiles to save time.
    """
    device = encoder.mean.device
    encoder.eval().requires_grad_(False)
    lowered = precision == "float8" or (precision == "bfloat16" and device.type == "cuda")
    if lowered:
        cast_weights(encoder, torch.bfloat16)
    if precision == "float8":
        convert_to_float8(encoder)
    if compiled is None:
        # without fused kernels, converting to float8 takes longer than its faster products save
        large = tiles * _estimate_flop_per_tile(encoder) >= _COMPILE_FROM_FLOP
        compiled = can_compile_on_gpu(device) and (precision == "float8" or large)
    if compiled:
        encoder.compile_blocks()
    autocast = None if lowered or precision == "float32" else cast(torch.dtype, getattr(torch, precision))
    return InferenceEncoder(encoder, precision, autocast=autocast, capture=True)


def wrap_encoder(encoder: VitEncoder, autocast: torch.dtype | None = None) -> InferenceEncoder:
    """Wrap an encoder for inference without changing it, for example while it is being trained."""
    dtype = autocast or next(encoder.vit.blocks.parameters()).dtype
    return InferenceEncoder(encoder, precision_name(dtype), autocast=autocast, capture=False)


def precision_name(dtype: torch.dtype | None) -> Precision:
    """Return the name of a dtype; None is float32."""
    return "float32" if dtype is None else cast(Precision, str(dtype).removeprefix("torch."))


def _copy_to_device(tiles: Tensor, device: torch.device) -> Tensor:
    """Copy tiles to a GPU asynchronously, through pinned memory; return them unchanged if the device is a CPU."""
    if device.type != "cuda" or tiles.device.type != "cpu":
        return tiles
    return tiles.pin_memory().to(device, non_blocking=True)


def concatenate(parts: Sequence[EncodedTiles]) -> EncodedTiles:
    """Join the parts of a slide."""
    return EncodedTiles(torch.cat([part.z_KD for part in parts]), torch.cat([part.r_K for part in parts]))


def default_batch(encoder: VitEncoder) -> int:
    """Return how many tiles to encode at a time: on a GPU a power of two that depends on the operations per tile."""
    if encoder.mean.device.type == "cpu":
        return SMALLEST_BATCH
    return min(
        max(2 ** round(math.log2(_BATCH_FLOP / _estimate_flop_per_tile(encoder))), SMALLEST_BATCH), _LARGEST_BATCH
    )


def _estimate_flop_per_tile(encoder: VitEncoder) -> int:
    """Estimate the operations of a forward pass: two for each weight of the blocks and each token."""
    vit = encoder.vit
    weights = sum(tensor.numel() for tensor in (*vit.blocks.parameters(), *vit.blocks.buffers()))
    return 2 * weights * (int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens))


def _weight_addresses(encoder: VitEncoder) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*encoder.parameters(), *encoder.buffers()))
