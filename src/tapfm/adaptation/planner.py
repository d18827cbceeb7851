"""What a step takes of a card's memory, and the fastest way that fits.

A step is followed from moment to moment: weights and optimiser are always there; a graph grows with the tiles in it and
shrinks again while backward goes from the last block to the first, and the gradients grow. The largest sum is the peak.
`Coefficients` has what cannot be counted from the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple, get_args

from tapfm.adaptation.moments import Moments, moment_bytes
from tapfm.adaptation.optimisers import SHARD_ELEMENTS
from tapfm.encoders.adapters import adapted_layers
from tapfm.encoders.blocks import Recompute
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import SettingError

Precision = Literal["float32", "bfloat16", "float16"]
Way = Literal["one-pass", "hybrid", "chunked"]

GIB = 2**30
LEVELS: tuple[Recompute, ...] = get_args(Recompute)  # from what keeps most to what keeps least

# A form that rounds the moments is taken where exact ones do not fit, or make the step so many times as long.
WORTH_EXACTNESS = 1.5
HOST_BYTES_PER_S = 20e9  # between the card and the machine's memory
FLOP_PER_S = 100e12  # of the cards that are too small for their optimiser, about


@dataclass(frozen=True)
class Coefficients:
    """What has to be measured.

    nothing, pointwise, mlp: how many times its width a block keeps of each token, besides its MLP's inner values.
    layer_scale: the same of what a LayerScale that learns needs, with "nothing".
    adapters: the same of what adapters give, whose products are kept beside those they are added to.
    gated: how many times its hidden size a gated MLP keeps besides, with "nothing".
    backward: what gradients inside a block take while it is gone through, in values of its input, output and MLP.
    adapters_backward: the same where it has adapters.
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
    own_gradients: float
    update: float
    overhead_bytes: float = 0.1 * GIB
    pointwise_cost: float = 0.12
    filling: float = 2.4e10
    margin: float = 0.05
    margin_bytes: float = 0.25 * GIB


# What blocks keep is what autograd was seen to save (tests/adaptation/test_planner.py counts it for the plain form);
# the rest is measured by: python benchmarks/planning.py --fit
PLAIN = Coefficients(
    nothing=8,
    pointwise=8,
    mlp=7,
    layer_scale=2,
    adapters=5,
    gated=1,
    backward=0.55,
    adapters_backward=0.9,
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
    adapters_backward=0.55,
    own_gradients=1.0,
    update=16,
    pointwise_cost=0.0,  # what is folded away makes up for what is computed again
)


@dataclass(frozen=True)
class EncoderShape:
    """What memory depends on. Counted from the module, which may be on the meta device, after the scope is applied."""

    depth: int
    width: int
    tokens: int
    heads: int
    mlp_in: int  # outputs of its first layer: both halves of a gated one
    mlp_hidden: int  # inputs of its last layer
    parameters: int
    trainable: int
    block_parameters: int
    block_trainable: int  # of a block that learns
    learning_blocks: int  # the last ones, which gradients go through
    scale_learns: bool  # its LayerScale
    has_adapters: bool
    embedding_learns: bool
    tile_px: int
    feature_size: int
    cls_only: bool  # of the last block only the CLS token is used

    @classmethod
    def of(cls, encoder: VitEncoder) -> EncoderShape:
        """Count."""
        vit = encoder.vit
        blocks = list(vit.blocks)
        last, in_blocks = blocks[-1], {id(p) for block in blocks for p in block.parameters()}
        learning = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        final = {id(p) for p in vit.norm.parameters()}
        before = [p for p in vit.parameters() if id(p) not in in_blocks | final]
        embedding = any(p.requires_grad for p in before)
        first = 0 if embedding else learning.index(True) if any(learning) else len(blocks)
        mlp_in, mlp_hidden = mlp_sizes(last.mlp)
        return cls(
            depth=len(blocks),
            width=int(vit.embed_dim),
            tokens=int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens),
            heads=int(last.attn.num_heads),
            mlp_in=mlp_in,
            mlp_hidden=mlp_hidden,
            parameters=sum(p.numel() for p in encoder.parameters()),
            trainable=sum(p.numel() for p in encoder.parameters() if p.requires_grad),
            block_parameters=sum(p.numel() for p in last.parameters()),
            block_trainable=sum(p.numel() for p in last.parameters() if p.requires_grad),
            learning_blocks=len(blocks) - first,
            scale_learns=any("gamma" in name and p.requires_grad for name, p in last.named_parameters()),
            has_adapters=bool(adapted_layers(encoder)),
            embedding_learns=embedding,
            tile_px=encoder.tile_px,
            feature_size=encoder.feature_size,
            cls_only=encoder.feature == "cls",
        )

    @property
    def gated(self) -> bool:
        """Whether one half of the MLP's inner values multiplies the other."""
        return self.mlp_in > self.mlp_hidden

    @property
    def tile_flop(self) -> float:
        """Operations of a forward pass, a multiplication and an addition being two."""
        matrices = 4 * self.width**2 + self.width * (self.mlp_in + self.mlp_hidden)
        return self.depth * self.tokens * (2 * matrices + 4 * self.tokens * self.width)

    @property
    def backward_passes(self) -> float:
        """What backward takes, in forward passes: the gradients of inner values, and of the weights that learn."""
        weights = min(1.0, self.block_trainable / self.block_parameters)
        return self.learning_blocks / self.depth * (1 + weights)


