"""What a step takes of a card's memory and of time.

A step is followed from moment to moment: weights and optimiser are always there; a graph grows with the tiles in it and
shrinks again while backward goes from the last block to the first, and the gradients grow. The largest sum is the peak.
`Coefficients` has what cannot be counted from the architecture.
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
from tapfm.adaptation.shards import SHARD_ELEMENTS
from tapfm.encoders.blocks import Recompute

Precision = Literal["float32", "bfloat16", "float16"]
GIB = 2**30
RECOMPUTE_LEVELS: tuple[Recompute, ...] = get_args(Recompute)  # from what keeps most to what keeps least
_HOST_BYTES_PER_S = 20e9  # between the card and the machine's memory
_FLOP_PER_S = 100e12  # of the cards that are too small for their optimiser, about


@dataclass(frozen=True)
class Coefficients:
    """What has to be measured.

    nothing, pointwise, mlp: how many times its width a block keeps of each token, besides its MLP's inner values.
    layer_scale: the same of what a LayerScale that learns needs, with "nothing".
    adapters: the same of what adapters give, whose products are kept beside those they are added to.
    gated: how many times its hidden size a gated MLP keeps besides, with "nothing".
    backward: what gradients inside a block take while it is gone through, in values of its input, output and MLP.
    adapters_backward: the same where it has adapters.
    adapters_recomputed: the part of what adapters give that is there besides while a block is computed again.
    own_gradients: the part of its weights' gradients that is there by then.
    update: bytes per parameter of a shard in use while the optimiser steps, besides what it always has.
    overhead_bytes: what is there whatever the encoder: workspaces of matrix products, the aggregator.
    pointwise_cost: what computing norms and activations again takes, against a block's forward.
    filling: tokens x width^2 of a chunk that the card computes in the time in which the host launches it.
    margin, margin_bytes: what is left free: gaps between tensors that no other fits in.
    """

    nothing: float
    pointwise: float
    mlp: float
    layer_scale: float
    adapters: float
    gated: float
    backward: float
    adapters_backward: float
    adapters_recomputed: float
    own_gradients: float
    update: float
    overhead_bytes: float = 0.1 * GIB
    pointwise_cost: float = 0.12
    filling: float = 2.4e10
    margin: float = 0.05
    margin_bytes: float = 0.25 * GIB


# What blocks keep is what autograd was seen to save (tests/adaptation/test_planner.py counts it for the plain form);
# the rest is measured by: python benchmarks/planning.py --fit
# but for adapters, compiled: these two are set by hand, to what one step on an H200 and blocks on a CPU took.
EAGER = Coefficients(
    nothing=8,
    pointwise=8,
    mlp=7,
    layer_scale=2,
    adapters=5,
    gated=1,
    backward=0.55,
    adapters_backward=0.9,
    adapters_recomputed=0,
    own_gradients=1 / 3,
    update=40,
)
COMPILED = Coefficients(
    nothing=8,
    pointwise=6,
    mlp=6,
    layer_scale=1,
    adapters=3,
    gated=0,
    backward=0.55,
    adapters_backward=1.15,
    adapters_recomputed=1,
    own_gradients=1.0,
    update=16,
    pointwise_cost=0.0,  # what is folded away makes up for what is computed again
)


@dataclass(frozen=True)
class PlannerInput:
    """What does not change while plans are compared."""

    shape: EncoderShape
    tiles: int
    precision: Precision
    slides_per_step: int
    backward_tiles: int | None
    coefficients: Coefficients

    @property
    def element_bytes(self) -> int:
        """Of an inner value."""
        return 4 if self.precision == "float32" else 2

    @property
    def low_precision(self) -> bool:
        """Whether weights are in the precision that is computed in, with float32 masters."""
        return self.precision == "bfloat16"


@dataclass(frozen=True)
class OptimiserStorage:
    """How the optimiser keeps what it has."""

    moments: MomentFormat = "float32"
    offload: bool = False

    @property
    def exact(self) -> bool:
        """Whether nothing of it is rounded."""
        return self.moments == "float32"


@dataclass(frozen=True, eq=False)
class TileGraphCost:
    """What one tile takes: bytes kept up to each block, bytes in use while backward is there, passes computed again."""

    mixture: tuple[Recompute, ...]
    until: NDArray[np.float64]
    inner: NDArray[np.float64]
    again: float

    @property
    def tile_bytes(self) -> float:
        """All that is kept of a tile."""
        return float(self.until[-1])


@dataclass(frozen=True)
class ChunkCost:
    """A size of chunks, what is recomputed, and the bytes while the first graph, and a later one, is gone through."""

    size: int
    graph: TileGraphCost
    first_bytes: float
    later_bytes: float  # all gradients are there by then; 0 where there is one graph only

    def graph_bytes(self, kept: int) -> float:
        """Give what is there at most when so many chunks keep their graph; each is let go once it is gone through."""
        one = self.size * self.graph.tile_bytes
        return max(self.first_bytes + (kept - 1) * one, self.later_bytes + max(0, kept - 2) * one)


def compute_graph_cost(question: PlannerInput, mixture: tuple[Recompute, ...]) -> TileGraphCost:
    """Count what one tile keeps, block by block, and what is in use besides while backward goes through each."""
    shape = question.shape
    pixels = 3.0 * shape.tile_px**2 * question.element_bytes if shape.trainable_embedding else 0.0
    learning = mixture[shape.depth - shape.trainable_blocks :]
    return TileGraphCost(
        mixture,
        until=pixels + np.cumsum(_kept_by_block(question, mixture)),
        inner=np.array(_inner_by_block(question, mixture)),
        again=sum(_recompute_cost(question, level) for level in learning) / shape.depth,
    )


class _MemoryAtMoment(NamedTuple):
    """What is there at a moment of a step, in bytes."""

    graph: float
    gradients: float
    working: float

    @property
    def together(self) -> float:
        """The sum."""
        return self.graph + self.gradients + self.working


def compute_chunk_cost(question: PlannerInput, graph: TileGraphCost, size: int) -> ChunkCost:
    """Follow the graph of one chunk, without gradients of others, and with them."""
    first = _highest(question, graph, size, later=False).together
    later = _highest(question, graph, size, later=True).together if _is_accumulated(question, size) else 0.0
    return ChunkCost(size, graph, first, later)


def _highest(question: PlannerInput, graph: TileGraphCost, size: int, *, later: bool) -> _MemoryAtMoment:
    """Find the moment of one graph when most is there: pixels first, then from the last block back to the first."""
    shape, of_parameter = question.shape, _gradient_bytes(question, size)
    size = _with_graph(question, size)
    there = of_parameter * _gradients_there(question, later=later)
    begins = _MemoryAtMoment(0.0, float(there[0]), size * 8.0 * 3 * shape.tile_px**2)  # pixels twice in float32
    if not shape.trainable_blocks:
        return begins
    first = shape.depth - shape.trainable_blocks
    until, inner, there = size * graph.until[first:][::-1], size * graph.inner[first:][::-1], there[1:]
    moment = int(np.argmax(until + there + inner))
    most = _MemoryAtMoment(float(until[moment]), float(there[moment]), float(inner[moment]))
    return max(begins, most, key=lambda station: station.together)


@lru_cache(maxsize=64)
def _gradients_there(question: PlannerInput, *, later: bool) -> NDArray[np.float64]:
    """Count the parameters that have gradients: before backward, and when it is in each block from the last one on."""
    shape = question.shape
    before = shape.trainable if later or question.slides_per_step > 1 else 0  # those of other chunks, or slides
    done = (np.arange(shape.trainable_blocks) + question.coefficients.own_gradients) * shape.block_trainable
    counts: NDArray[np.float64] = np.maximum(before, np.minimum(shape.trainable, np.concatenate([[0.0], done])))
    return counts


def _update_station(question: PlannerInput, form: OptimiserStorage, size: int) -> _MemoryAtMoment:
    """Give what is there while the optimiser steps, shard by shard: no graph any more, all gradients."""
    shape = question.shape
    visiting = 4 + moment_bytes(form.moments) if form.offload else 0.0
    working = min(SHARD_ELEMENTS, shape.trainable) * (question.coefficients.update + visiting)
    return _MemoryAtMoment(0.0, shape.trainable * _gradient_bytes(question, size), working)


def optimiser_step_bytes(question: PlannerInput, form: OptimiserStorage, size: int) -> float:
    """Give all of that together."""
    return _update_station(question, form, size).together


def peak_by_part(question: PlannerInput, form: OptimiserStorage, way: ChunkCost, kept: int) -> dict[str, float]:
    """Give what is there at the moment when most is there, by what it is."""
    one = way.size * way.graph.tile_bytes
    moments, held = [_highest(question, way.graph, way.size, later=False)], [(kept - 1) * one]
    if _is_accumulated(question, way.size):
        moments.append(_highest(question, way.graph, way.size, later=True))
        held.append(max(0, kept - 2) * one)
    moments = [station._replace(graph=station.graph + more) for station, more in zip(moments, held, strict=True)]
    peak = max(*moments, _update_station(question, form, way.size), key=lambda station: station.together)
    return resident_bytes(question, form) | {
        "gradients": peak.gradients,
        "graph": peak.graph,
        "working": peak.working + question.coefficients.overhead_bytes,
        "tiles and features": tile_bytes(question, way.size),
    }


def resident_bytes(question: PlannerInput, form: OptimiserStorage) -> dict[str, float]:
    """Give what weights and optimiser take all the time."""
    shape = question.shape
    each = bytes_per_parameter(low_precision=question.low_precision, moments=form.moments, offload=form.offload)
    parts = {
        "weights": shape.parameters * each["weights"],
        "master weights": shape.trainable * each["master weights"],
        "moments": shape.trainable * each["moments"],
        # under autocast: the low-precision copies that graphs share
        "weight copies": 2.0 * shape.parameters if question.precision == "float16" else 0.0,
    }
    return {name: size for name, size in parts.items() if size}


def _gradient_bytes(question: PlannerInput, size: int) -> float:
    """Give the bytes of a parameter's gradient."""
    return 2.0 if question.low_precision and not needs_float32_gradients(question, size) else 4.0


