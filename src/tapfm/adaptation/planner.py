"""Plan a training step: choose the fastest strategy that fits into GPU memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.moments import MomentFormat
from tapfm.adaptation.step_coefficients import COMPILED, EAGER, Coefficients
from tapfm.adaptation.step_costs import (
    GIB,
    RECOMPUTE_LEVELS,
    ChunkCost,
    OptimiserStorage,
    PlannerInput,
    Precision,
    compute_chunk_cost,
    compute_graph_cost,
    compute_resident_bytes,
    compute_tile_bytes,
    compute_update_bytes,
    count_passes,
    estimate_cost,
    needs_float32_gradients,
    split_peak_memory,
)
from tapfm.encoders.blocks import Recompute
from tapfm.errors import SettingError

ChunkingStrategy = Literal["one-pass", "hybrid", "chunked"]
_MAX_SLOWDOWN_FOR_FLOAT32 = 1.5  # if float32 moments make a step slower than this, moments are rounded
_OFFLOAD_PENALTY = 1.05  # the time of copies is only an estimate, so offloading has to be clearly faster


@dataclass(frozen=True)
class StepPlan:
    """Strategy of a training step, with its predicted memory and time."""

    strategy: ChunkingStrategy
    tiles: int
    chunk: int  # tiles per chunk
    graphs_kept: int  # chunks that keep their graph and are encoded only once
    recompute: tuple[Recompute, ...]  # one per block
    moments: MomentFormat
    offload: bool
    float32_gradients: bool  # gradients of several backward passes are summed in float32
    parts: Mapping[str, int]  # peak memory in bytes, by part
    passes: float  # work per tile, in forward passes; 3 if all weights are trained and nothing is computed twice
    cost: float  # time per tile, in forward passes: `passes`, and the overhead of small chunks and offloading
    backward_tiles: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory."""
        return sum(self.parts.values())

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return math.ceil(self.tiles / self.chunk)