def mlp_sizes(mlp: Any) -> tuple[int, int]:
    """Give the outputs of an MLP's first layer, and the inputs of its last, whichever way timm's class names them."""
    first = [mlp.fc1] if hasattr(mlp, "fc1") else [mlp.fc1_g, mlp.fc1_x]
    return sum(int(layer.out_features) for layer in first), int(mlp.fc2.in_features)


@dataclass(frozen=True)
class StepPlan:
    """How a bag goes through the encoder, and what that takes."""

    way: Way
    tiles: int
    chunk: int  # tiles in the encoder at once
    kept: int  # chunks that keep their graph and so are encoded once
    recompute: tuple[Recompute, ...]  # one per block
    moments: Moments
    offload: bool
    wide_gradients: bool  # summed in float32, where several backward passes make one update
    parts: Mapping[str, int]  # bytes at the moment of the peak
    passes: float  # per tile, in forward passes: 3 for forward and backward, and what is computed again
    cost: float  # the same, with what small chunks and an offloaded optimiser lose
    backward_tiles: int | None = None

    @property
    def peak_bytes(self) -> int:
        """All that is there at the peak."""
        return sum(self.parts.values())

    @property
    def chunks(self) -> int:
        """How many there are."""
        return math.ceil(self.tiles / self.chunk)


@dataclass(frozen=True)
class Question:
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
    def lowered(self) -> bool:
        """Whether weights are in the precision that is computed in, with float32 masters."""
        return self.precision == "bfloat16"


@dataclass(frozen=True)
class Form:
    """How the optimiser keeps what it has."""

    moments: Moments = "float32"
    offload: bool = False

    @property
    def exact(self) -> bool:
        """Whether nothing of it is rounded."""
        return self.moments == "float32"


@dataclass(frozen=True)
class Graph:
    """What one tile takes: bytes kept up to each block, bytes in use while backward is there, passes computed again."""

    mixture: tuple[Recompute, ...]
    until: tuple[float, ...]
    inner: tuple[float, ...]
    again: float

    @property
    def tile_bytes(self) -> float:
        """All that is kept of a tile."""
        return self.until[-1]


@dataclass(frozen=True)
class Candidate:
    """A size of chunks, what is recomputed, and the bytes while the first graph, and a later one, is gone through."""

    size: int
    graph: Graph
    first_bytes: float
    later_bytes: float  # all gradients are there by then; 0 where there is one graph only

    def graph_bytes(self, kept: int) -> float:
        """Give what is there at most when so many chunks keep their graph; each is let go once it is gone through."""
        one = self.size * self.graph.tile_bytes
        return max(self.first_bytes + (kept - 1) * one, self.later_bytes + max(0, kept - 2) * one)


# In the order of preference: first what gives the numbers of plain AdamW.
FORMS = (Form(), Form(offload=True), Form("bfloat16"), Form("int8"), Form("bfloat16", True), Form("int8", True))


