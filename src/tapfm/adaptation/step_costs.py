"""Memory and time of a training step, predicted from the architecture of the encoder.

The peak memory is the largest memory use at any time during a step. Weights are always in memory, and so is
the optimiser's state unless it is offloaded. The size of the graph is proportional to the number of tiles. During the
backward pass, from the last block to the first, the graph shrinks and the gradients grow. `step_coefficients.py`
contains the values that cannot be derived from the architecture.

In this module, a *graph* is the activations that autograd saves, and *levels* are the recomputation levels of the
blocks, one per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.moments import MomentFormat, moment_bytes
from tapfm.adaptation.optimisers import bytes_per_parameter
from tapfm.adaptation.shards import MAX_SHARD_ELEMENTS
from tapfm.adaptation.step_coefficients import Coefficients
from tapfm.encoders.blocks import Recompute

Precision = Literal["float32", "bfloat16", "float16"]
GIB = 2**30
RECOMPUTE_LEVELS: tuple[Recompute, ...] = get_args(Recompute)  # in descending order of memory
_HOST_BYTES_PER_S = 20e9  # copies between GPU and host memory
_FLOP_PER_S = 100e12  # approximate speed of GPUs whose memory is too small for the optimiser


@dataclass(frozen=True)
class PlannerInput:
    """Inputs of the planner, which are the same for all plans that it compares."""

    shape: EncoderShape
    tiles: int
    precision: Precision
    slides_per_step: int
    backward_tiles: int | None
    coefficients: Coefficients

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation value."""
        return 4 if self.precision == "float32" else 2

    @property
    def low_precision(self) -> bool:
        """Whether the weights are in bfloat16, with float32 master weights."""
        return self.precision == "bfloat16"


@dataclass(frozen=True)
class OptimiserStorage:
    """Storage format and place of the optimiser's state."""

    moments: MomentFormat = "float32"
    offload: bool = False

    @property
    def exact(self) -> bool:
        """Whether the moments are stored without rounding."""
        return self.moments == "float32"


@dataclass(frozen=True, eq=False)
class TileGraphCost:
    """Memory of the graph of one tile, and the work of recomputation.

    saved_bytes: activations saved by the blocks up to each block, cumulative.
    temporary_bytes: additional memory while the backward pass is in each block.
    recompute_passes: work of recomputation, in forward passes.
    """

    levels: tuple[Recompute, ...]
    saved_bytes: NDArray[np.float64]
    temporary_bytes: NDArray[np.float64]
    recompute_passes: float

    @property
    def graph_bytes(self) -> float:
        """Size of the whole graph of a tile."""
        return float(self.saved_bytes[-1])


@dataclass(frozen=True)
class ChunkCost:
    """Memory of the backward pass for one chunk size."""

    size: int  # tiles
    tile: TileGraphCost
    first_peak_bytes: float  # in the backward pass of the first graph
    later_peak_bytes: float  # in the backward pass of a later graph, with all gradients; 0 if there is one graph

    def peak_bytes(self, graphs_kept: int) -> float:
        """Return the peak if `graphs_kept` chunks keep their graph. Each graph is freed after its backward pass."""
        graph_bytes = self.size * self.tile.graph_bytes
        first = self.first_peak_bytes + (graphs_kept - 1) * graph_bytes
        return max(first, self.later_peak_bytes + max(0, graphs_kept - 2) * graph_bytes)


def compute_graph_cost(inputs: PlannerInput, levels: tuple[Recompute, ...]) -> TileGraphCost:
    """Return the memory of one tile's graph, and the work of recomputation, for these levels."""
    shape = inputs.shape
    pixels = 3.0 * shape.tile_px**2 * inputs.element_bytes if shape.trainable_embedding else 0.0
    trainable_levels = levels[shape.depth - shape.trainable_blocks :]
    return TileGraphCost(
        levels,
        saved_bytes=pixels + np.cumsum(_saved_bytes_by_block(inputs, levels)),
        temporary_bytes=np.array(_temporary_bytes_by_block(inputs, levels)),
        recompute_passes=sum(_recompute_cost(inputs, level) for level in trainable_levels) / shape.depth,
    )


class _MemoryUse(NamedTuple):
    """Memory in use at one point in time of a step, in bytes, without weights and optimiser."""

    graph: float
    gradients: float
    temporary: float

    @property
    def total(self) -> float:
        return self.graph + self.gradients + self.temporary


