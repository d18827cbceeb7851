"""A plan in words."""

from __future__ import annotations

from itertools import groupby

from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.planner import StepPlan
from tapfm.adaptation.step_costs import GIB
from tapfm.encoders.blocks import Recompute


def describe_plan(plan: StepPlan, shape: EncoderShape) -> list[str]:
    """Put a plan into a few lines."""
    lines = [describe_chunks(plan)]
    lines.append(f"Recomputed: {describe_recompute(plan.recompute[shape.depth - shape.trainable_blocks :], shape)}.")
    if shape.trainable:
        lines.append(f"Optimiser: {describe_optimiser(plan)}.")
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.parts.items() if size >= 0.05 * GIB)
    lines.append(f"Memory at its peak: {plan.peak_bytes / GIB:.1f} GiB ({parts}).")
    lines.append(
        f"Work: {plan.passes:.1f} forward passes a tile, {plan.passes / minimum_passes(shape):.2f} x the least."
    )
    return lines


def minimum_passes(shape: EncoderShape) -> float:
    """Give the passes of a step that computes nothing twice."""
    return 1 + shape.backward_passes


def describe_chunks(plan: StepPlan) -> str:
    """Say how the tiles go through the encoder."""
    if plan.strategy == "one-pass":
        return f"One pass: all {plan.tiles:,} tiles at once, each encoded once."
    chunks = f"{plan.tiles:,} tiles in chunks of {plan.chunk:,}"
    if plan.backward_tiles is not None:
        return f"Subset: {chunks}; {plan.backward_tiles:,} drawn ones are encoded again and gone back through."
    if plan.graphs_kept >= plan.chunks:
        return f"Hybrid: {chunks}, all with their graph kept: each encoded once."
    if plan.strategy == "hybrid":
        return f"Hybrid: {chunks}, {plan.graphs_kept} of {plan.chunks} with their graph kept; the others are encoded twice."
    return f"Chunked: {chunks}; all but the first are encoded twice."


def describe_recompute(levels: tuple[Recompute, ...], shape: EncoderShape) -> str:
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


def describe_optimiser(plan: StepPlan) -> str:
    """Say in which form moments are, and where."""
    where = "in the machine's memory" if plan.offload else "on the GPU"
    gradients = ", gradients summed in float32" if plan.float32_gradients else ""
    return f"{plan.moments} moments {where}{gradients}"