def plan_step(
    shape: EncoderShape,
    *,
    tiles: int,
    free_bytes: int,
    precision: Precision,
    compiled: bool,
    chunk: int | Literal["auto", "all"] = "auto",
    recompute: Recompute | Literal["auto"] = "auto",
    moments: Moments | Literal["auto"] = "auto",
    offload: bool | Literal["auto"] = "auto",
    slides_per_step: int = 1,
    backward_tiles: int | None = None,
    coefficients: Coefficients | None = None,
) -> StepPlan:
    """Choose the fastest way that fits into `free_bytes`, those before the encoder is loaded.

    Of the optimiser's forms the exact ones come first, on the device or in the host's memory, whichever is faster: its
    moments are rounded only where those do not fit, or would make the step 1.5 times as long. Raises `SettingError`
    where nothing fits.
    """
    if tiles < 1:
        raise SettingError(f"A step needs at least one tile; got {tiles}.")
    chosen = coefficients or (COMPILED if compiled else PLAIN)
    subset = None if backward_tiles is None or backward_tiles >= tiles else backward_tiles
    question = Question(shape, tiles, precision, slides_per_step, subset, chosen)
    room = usable_bytes(free_bytes, chosen)
    forms = [f for f in FORMS if moments in ("auto", f.moments) and offload in ("auto", f.offload)]
    if moments == "auto":  # rounded moments that are offloaded besides: only who asks for them gets them
        forms = [f for f in forms if f.exact or not f.offload] or forms
    sizes = [tiles] if chunk == "all" else chunk_sizes(question) if chunk == "auto" else [evened(tiles, chunk)]
    graphs = [graph_of(question, mixture) for mixture in recompute_mixtures(shape, recompute)]
    ways = [candidate(question, graph, size) for size in sizes for graph in graphs]
    best = [plan for form in forms if (plan := best_plan(question, form, ways, room)) is not None]
    if not best:
        least = min(ways, key=lambda way: way.graph_bytes(1))
        smallest = min((evaluate(question, form, least, 1) for form in forms), key=lambda plan: plan.peak_bytes)
        fixed = {"adaptation.chunk": chunk, "adaptation.recompute": recompute, "optimiser.moments": moments}
        raise nothing_fits(question, smallest, free_bytes, fixed | {"machine.offload_optimiser": offload})
    fastest = min(plan.cost for plan in best)
    exact = [plan for plan in best if plan.moments == "float32"]
    # the time of copies is a guess, so that they have to be worth it
    in_order = sorted(exact, key=lambda plan: plan.cost * (1.05 if plan.offload else 1))
    in_order += [plan for plan in best if plan not in exact]
    return next(plan for plan in in_order if plan.cost <= WORTH_EXACTNESS * fastest)


def predict_step(
    shape: EncoderShape,
    *,
    tiles: int,
    precision: Precision,
    compiled: bool,
    chunk: int | None = None,
    kept: int = 1,
    recompute: tuple[Recompute, ...] | Recompute = "nothing",
    moments: Moments = "float32",
    offload: bool = False,
    slides_per_step: int = 1,
    backward_tiles: int | None = None,
    coefficients: Coefficients | None = None,
) -> StepPlan:
    """Say what a way that is settled already takes."""
    chosen = coefficients or (COMPILED if compiled else PLAIN)
    subset = None if backward_tiles is None or backward_tiles >= tiles else backward_tiles
    question = Question(shape, tiles, precision, slides_per_step, subset, chosen)
    levels = (recompute,) * shape.depth if isinstance(recompute, str) else recompute
    size = evened(tiles, chunk or tiles)
    way = candidate(question, graph_of(question, levels), size)
    return evaluate(question, Form(moments, offload), way, min(kept, math.ceil(tiles / size)))


def best_plan(question: Question, form: Form, ways: list[Candidate], room: float) -> StepPlan | None:
    """Choose chunk, graphs kept and what is recomputed, for one form of the optimiser."""
    always = sum(resident_bytes(question, form).values()) + question.coefficients.overhead_bytes
    best: tuple[float, float, Candidate, int] | None = None
    for way in ways:
        kept = most_kept(question, form, way, room - always)
        if kept:
            cost, needed = cost_of(question, form, way, kept), way.graph_bytes(kept)
            if best is None or (cost, needed) < best[:2]:  # equally fast: the one that needs less
                best = (cost, needed, way, kept)
    return None if best is None else evaluate(question, form, best[2], best[3])