def compute_chunk_cost(inputs: PlannerInput, tile: TileGraphCost, size: int) -> ChunkCost:
    """Return the memory of the backward pass for chunks of `size` tiles."""
    first_peak_bytes = _find_backward_peak(inputs, tile, size, is_first_graph=True).total
    later_peak_bytes = 0.0
    if _accumulates_gradients(inputs, size):
        later_peak_bytes = _find_backward_peak(inputs, tile, size, is_first_graph=False).total
    return ChunkCost(size, tile, first_peak_bytes, later_peak_bytes)


def _find_backward_peak(inputs: PlannerInput, tile: TileGraphCost, size: int, *, is_first_graph: bool) -> _MemoryUse:
    """Return the largest memory use: while pixels are normalised, or in the backward pass of one of the blocks."""
    shape, parameter_bytes = inputs.shape, _gradient_bytes(inputs, size)
    size = _count_backward_tiles(inputs, size)
    gradients = parameter_bytes * _count_parameters_with_gradient(inputs, is_first_graph=is_first_graph)
    start = _MemoryUse(0.0, float(gradients[0]), size * 8.0 * 3 * shape.tile_px**2)  # pixels twice in float32
    if not shape.trainable_blocks:
        return start
    first_block = shape.depth - shape.trainable_blocks
    graph, temporary = size * tile.saved_bytes[first_block:][::-1], size * tile.temporary_bytes[first_block:][::-1]
    gradients = gradients[1:]
    peak = int(np.argmax(graph + gradients + temporary))
    backward = _MemoryUse(float(graph[peak]), float(gradients[peak]), float(temporary[peak]))
    return max(start, backward, key=lambda use: use.total)


@lru_cache(maxsize=64)
def _count_parameters_with_gradient(inputs: PlannerInput, *, is_first_graph: bool) -> NDArray[np.float64]:
    """Return how many parameters have a gradient: before the backward pass, then in each block, the last block first.

    After the first graph, all parameters already have gradients, from other chunks or slides.
    """
    shape = inputs.shape
    before = 0 if is_first_graph and inputs.slides_per_step == 1 else shape.trainable_parameters
    done = (np.arange(shape.trainable_blocks) + inputs.coefficients.own_gradients) * shape.block_trainable_parameters
    after = np.minimum(shape.trainable_parameters, np.concatenate([[0.0], done]))
    counts: NDArray[np.float64] = np.maximum(before, after)
    return counts


def _compute_update_memory(inputs: PlannerInput, storage: OptimiserStorage, size: int) -> _MemoryUse:
    """Return the memory during the optimiser's update of one shard: all gradients, but no graph."""
    shape = inputs.shape
    copied_bytes = 4 + moment_bytes(storage.moments) if storage.offload else 0.0  # an offloaded shard on the GPU
    temporary = min(MAX_SHARD_ELEMENTS, shape.trainable_parameters) * (inputs.coefficients.update + copied_bytes)
    return _MemoryUse(0.0, shape.trainable_parameters * _gradient_bytes(inputs, size), temporary)


def compute_update_bytes(inputs: PlannerInput, storage: OptimiserStorage, size: int) -> float:
    """Return the memory during the optimiser's update, without weights and the optimiser's state."""
    return _compute_update_memory(inputs, storage, size).total


def split_peak_memory(
    inputs: PlannerInput, storage: OptimiserStorage, chunk: ChunkCost, graphs_kept: int
) -> dict[str, float]:
    """Return the memory at the peak of the step, by part."""
    graph_bytes = chunk.size * chunk.tile.graph_bytes
    peak = _find_backward_peak(inputs, chunk.tile, chunk.size, is_first_graph=True)
    peaks = [peak._replace(graph=peak.graph + (graphs_kept - 1) * graph_bytes)]
    if _accumulates_gradients(inputs, chunk.size):
        peak = _find_backward_peak(inputs, chunk.tile, chunk.size, is_first_graph=False)
        peaks.append(peak._replace(graph=peak.graph + max(0, graphs_kept - 2) * graph_bytes))
    peak = max(*peaks, _compute_update_memory(inputs, storage, chunk.size), key=lambda use: use.total)
    return compute_resident_bytes(inputs, storage) | {
        "gradients": peak.gradients,
        "graph": peak.graph,
        "temporary": peak.temporary + inputs.coefficients.overhead_bytes,
        "tiles and features": compute_tile_bytes(inputs, chunk.size),
    }


