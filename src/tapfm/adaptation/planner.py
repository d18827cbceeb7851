"""The fastest way to take a step that fits into a card's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.moments import MomentFormat
from tapfm.adaptation.step_costs import (
    COMPILED,
    EAGER,
    GIB,
    RECOMPUTE_LEVELS,
    ChunkCost,
    Coefficients,
    OptimiserStorage,
    PlannerInput,
    Precision,
    compute_chunk_cost,
    compute_graph_cost,
    count_passes,
    estimate_cost,
    needs_float32_gradients,
    optimiser_step_bytes,
    peak_by_part,
    resident_bytes,
    tile_bytes,
)
from tapfm.encoders.blocks import Recompute
from tapfm.errors import SettingError

ChunkingStrategy = Literal["one-pass", "hybrid", "chunked"]
# A form that rounds the moments is taken where exact ones do not fit, or make the step so many times as long.
_WORTH_EXACTNESS = 1.5


@dataclass(frozen=True)
class StepPlan:
    """How a bag goes through the encoder, and what that takes."""

    strategy: ChunkingStrategy
    tiles: int
    chunk: int  # tiles in the encoder at once
    graphs_kept: int  # chunks that keep their graph and so are encoded once
    recompute: tuple[Recompute, ...]  # one per block
    moments: MomentFormat
    offload: bool
    float32_gradients: bool  # summed in float32, where several backward passes make one update
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


# In the order of preference: first what gives the numbers of plain AdamW.
_FORMS = (
    OptimiserStorage(),
    OptimiserStorage(offload=True),
    OptimiserStorage("bfloat16"),
    OptimiserStorage("int8"),
    OptimiserStorage("bfloat16", True),
    OptimiserStorage("int8", True),
)


def plan_step(
    shape: EncoderShape,
    *,
    tiles: int,
    free_bytes: int,
    precision: Precision,
    compiled: bool,
    chunk: int | Literal["auto", "all"] = "auto",
    recompute: Recompute | Literal["auto"] = "auto",
    moments: MomentFormat | Literal["auto"] = "auto",
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
    chosen = coefficients or (COMPILED if compiled else EAGER)
    subset = None if backward_tiles is None or backward_tiles >= tiles else backward_tiles
    question = PlannerInput(shape, tiles, precision, slides_per_step, subset, chosen)
    room = _usable_bytes(free_bytes, chosen)
    forms = [f for f in _FORMS if moments in ("auto", f.moments) and offload in ("auto", f.offload)]
    if moments == "auto":  # rounded moments that are offloaded besides: only who asks for them gets them
        forms = [f for f in forms if f.exact or not f.offload] or forms
    ways = _ways_of(question, chunk, recompute)
    best = [plan for form in forms if (plan := _best_plan(question, form, ways, room)) is not None]
    if not best:
        least = min(ways, key=lambda way: way.graph_bytes(1))
        smallest = min((_evaluate(question, form, least, 1) for form in forms), key=lambda plan: plan.peak_bytes)
        fixed = {"adaptation.chunk": chunk, "adaptation.recompute": recompute, "optimiser.moments": moments}
        raise _nothing_fits(question, smallest, free_bytes, fixed | {"machine.offload_optimiser": offload})
    fastest = min(plan.cost for plan in best)
    exact = [plan for plan in best if plan.moments == "float32"]
    # the time of copies is a guess, so that they have to be worth it
    in_order = sorted(exact, key=lambda plan: plan.cost * (1.05 if plan.offload else 1))
    in_order += [plan for plan in best if plan not in exact]
    return next(plan for plan in in_order if plan.cost <= _WORTH_EXACTNESS * fastest)


def predict_step(
    shape: EncoderShape,
    *,
    tiles: int,
    precision: Precision,
    compiled: bool,
    chunk: int | None = None,
    graphs_kept: int = 1,
    recompute: tuple[Recompute, ...] | Recompute = "nothing",
    moments: MomentFormat = "float32",
    offload: bool = False,
    slides_per_step: int = 1,
    backward_tiles: int | None = None,
    coefficients: Coefficients | None = None,
) -> StepPlan:
    """Say what a way that is settled already takes."""
    chosen = coefficients or (COMPILED if compiled else EAGER)
    subset = None if backward_tiles is None or backward_tiles >= tiles else backward_tiles
    question = PlannerInput(shape, tiles, precision, slides_per_step, subset, chosen)
    levels = (recompute,) * shape.depth if isinstance(recompute, str) else recompute
    size = _evened(tiles, chunk or tiles)
    way = compute_chunk_cost(question, compute_graph_cost(question, levels), size)
    return _evaluate(question, OptimiserStorage(moments, offload), way, min(graphs_kept, math.ceil(tiles / size)))


@lru_cache(maxsize=16)  # cards of several sizes are asked about
def _ways_of(
    question: PlannerInput, chunk: int | Literal["auto", "all"], recompute: Recompute | Literal["auto"]
) -> list[ChunkCost]:
    """Give all chunk sizes with all that may be recomputed."""
    tiles = question.tiles
    sizes = [tiles] if chunk == "all" else _chunk_sizes(question) if chunk == "auto" else [_evened(tiles, chunk)]
    graphs = [compute_graph_cost(question, mixture) for mixture in _recompute_mixtures(question.shape, recompute)]
    return [compute_chunk_cost(question, graph, size) for size in sizes for graph in graphs]


def _best_plan(question: PlannerInput, form: OptimiserStorage, ways: list[ChunkCost], room: float) -> StepPlan | None:
    """Choose chunk, graphs kept and what is recomputed, for one form of the optimiser."""
    always = sum(resident_bytes(question, form).values()) + question.coefficients.overhead_bytes
    best: tuple[float, float, ChunkCost, int] | None = None
    for way in ways:
        kept = _most_kept(question, form, way, room - always)
        if kept:
            cost, needed = estimate_cost(question, form, way, kept), way.graph_bytes(kept)
            if best is None or (cost, needed) < best[:2]:  # equally fast: the one that needs less
                best = (cost, needed, way, kept)
    return None if best is None else _evaluate(question, form, best[2], best[3])


def _most_kept(question: PlannerInput, form: OptimiserStorage, way: ChunkCost, room: float) -> int:
    """Say how many chunks can keep their graph; 0 where not even one at a time fits."""
    room -= tile_bytes(question, way.size)
    if room < max(way.graph_bytes(1), optimiser_step_bytes(question, form, way.size)):
        return 0
    one = way.size * way.graph.tile_bytes
    if question.backward_tiles is not None or not one:
        return 1  # which tiles are gone back through is drawn after all are encoded
    first, later = 1 + int((room - way.first_bytes) / one), 2 + int((room - way.later_bytes) / one)
    return min(math.ceil(question.tiles / way.size), first, later)


def _evaluate(question: PlannerInput, form: OptimiserStorage, way: ChunkCost, kept: int) -> StepPlan:
    """Say what one way takes."""
    chunks, subset = math.ceil(question.tiles / way.size), question.backward_tiles is not None
    parts = peak_by_part(question, form, way, kept)
    return StepPlan(
        strategy="one-pass" if chunks == 1 and not subset else "hybrid" if kept > 1 else "chunked",
        tiles=question.tiles,
        chunk=way.size,
        graphs_kept=0 if subset else kept,
        recompute=way.graph.mixture,
        moments=form.moments,
        offload=form.offload,
        float32_gradients=needs_float32_gradients(question, way.size),
        parts={name: round(size) for name, size in parts.items()},
        passes=count_passes(question, way, kept),
        cost=estimate_cost(question, form, way, kept),
        backward_tiles=question.backward_tiles,
    )


def _chunk_sizes(question: PlannerInput) -> list[int]:
    """Give all tiles at once, and chunks of nearly equal size up to where a larger one is no faster."""
    shape, tiles = question.shape, question.backward_tiles or question.tiles
    enough = 5 * question.coefficients.filling / (shape.tokens * shape.width**2)
    sizes, size = [tiles], min(tiles, max(1, round(enough)))
    while size >= 1:
        sizes.append(_evened(tiles, size))
        size = size * 7 // 8
    return list(dict.fromkeys(sizes))


def _evened(tiles: int, chunk: int) -> int:
    """Give the size of as many chunks as there are anyway, without a small one at the end."""
    return math.ceil(tiles / math.ceil(tiles / max(1, chunk)))


def _recompute_mixtures(shape: EncoderShape, recompute: Recompute | Literal["auto"]) -> Iterator[tuple[Recompute, ...]]:
    """Give what blocks may recompute, from least to most: the first ones one level more than the rest.

    Backward ends at the first blocks, so that what they keep is in memory longest.
    """
    if recompute != "auto":
        yield (recompute,) * shape.depth
        return
    frozen = (RECOMPUTE_LEVELS[0],) * (shape.depth - shape.trainable_blocks)  # no gradients go there
    yield frozen + (RECOMPUTE_LEVELS[0],) * shape.trainable_blocks
    # keeping the products of adapters as well takes more than keeping everything
    levels = [level for level in RECOMPUTE_LEVELS if not (level == "pointwise" and shape.has_adapters)]
    for weak, strong in pairwise(levels):
        for count in range(1, shape.trainable_blocks + 1):
            yield frozen + (strong,) * count + (weak,) * (shape.trainable_blocks - count)


def _usable_bytes(free_bytes: int, coefficients: Coefficients) -> float:
    """Give the bytes that tensors may take of what is free."""
    return free_bytes * (1 - coefficients.margin) - coefficients.margin_bytes


def _nothing_fits(
    question: PlannerInput, smallest: StepPlan, free_bytes: int, given: Mapping[str, object]
) -> SettingError:
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