def most_kept(question: Question, form: Form, way: Candidate, room: float) -> int:
    """Say how many chunks can keep their graph; 0 where not even one at a time fits."""
    room -= tile_bytes(question, way.size)
    if room < max(way.graph_bytes(1), update_bytes(question, form, way.size)):
        return 0
    one = way.size * way.graph.tile_bytes
    if question.backward_tiles is not None or not one:
        return 1  # which tiles are gone back through is drawn after all are encoded
    first, later = 1 + int((room - way.first_bytes) / one), 2 + int((room - way.later_bytes) / one)
    return min(math.ceil(question.tiles / way.size), first, later)


def evaluate(question: Question, form: Form, way: Candidate, kept: int) -> StepPlan:
    """Say what one way takes."""
    chunks, subset = math.ceil(question.tiles / way.size), question.backward_tiles is not None
    parts = parts_at_peak(question, form, way, kept)
    return StepPlan(
        way="one-pass" if chunks == 1 and not subset else "hybrid" if kept > 1 else "chunked",
        tiles=question.tiles,
        chunk=way.size,
        kept=0 if subset else kept,
        recompute=way.graph.mixture,
        moments=form.moments,
        offload=form.offload,
        wide_gradients=is_wide(question, way.size),
        parts={name: round(size) for name, size in parts.items()},
        passes=passes_of(question, way, kept),
        cost=cost_of(question, form, way, kept),
        backward_tiles=question.backward_tiles,
    )


# What it takes of the memory


def graph_of(question: Question, mixture: tuple[Recompute, ...]) -> Graph:
    """Count what one tile keeps, block by block, and what is in use besides while backward goes through each."""
    shape = question.shape
    pixels = 3.0 * shape.tile_px**2 * question.element_bytes if shape.embedding_learns else 0.0
    kept = accumulate(kept_by_block(question, mixture), initial=pixels)
    learning = mixture[shape.depth - shape.learning_blocks :]
    return Graph(
        mixture,
        until=tuple(kept)[1:],
        inner=tuple(inner_by_block(question, mixture)),
        again=sum(recompute_cost(question, level) for level in learning) / shape.depth,
    )


class Station(NamedTuple):
    """What is there at a moment of a step, in bytes."""

    graph: float
    gradients: float
    working: float

    @property
    def together(self) -> float:
        """The sum."""
        return self.graph + self.gradients + self.working


def candidate(question: Question, graph: Graph, size: int) -> Candidate:
    """Follow the graph of one chunk, without gradients of others, and with them."""
    first = highest(question, graph, size, later=False).together
    later = highest(question, graph, size, later=True).together if is_accumulated(question, size) else 0.0
    return Candidate(size, graph, first, later)


def highest(question: Question, graph: Graph, size: int, *, later: bool) -> Station:
    """Find the moment of one graph when most is there."""
    return max(stations(question, graph, size, later=later), key=lambda station: station.together)


def stations(question: Question, graph: Graph, size: int, *, later: bool) -> Iterator[Station]:
    """Follow a graph: its pixels, and then back from the last block to the first."""
    shape, of_parameter = question.shape, gradient_bytes(question, size)
    size = with_graph(question, size)
    before = shape.trainable if later or question.slides_per_step > 1 else 0  # gradients of other chunks, or slides
    yield Station(0.0, before * of_parameter, size * 8.0 * 3 * shape.tile_px**2)  # twice in float32
    for block in reversed(range(shape.depth - shape.learning_blocks, shape.depth)):
        done = (shape.depth - block - 1 + question.coefficients.own_gradients) * shape.block_trainable
        there = max(before, min(shape.trainable, done))
        yield Station(size * graph.until[block], there * of_parameter, size * graph.inner[block])


def update_station(question: Question, form: Form, size: int) -> Station:
    """Give what is there while the optimiser steps, shard by shard: no graph any more, all gradients."""
    shape = question.shape
    visiting = 4 + moment_bytes(form.moments) if form.offload else 0.0
    working = min(SHARD_ELEMENTS, shape.trainable) * (question.coefficients.update + visiting)
    return Station(0.0, shape.trainable * gradient_bytes(question, size), working)


def update_bytes(question: Question, form: Form, size: int) -> float:
    """Give all of that together."""
    return update_station(question, form, size).together