def compute_resident_bytes(inputs: PlannerInput, storage: OptimiserStorage) -> dict[str, float]:
    """Return the memory of weights and optimiser state, by part."""
    shape = inputs.shape
    each = bytes_per_parameter(low_precision=inputs.low_precision, moments=storage.moments, offload=storage.offload)
    parts = {
        "weights": shape.parameters * each["weights"],
        "master weights": shape.trainable_parameters * each["master weights"],
        "moments": shape.trainable_parameters * each["moments"],
        # under autocast, all graphs share low-precision copies of the weights
        "weight copies": 2.0 * shape.parameters if inputs.precision == "float16" else 0.0,
    }
    return {name: size for name, size in parts.items() if size}


def _gradient_bytes(inputs: PlannerInput, size: int) -> float:
    """Return the bytes of the gradient of one weight, for chunks of `size` tiles."""
    return 2.0 if inputs.low_precision and not needs_float32_gradients(inputs, size) else 4.0


def _accumulates_gradients(inputs: PlannerInput, size: int) -> bool:
    """Return whether one update sums the gradients of several backward passes."""
    return inputs.slides_per_step > 1 or (inputs.backward_tiles or inputs.tiles) > size


def _count_backward_tiles(inputs: PlannerInput, size: int) -> int:
    """Return how many tiles of a chunk take part in the backward pass."""
    return min(size, inputs.backward_tiles or size)


def needs_float32_gradients(inputs: PlannerInput, size: int) -> bool:
    """Return whether gradients are accumulated in float32, because a sum in bfloat16 would lose small values."""
    return inputs.low_precision and _accumulates_gradients(inputs, size)


def compute_tile_bytes(inputs: PlannerInput, size: int) -> float:
    """Return the memory of the pixels of a chunk, and of the features of all tiles and their gradients."""
    return 4.0 * 4 * inputs.tiles * inputs.shape.feature_size + size * 3 * inputs.shape.tile_px**2


def _saved_bytes_by_block(inputs: PlannerInput, levels: tuple[Recompute, ...]) -> list[float]:
    """Return the bytes of activations that each block saves per tile."""
    shape = inputs.shape
    frozen = shape.depth - shape.trainable_blocks
    blocks = [
        0.0 if index < frozen else shape.tokens * _token_bytes(inputs, level) for index, level in enumerate(levels)
    ]
    if shape.trainable_blocks:
        blocks[-1] = _last_block_bytes(inputs, levels[-1])
    return blocks


def _token_bytes(inputs: PlannerInput, level: Recompute) -> float:
    """Return the bytes of activations that a block saves per token."""
    shape, c = inputs.shape, inputs.coefficients
    # under autocast, the residual stream is in float32
    residual = shape.width * (4 - inputs.element_bytes) if inputs.precision == "float16" else 0
    if level == "block":
        return shape.width * inputs.element_bytes + residual
    statistics = 4 * shape.heads + 16  # of softmax and norms
    if level == "nothing":
        elements = (
            shape.width * (c.saved_at_nothing + (c.layer_scale if shape.trainable_layer_scale else 0)) + shape.mlp_in
        )
        elements += shape.mlp_hidden * (1 + (c.gated if shape.gated else 0))
    else:
        widths = c.saved_at_pointwise + c.adapters * shape.has_adapters
        mlp = shape.mlp_in * (1 + shape.has_adapters)
        # level "mlp" does not save the output of the MLP's last layer, or of its adapter
        less = (c.saved_at_pointwise - c.saved_at_mlp) * (1 + shape.has_adapters)
        elements = shape.width * widths + mlp if level == "pointwise" else shape.width * (widths - less)
    return elements * inputs.element_bytes + statistics + 2 * residual


def _last_block_bytes(inputs: PlannerInput, level: Recompute) -> float:
    """Return the bytes of activations that the last block saves per tile.

    If only the CLS token is used, the activations of its MLP are negligible and not counted.
    """
    shape = inputs.shape
    output = 0.0 if shape.cls_only else shape.tokens * _token_bytes(inputs, "block")  # input of the final norm
    if level == "block":
        return shape.tokens * _token_bytes(inputs, "block") + output
    keys = 4 * shape.width  # a float32 copy, for the raw attention
    attention = 5 * shape.width * inputs.element_bytes  # its input, the norm's output, queries, keys, values
    return shape.tokens * (keys + (attention if shape.cls_only else _token_bytes(inputs, "nothing"))) + output