def _is_accumulated(question: PlannerInput, size: int) -> bool:
    """Whether an update sums up several backward passes."""
    return question.slides_per_step > 1 or (question.backward_tiles or question.tiles) > size


def _with_graph(question: PlannerInput, size: int) -> int:
    """Give the tiles of a chunk that are gone back through."""
    return min(size, question.backward_tiles or size)


def needs_float32_gradients(question: PlannerInput, size: int) -> bool:
    """Whether gradients are summed up in float32: bfloat16 would lose the small ones of many."""
    return question.low_precision and _is_accumulated(question, size)


def tile_bytes(question: PlannerInput, size: int) -> float:
    """Give the pixels of a chunk, and features of all tiles with their gradients."""
    return 4.0 * 4 * question.tiles * question.shape.feature_size + size * 3 * question.shape.tile_px**2


def _kept_by_block(question: PlannerInput, mixture: tuple[Recompute, ...]) -> list[float]:
    """Give the bytes that each block keeps of one tile until backward has gone through it."""
    shape = question.shape
    frozen = shape.depth - shape.trainable_blocks
    blocks = [
        0.0 if number < frozen else shape.tokens * _token_bytes(question, level) for number, level in enumerate(mixture)
    ]
    if shape.trainable_blocks:
        blocks[-1] = _last_block_bytes(question, mixture[-1])
    return blocks