# In order of preference: first the options without rounding.
_STORAGE_OPTIONS = (
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
    """Return the fastest plan that fits into `free_bytes`, the free GPU memory before the encoder is loaded.

    The optimiser's moments stay in float32, on the GPU or in host memory, whichever is faster. They are rounded only if
    float32 moments do not fit or would make the step more than 1.5 times as long. Raises `SettingError` if no plan
    fits.
    """
    if tiles < 1:
        raise SettingError(f"The number of tiles per step must be at least 1; got {tiles}.")
    coefficients = coefficients or (COMPILED if compiled else EAGER)
    subset = None if backward_tiles is None or backward_tiles >= tiles else backward_tiles
    inputs = PlannerInput(shape, tiles, precision, slides_per_step, subset, coefficients)
    usable_bytes = _usable_bytes(free_bytes, coefficients)
    options = [
        option
        for option in _STORAGE_OPTIONS
        if moments in ("auto", option.moments) and offload in ("auto", option.offload)
    ]
    if moments == "auto":  # rounded moments are not offloaded unless the settings ask for both
        options = [option for option in options if option.exact or not option.offload] or options
    candidates = _list_candidates(inputs, chunk, recompute)
    best = [plan for option in options if (plan := _best_plan(inputs, option, candidates, usable_bytes)) is not None]
    if not best:
        least = min(candidates, key=lambda candidate: candidate.peak_bytes(1))
        smallest = min((_build_plan(inputs, option, least, 1) for option in options), key=lambda plan: plan.peak_bytes)
        settings = {
            "adaptation.chunk": chunk,
            "adaptation.recompute": recompute,
            "optimiser.moments": moments,
            "machine.offload_optimiser": offload,
        }
        raise _does_not_fit_error(inputs, smallest, free_bytes, settings)
    fastest = min(plan.cost for plan in best)
    exact = [plan for plan in best if plan.moments == "float32"]
    preferred = sorted(exact, key=lambda plan: plan.cost * (_OFFLOAD_PENALTY if plan.offload else 1))
    preferred += [plan for plan in best if plan not in exact]
    return next(plan for plan in preferred if plan.cost <= _MAX_SLOWDOWN_FOR_FLOAT32 * fastest)


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
    """Return the plan, with predicted memory and time, for a fixed strategy."""
    coefficients = coefficients or (COMPILED if compiled else EAGER)
    subset = None if backward_tiles is None or backward_tiles >= tiles else backward_tiles
    inputs = PlannerInput(shape, tiles, precision, slides_per_step, subset, coefficients)
    levels = (recompute,) * shape.depth if isinstance(recompute, str) else recompute
    size = _even_chunk_size(tiles, chunk or tiles)
    candidate = compute_chunk_cost(inputs, compute_graph_cost(inputs, levels), size)
    storage = OptimiserStorage(moments, offload)
    return _build_plan(inputs, storage, candidate, min(graphs_kept, math.ceil(tiles / size)))


@lru_cache(maxsize=16)  # `tapfm plan` plans the same step for GPUs of several sizes
def _list_candidates(
    inputs: PlannerInput, chunk: int | Literal["auto", "all"], recompute: Recompute | Literal["auto"]
) -> list[ChunkCost]:
    """Return all combinations of chunk size and recomputation levels."""
    tiles = inputs.tiles
    sizes = [tiles] if chunk == "all" else _chunk_sizes(inputs) if chunk == "auto" else [_even_chunk_size(tiles, chunk)]
    tile_costs = [compute_graph_cost(inputs, levels) for levels in _iter_levels(inputs.shape, recompute)]
    return [compute_chunk_cost(inputs, tile_cost, size) for size in sizes for tile_cost in tile_costs]


def _best_plan(
    inputs: PlannerInput, storage: OptimiserStorage, candidates: list[ChunkCost], usable_bytes: float
) -> StepPlan | None:
    """Return the fastest plan that fits, for one storage of the optimiser's state."""
    resident_bytes = sum(compute_resident_bytes(inputs, storage).values()) + inputs.coefficients.overhead_bytes
    best: tuple[float, float, ChunkCost, int] | None = None
    for candidate in candidates:
        graphs_kept = _max_graphs_kept(inputs, storage, candidate, usable_bytes - resident_bytes)
        if graphs_kept:
            cost = estimate_cost(inputs, storage, candidate, graphs_kept)
            peak_bytes = candidate.peak_bytes(graphs_kept)
            if best is None or (cost, peak_bytes) < best[:2]:  # if equally fast: the plan with less memory
                best = (cost, peak_bytes, candidate, graphs_kept)
    return None if best is None else _build_plan(inputs, storage, best[2], best[3])


def _max_graphs_kept(
    inputs: PlannerInput, storage: OptimiserStorage, candidate: ChunkCost, available_bytes: float
) -> int:
    """Return how many chunks can keep their graph. 0 if not even one graph at a time fits."""
    available_bytes -= compute_tile_bytes(inputs, candidate.size)
    if available_bytes < max(candidate.peak_bytes(1), compute_update_bytes(inputs, storage, candidate.size)):
        return 0
    graph_bytes = candidate.size * candidate.tile.graph_bytes
    if inputs.backward_tiles is not None or not graph_bytes:
        return 1  # the tiles for the backward pass are sampled only after all tiles are encoded
    first = 1 + int((available_bytes - candidate.first_peak_bytes) / graph_bytes)
    later = 2 + int((available_bytes - candidate.later_peak_bytes) / graph_bytes)
    return min(math.ceil(inputs.tiles / candidate.size), first, later)


def _build_plan(inputs: PlannerInput, storage: OptimiserStorage, candidate: ChunkCost, graphs_kept: int) -> StepPlan:
    chunks, subset = math.ceil(inputs.tiles / candidate.size), inputs.backward_tiles is not None
    parts = split_peak_memory(inputs, storage, candidate, graphs_kept)
    return StepPlan(
        strategy="one-pass" if chunks == 1 and not subset else "hybrid" if graphs_kept > 1 else "chunked",
        tiles=inputs.tiles,
        chunk=candidate.size,
        graphs_kept=0 if subset else graphs_kept,
        recompute=candidate.tile.levels,
        moments=storage.moments,
        offload=storage.offload,
        float32_gradients=needs_float32_gradients(inputs, candidate.size),
        parts={name: round(size) for name, size in parts.items()},
        passes=count_passes(inputs, candidate, graphs_kept),
        cost=estimate_cost(inputs, storage, candidate, graphs_kept),
        backward_tiles=inputs.backward_tiles,
    )


def _chunk_sizes(inputs: PlannerInput) -> list[int]:
    """Return the chunk sizes to try: all tiles, and decreasing sizes from the largest one that is useful."""
    shape, tiles = inputs.shape, inputs.backward_tiles or inputs.tiles
    largest_useful = 5 * inputs.coefficients.launch_bound_size / (shape.tokens * shape.width**2)
    sizes, size = [tiles], min(tiles, max(1, round(largest_useful)))
    while size >= 1:
        sizes.append(_even_chunk_size(tiles, size))
        size = size * 7 // 8
    return list(dict.fromkeys(sizes))


def _even_chunk_size(tiles: int, chunk: int) -> int:
    """Return the smallest chunk size with the same number of chunks, so that the last chunk is not much smaller."""
    return math.ceil(tiles / math.ceil(tiles / max(1, chunk)))


def _iter_levels(shape: EncoderShape, recompute: Recompute | Literal["auto"]) -> Iterator[tuple[Recompute, ...]]:
    """Yield the recomputation levels to try, from least to most recomputation.

    The first blocks recompute one level more than the others, because their activations are in memory longest: the
    backward pass reaches them last.
    """
    if recompute != "auto":
        yield (recompute,) * shape.depth
        return
    frozen = (RECOMPUTE_LEVELS[0],) * (shape.depth - shape.trainable_blocks)  # these blocks have no backward pass
    yield frozen + (RECOMPUTE_LEVELS[0],) * shape.trainable_blocks
    # with adapters, level "pointwise" needs more memory than level "nothing"
    levels = [level for level in RECOMPUTE_LEVELS if not (level == "pointwise" and shape.has_adapters)]
    for weak, strong in pairwise(levels):
        for count in range(1, shape.trainable_blocks + 1):
            yield frozen + (strong,) * count + (weak,) * (shape.trainable_blocks - count)


def _usable_bytes(free_bytes: int, coefficients: Coefficients) -> float:
    """Return the free memory minus a margin for fragmentation."""
    return free_bytes * (1 - coefficients.margin) - coefficients.margin_bytes


def _does_not_fit_error(
    inputs: PlannerInput, smallest: StepPlan, free_bytes: int, settings: Mapping[str, object]
) -> SettingError:
    """Return an error that states how much memory is missing and which settings need less."""
    coefficients = inputs.coefficients
    needed = (smallest.peak_bytes + coefficients.margin_bytes) / (1 - coefficients.margin)
    lines = [
        f"Set {name} to auto (now {value}), so that the planner can choose it."
        for name, value in settings.items()
        if value != "auto"
    ]
    if inputs.shape.trainable_parameters == inputs.shape.parameters:
        lines.append('Train fewer parameters: adaptation.scope = "lora:16" or "last:4".')
    if inputs.precision != "bfloat16":
        lines.append('If the GPU supports it, use bfloat16: adaptation.precision = "bfloat16".')
    return SettingError(
        f"A step with {inputs.tiles:,} tiles does not fit into GPU memory: it needs at least {needed / GIB:.1f} GiB, "
        f"but {free_bytes / GIB:.1f} GiB are available.",
        hint="\n".join(lines) or "Use a smaller encoder. To list encoders: tapfm encoders",
    )