def parts_at_peak(question: Question, form: Form, way: Candidate, kept: int) -> dict[str, float]:
    """Give what is there at the moment when most is there, by what it is."""
    one = way.size * way.graph.tile_bytes
    moments, held = [highest(question, way.graph, way.size, later=False)], [(kept - 1) * one]
    if is_accumulated(question, way.size):
        moments.append(highest(question, way.graph, way.size, later=True))
        held.append(max(0, kept - 2) * one)
    moments = [station._replace(graph=station.graph + more) for station, more in zip(moments, held, strict=True)]
    peak = max(*moments, update_station(question, form, way.size), key=lambda station: station.together)
    return resident_bytes(question, form) | {
        "gradients": peak.gradients,
        "graph": peak.graph,
        "working": peak.working + question.coefficients.overhead_bytes,
        "tiles and features": tile_bytes(question, way.size),
    }


def resident_bytes(question: Question, form: Form) -> dict[str, float]:
    """Give what weights and optimiser take all the time."""
    shape = question.shape
    on_device = 0 if form.offload else shape.trainable
    parts = {
        "weights": shape.parameters * (2.0 if question.lowered else 4.0),
        "masters": 4.0 * on_device if question.lowered else 0.0,
        "moments": on_device * moment_bytes(form.moments),
        # under autocast: the low-precision copies that graphs share
        "weight copies": 2.0 * shape.parameters if question.precision == "float16" else 0.0,
    }
    return {name: size for name, size in parts.items() if size}


def gradient_bytes(question: Question, size: int) -> float:
    """Give the bytes of a parameter's gradient."""
    return 2.0 if question.lowered and not is_wide(question, size) else 4.0


def is_accumulated(question: Question, size: int) -> bool:
    """Whether an update sums up several backward passes."""
    return question.slides_per_step > 1 or (question.backward_tiles or question.tiles) > size


def with_graph(question: Question, size: int) -> int:
    """Give the tiles of a chunk that are gone back through."""
    return min(size, question.backward_tiles or size)


def is_wide(question: Question, size: int) -> bool:
    """Whether gradients are summed up in float32: bfloat16 would lose the small ones of many."""
    return question.lowered and is_accumulated(question, size)


def tile_bytes(question: Question, size: int) -> float:
    """Give the pixels of a chunk, and features of all tiles with their gradients."""
    return 4.0 * 4 * question.tiles * question.shape.feature_size + size * 3 * question.shape.tile_px**2


def kept_by_block(question: Question, mixture: tuple[Recompute, ...]) -> list[float]:
    """Give the bytes that each block keeps of one tile until backward has gone through it."""
    shape = question.shape
    frozen = shape.depth - shape.learning_blocks
    blocks = [
        0.0 if number < frozen else shape.tokens * token_bytes(question, level) for number, level in enumerate(mixture)
    ]
    if shape.learning_blocks:
        blocks[-1] = last_block_bytes(question, mixture[-1])
    return blocks


def token_bytes(question: Question, level: Recompute) -> float:
    """Give the bytes that a block keeps of one token."""
    shape, c = question.shape, question.coefficients
    # what is added up from block to block is in float32 under autocast: twice what the other values take
    wide = shape.width * (4 - question.element_bytes) if question.precision == "float16" else 0
    if level == "block":
        return shape.width * question.element_bytes + wide
    sums = 4 * shape.heads + 16  # of each softmax and norm
    if level == "nothing":
        elements = shape.width * (c.nothing + (c.layer_scale if shape.scale_learns else 0)) + shape.mlp_in
        elements += shape.mlp_hidden * (1 + (c.gated if shape.gated else 0))
    else:
        widths = c.pointwise + c.adapters * shape.has_adapters
        mlp = shape.mlp_in * (1 + shape.has_adapters)
        # with adapters, two products fewer of the MLP's last layer
        less = (c.pointwise - c.mlp) * (1 + shape.has_adapters)
        elements = shape.width * widths + mlp if level == "pointwise" else shape.width * (widths - less)
    return elements * question.element_bytes + sums + 2 * wide


def last_block_bytes(question: Question, level: Recompute) -> float:
    """Give the bytes that the last block keeps of one tile: where the CLS token alone goes on, no MLP's."""
    shape = question.shape
    output = 0.0 if shape.cls_only else shape.tokens * token_bytes(question, "block")  # all of it, for the final norm
    if level == "block":
        return shape.tokens * token_bytes(question, "block") + output
    keys = 4 * shape.width  # once more in float32, for the raw attention
    attention = 5 * shape.width * question.element_bytes  # its input, the norm's output, queries, keys, values
    return shape.tokens * (keys + (attention if shape.cls_only else token_bytes(question, "nothing"))) + output