def _token_bytes(question: PlannerInput, level: Recompute) -> float:
    """Give the bytes that a block keeps of one token."""
    shape, c = question.shape, question.coefficients
    # what is added up from block to block is in float32 under autocast: twice what the other values take
    wide = shape.width * (4 - question.element_bytes) if question.precision == "float16" else 0
    if level == "block":
        return shape.width * question.element_bytes + wide
    sums = 4 * shape.heads + 16  # of each softmax and norm
    if level == "nothing":
        elements = shape.width * (c.nothing + (c.layer_scale if shape.trainable_layer_scale else 0)) + shape.mlp_in
        elements += shape.mlp_hidden * (1 + (c.gated if shape.gated else 0))
    else:
        widths = c.pointwise + c.adapters * shape.has_adapters
        mlp = shape.mlp_in * (1 + shape.has_adapters)
        # with adapters, two products fewer of the MLP's last layer
        less = (c.pointwise - c.mlp) * (1 + shape.has_adapters)
        elements = shape.width * widths + mlp if level == "pointwise" else shape.width * (widths - less)
    return elements * question.element_bytes + sums + 2 * wide


def _last_block_bytes(question: PlannerInput, level: Recompute) -> float:
    """Give the bytes that the last block keeps of one tile: where the CLS token alone goes on, no MLP's."""
    shape = question.shape
    output = 0.0 if shape.cls_only else shape.tokens * _token_bytes(question, "block")  # all of it, for the final norm
    if level == "block":
        return shape.tokens * _token_bytes(question, "block") + output
    keys = 4 * shape.width  # once more in float32, for the raw attention
    attention = 5 * shape.width * question.element_bytes  # its input, the norm's output, queries, keys, values
    return shape.tokens * (keys + (attention if shape.cls_only else _token_bytes(question, "nothing"))) + output