def _temporary_bytes_by_block(inputs: PlannerInput, levels: tuple[Recompute, ...]) -> list[float]:
    """Return the temporary memory of one tile in each block's backward pass: recomputed activations and gradients."""
    shape, c = inputs.shape, inputs.coefficients
    all_activations = shape.tokens * _token_bytes(inputs, "nothing")
    adapter_bytes = (
        c.adapters_recomputed * shape.tokens * inputs.element_bytes * (c.adapters * shape.width + shape.mlp_in)
    )
    backward = c.adapters_backward if shape.has_adapters else c.backward
    gradients = shape.tokens * inputs.element_bytes * (2 * shape.width + shape.mlp_in + shape.mlp_hidden)
    recomputed: dict[Recompute, float] = {
        level: max(0.0, all_activations - shape.tokens * _token_bytes(inputs, level))
        + (adapter_bytes if shape.has_adapters and level != "nothing" else 0.0)
        for level in RECOMPUTE_LEVELS
    }
    blocks = [recomputed[level] + backward * gradients for level in levels]
    if shape.cls_only:  # the MLP processes only the CLS token
        gradients = shape.tokens * shape.width * (4 * inputs.element_bytes + 4)
    recomputed_in_last = _last_block_bytes(inputs, RECOMPUTE_LEVELS[0]) - _last_block_bytes(inputs, levels[-1])
    return [*blocks[:-1], recomputed_in_last + backward * gradients]


def count_passes(inputs: PlannerInput, chunk: ChunkCost, graphs_kept: int) -> float:
    """Return the work per tile, in forward passes."""
    backward = inputs.shape.backward_passes + chunk.tile.recompute_passes
    if inputs.backward_tiles is not None:
        return 1 + (1 + backward) * inputs.backward_tiles / inputs.tiles
    encoded_twice = max(0, inputs.tiles - graphs_kept * chunk.size) / inputs.tiles
    return 1 + backward + (encoded_twice if inputs.shape.trainable_parameters else 0.0)


def estimate_cost(inputs: PlannerInput, storage: OptimiserStorage, chunk: ChunkCost, graphs_kept: int) -> float:
    """Return the time per tile, in forward passes: the work, and the overhead of small chunks and offloading."""
    offload_cost = _offload_cost(inputs) if storage.offload else 0.0
    return count_passes(inputs, chunk, graphs_kept) * (1 + _small_chunk_overhead(inputs, chunk.size)) + offload_cost


def _recompute_cost(inputs: PlannerInput, level: Recompute) -> float:
    """Return the work of recomputing a block's activations, as a fraction of its forward pass."""
    shape = inputs.shape
    attention = 4 * shape.width**2 + 2 * shape.tokens * shape.width
    first, last = shape.width * shape.mlp_in, shape.width * shape.mlp_hidden  # the last product is never recomputed
    whole = attention + first + last
    products = {"nothing": 0, "pointwise": 0, "mlp": first, "block": attention + first}[level]
    return products / whole + (0 if level == "nothing" else inputs.coefficients.pointwise_cost)


def _small_chunk_overhead(inputs: PlannerInput, size: int) -> float:
    """Return the additional time per tile of small chunks, as a fraction.

    Launching the kernels of a block takes the same time for any number of tiles. With very small chunks, the GPU waits
    for the next launch. With slightly larger chunks, it does not wait, but is not fully used.
    """
    shape, size = inputs.shape, _count_backward_tiles(inputs, size)
    launch_fraction = inputs.coefficients.launch_bound_size / (size * shape.tokens * shape.width**2)
    return max(0.0, launch_fraction - 1) + 0.05 * launch_fraction


def _offload_cost(inputs: PlannerInput) -> float:
    """Return the time of copying master weights and moments to the GPU and back, in forward passes per tile."""
    copy_s = 2 * 12 * inputs.shape.trainable_parameters / _HOST_BYTES_PER_S / inputs.slides_per_step
    return copy_s * _FLOP_PER_S / (inputs.tiles * inputs.shape.tile_flop)