def inner_by_block(question: Question, mixture: tuple[Recompute, ...]) -> list[float]:
    """Give the bytes of one tile in use while backward goes through a block: what is recomputed, and gradients."""
    shape = question.shape
    everything = shape.tokens * token_bytes(question, "nothing")
    backward = question.coefficients.adapters_backward if shape.has_adapters else question.coefficients.backward
    gradients = shape.tokens * question.element_bytes * (2 * shape.width + shape.mlp_in + shape.mlp_hidden)
    blocks = [
        max(0.0, everything - shape.tokens * token_bytes(question, level)) + backward * gradients for level in mixture
    ]
    if shape.cls_only:  # no MLP of the other tokens, nor its gradients
        gradients = shape.tokens * shape.width * (4 * question.element_bytes + 4)
    of_last = last_block_bytes(question, LEVELS[0]) - last_block_bytes(question, mixture[-1])
    return [*blocks[:-1], of_last + backward * gradients]


# What it takes of the time


def passes_of(question: Question, way: Candidate, kept: int) -> float:
    """Give the work per tile, in forward passes."""
    back = question.shape.backward_passes + way.graph.again
    if question.backward_tiles is not None:
        return 1 + (1 + back) * question.backward_tiles / question.tiles
    encoded_twice = max(0, question.tiles - kept * way.size) / question.tiles
    return 1 + back + (encoded_twice if question.shape.trainable else 0.0)


def cost_of(question: Question, form: Form, way: Candidate, kept: int) -> float:
    """Give the time per tile, in forward passes: with what small chunks and an offloaded optimiser lose."""
    lost = offload_passes(question) if form.offload else 0.0
    return passes_of(question, way, kept) * (1 + loss_of_small_chunks(question, way.size)) + lost


def recompute_cost(question: Question, level: Recompute) -> float:
    """Give what computing a block's inner values again takes, against its forward."""
    shape = question.shape
    attention = 4 * shape.width**2 + 2 * shape.tokens * shape.width
    first, last = shape.width * shape.mlp_in, shape.width * shape.mlp_hidden  # the last product is not needed again
    whole = attention + first + last
    products = {"nothing": 0, "pointwise": 0, "mlp": first, "block": attention + first}[level]
    return products / whole + (0 if level == "nothing" else question.coefficients.pointwise_cost)


def loss_of_small_chunks(question: Question, size: int) -> float:
    """Give the part by which a chunk takes longer than its share of a large one.

    The host launches a block's kernels in the same time, however many tiles there are; the card waits for that where it
    has computed before, and fills worse a little earlier.
    """
    shape, size = question.shape, with_graph(question, size)
    launching = question.coefficients.filling / (size * shape.tokens * shape.width**2)
    return max(0.0, launching - 1) + 0.05 * launching


def offload_passes(question: Question) -> float:
    """Give the time in which masters and moments go to the card and back, in forward passes per tile."""
    copying_s = 2 * 12 * question.shape.trainable / HOST_BYTES_PER_S / question.slides_per_step
    return copying_s * FLOP_PER_S / (question.tiles * question.shape.tile_flop)


# What there is to choose from


def chunk_sizes(question: Question) -> list[int]:
    """Give all tiles at once, and chunks of nearly equal size up to where a larger one is no faster."""
    shape, tiles = question.shape, question.backward_tiles or question.tiles
    enough = 5 * question.coefficients.filling / (shape.tokens * shape.width**2)
    sizes, size = [tiles], min(tiles, max(1, round(enough)))
    while size >= 1:
        sizes.append(evened(tiles, size))
        size = size * 7 // 8
    return list(dict.fromkeys(sizes))


def evened(tiles: int, chunk: int) -> int:
    """Give the size of as many chunks as there are anyway, without a small one at the end."""
    return math.ceil(tiles / math.ceil(tiles / max(1, chunk)))