def _inner_by_block(question: PlannerInput, mixture: tuple[Recompute, ...]) -> list[float]:
    """Give the bytes of one tile in use while backward goes through a block: what is recomputed, and gradients."""
    shape, c = question.shape, question.coefficients
    everything = shape.tokens * _token_bytes(question, "nothing")
    of_adapters = (
        c.adapters_recomputed * shape.tokens * question.element_bytes * (c.adapters * shape.width + shape.mlp_in)
    )
    backward = c.adapters_backward if shape.has_adapters else c.backward
    gradients = shape.tokens * question.element_bytes * (2 * shape.width + shape.mlp_in + shape.mlp_hidden)
    again: dict[Recompute, float] = {
        level: max(0.0, everything - shape.tokens * _token_bytes(question, level))
        + (of_adapters if shape.has_adapters and level != "nothing" else 0.0)
        for level in RECOMPUTE_LEVELS
    }
    blocks = [again[level] + backward * gradients for level in mixture]
    if shape.cls_only:  # no MLP of the other tokens, nor its gradients
        gradients = shape.tokens * shape.width * (4 * question.element_bytes + 4)
    of_last = _last_block_bytes(question, RECOMPUTE_LEVELS[0]) - _last_block_bytes(question, mixture[-1])
    return [*blocks[:-1], of_last + backward * gradients]


def count_passes(question: PlannerInput, way: ChunkCost, kept: int) -> float:
    """Give the work per tile, in forward passes."""
    back = question.shape.backward_passes + way.graph.again
    if question.backward_tiles is not None:
        return 1 + (1 + back) * question.backward_tiles / question.tiles
    encoded_twice = max(0, question.tiles - kept * way.size) / question.tiles
    return 1 + back + (encoded_twice if question.shape.trainable else 0.0)


def estimate_cost(question: PlannerInput, form: OptimiserStorage, way: ChunkCost, kept: int) -> float:
    """Give the time per tile, in forward passes: with what small chunks and an offloaded optimiser lose."""
    lost = _offload_passes(question) if form.offload else 0.0
    return count_passes(question, way, kept) * (1 + _loss_of_small_chunks(question, way.size)) + lost


def _recompute_cost(question: PlannerInput, level: Recompute) -> float:
    """Give what computing a block's inner values again takes, against its forward."""
    shape = question.shape
    attention = 4 * shape.width**2 + 2 * shape.tokens * shape.width
    first, last = shape.width * shape.mlp_in, shape.width * shape.mlp_hidden  # the last product is not needed again
    whole = attention + first + last
    products = {"nothing": 0, "pointwise": 0, "mlp": first, "block": attention + first}[level]
    return products / whole + (0 if level == "nothing" else question.coefficients.pointwise_cost)


def _loss_of_small_chunks(question: PlannerInput, size: int) -> float:
    """Give the part by which a chunk takes longer than its share of a large one.

    The host launches a block's kernels in the same time, however many tiles there are; the card waits for that where it
    has computed before, and fills worse a little earlier.
    """
    shape, size = question.shape, _with_graph(question, size)
    launching = question.coefficients.filling / (size * shape.tokens * shape.width**2)
    return max(0.0, launching - 1) + 0.05 * launching


def _offload_passes(question: PlannerInput) -> float:
    """Give the time in which masters and moments go to the card and back, in forward passes per tile."""
    copying_s = 2 * 12 * question.shape.trainable / _HOST_BYTES_PER_S / question.slides_per_step
    return copying_s * _FLOP_PER_S / (question.tiles * question.shape.tile_flop)