def recompute_mixtures(shape: EncoderShape, recompute: Recompute | Literal["auto"]) -> Iterator[tuple[Recompute, ...]]:
    """Give what blocks may recompute, from least to most: the first ones one level more than the rest.

    Backward ends at the first blocks, so that what they keep is in memory longest.
    """
    if recompute != "auto":
        yield (recompute,) * shape.depth
        return
    frozen = (LEVELS[0],) * (shape.depth - shape.learning_blocks)  # no gradients go there
    yield frozen + (LEVELS[0],) * shape.learning_blocks
    # keeping the products of adapters as well takes more than keeping everything
    levels = [level for level in LEVELS if not (level == "pointwise" and shape.has_adapters)]
    for weak, strong in pairwise(levels):
        for count in range(1, shape.learning_blocks + 1):
            yield frozen + (strong,) * count + (weak,) * (shape.learning_blocks - count)


def usable_bytes(free_bytes: int, coefficients: Coefficients) -> float:
    """Give the bytes that tensors may take of what is free."""
    return free_bytes * (1 - coefficients.margin) - coefficients.margin_bytes


def nothing_fits(question: Question, smallest: StepPlan, free_bytes: int, given: Mapping[str, object]) -> SettingError:
    """Say what is missing, and what takes less."""
    coefficients = question.coefficients
    needed = (smallest.peak_bytes + coefficients.margin_bytes) / (1 - coefficients.margin)
    lines = [
        f"Leave it to the plan: {name} = auto (it is {value})." for name, value in given.items() if value != "auto"
    ]
    if question.shape.trainable == question.shape.parameters:
        lines.append('Let less of the encoder learn: adaptation.scope = "lora:16" or "last:4".')
    if question.precision != "bfloat16":
        lines.append('Half the precision, where the GPU has it: adaptation.precision = "bfloat16".')
    return SettingError(
        f"A step with {question.tiles:,} tiles does not fit: it needs at least {needed / GIB:.1f} GiB of the card, "
        f"and {free_bytes / GIB:.1f} GiB are free.",
        hint="\n".join(lines) or "Take a smaller encoder: tapfm encoders",
    )


# In words


def describe(plan: StepPlan, shape: EncoderShape) -> list[str]:
    """Put a plan into a few lines."""
    lines = [tiles_in_words(plan)]
    lines.append(f"Recomputed: {recompute_in_words(plan.recompute[shape.depth - shape.learning_blocks :], shape)}.")
    if shape.trainable:
        lines.append(f"Optimiser: {optimiser_in_words(plan)}.")
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.parts.items() if size >= 0.05 * GIB)
    lines.append(f"Memory at its peak: {plan.peak_bytes / GIB:.1f} GiB ({parts}).")
    lines.append(f"Work: {plan.passes:.1f} forward passes a tile, {plan.passes / least_passes(shape):.2f} x the least.")
    return lines


def least_passes(shape: EncoderShape) -> float:
    """Give the passes of a step that computes nothing twice."""
    return 1 + shape.backward_passes


def tiles_in_words(plan: StepPlan) -> str:
    """Say how the tiles go through the encoder."""
    if plan.way == "one-pass":
        return f"One pass: all {plan.tiles:,} tiles at once, each encoded once."
    chunks = f"{plan.tiles:,} tiles in chunks of {plan.chunk:,}"
    if plan.backward_tiles is not None:
        return f"Subset: {chunks}; {plan.backward_tiles:,} drawn ones are encoded again and gone back through."
    if plan.kept >= plan.chunks:
        return f"Hybrid: {chunks}, all with their graph kept: each encoded once."
    if plan.way == "hybrid":
        return f"Hybrid: {chunks}, {plan.kept} of {plan.chunks} with their graph kept; the others are encoded twice."
    return f"Chunked: {chunks}; all but the first are encoded twice."


def recompute_in_words(levels: tuple[Recompute, ...], shape: EncoderShape) -> str:
    """Say what is computed again, from which block to which."""
    if not levels or set(levels) == {"nothing"}:
        return "nothing"
    if len(set(levels)) == 1:
        return f"{levels[0]} (all {len(levels)} blocks)" if len(levels) > 1 else f"{levels[0]} (one block)"
    said, number = [], shape.depth - len(levels)
    for level, group in groupby(levels):
        count = len(list(group))
        said.append(f"{level} (blocks {number + 1}-{number + count})" if count > 1 else f"{level} (block {number + 1})")
        number += count
    return ", ".join(said)


def optimiser_in_words(plan: StepPlan) -> str:
    """Say in which form moments are, and where."""
    where = "in the machine's memory" if plan.offload else "on the GPU"
    gradients = ", gradients summed in float32" if plan.wide_gradients else ""
    return f"{plan.moments} moments {where}{gradients}"
