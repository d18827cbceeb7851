"""Describe a step plan as text."""

from __future__ import annotations

from itertools import groupby

from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.planner import StepPlan
from tapfm.adaptation.step_costs import GIB
from tapfm.encoders.blocks import Recompute


def describe_plan(plan: StepPlan, shape: EncoderShape) -> list[str]:
    """Return a few lines about strategy, recomputation, optimiser, memory and time."""
    lines = [describe_chunks(plan)]
    lines.append(f"Recomputed: {describe_recompute(plan.recompute[shape.depth - shape.trainable_blocks :], shape)}.")
    if shape.trainable_parameters:
        lines.append(f"Optimiser: {describe_optimiser(plan)}.")
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.parts.items() if size >= 0.05 * GIB)
    lines.append(f"Peak memory: {plan.peak_bytes / GIB:.1f} GiB ({parts}).")
    lines.append(
        f"Work: {plan.passes:.1f} forward passes per tile, {plan.passes / minimum_passes(shape):.2f} x the minimum."
    )
    return lines


def minimum_passes(shape: EncoderShape) -> float:
    """Return the forward passes per tile of a step that encodes each tile once and recomputes nothing."""
    return 1 + shape.backward_passes


def describe_chunks(plan: StepPlan) -> str:
    """Return a sentence about chunks and graphs."""
    if plan.strategy == "one-pass":
        return f"One pass: all {plan.tiles:,} tiles in one chunk, encoded once."
    chunks = f"{plan.tiles:,} tiles in chunks of {plan.chunk:,}"
    if plan.backward_tiles is not None:
        return f"Subset: {chunks}; {plan.backward_tiles:,} sampled tiles are encoded again for the backward pass."
    if plan.graphs_kept >= plan.chunks:
        return f"Hybrid: {chunks}, all graphs kept, each tile encoded once."
    if plan.strategy == "hybrid":
        kept = f"{plan.graphs_kept} of {plan.chunks} graphs kept"
        return f"Hybrid: {chunks}, {kept}; the other chunks are encoded twice."
    return f"Chunked: {chunks}; all but the first chunk are encoded twice."


def describe_recompute(levels: tuple[Recompute, ...], shape: EncoderShape) -> str:
    """Return what is recomputed in which blocks."""
    if not levels or set(levels) == {"nothing"}:
        return "nothing"
    if len(set(levels)) == 1:
        return f"{levels[0]} (all {len(levels)} blocks)" if len(levels) > 1 else f"{levels[0]} (1 block)"
    groups, number = [], shape.depth - len(levels)
    for level, group in groupby(levels):
        count = len(list(group))
        groups.append(
            f"{level} (blocks {number + 1}-{number + count})" if count > 1 else f"{level} (block {number + 1})"
        )
        number += count
    return ", ".join(groups)


def describe_optimiser(plan: StepPlan) -> str:
    """Return the format and place of the moments, and whether gradients are accumulated in float32."""
    where = "in host memory" if plan.offload else "on the GPU"
    gradients = ", gradients accumulated in float32" if plan.float32_gradients else ""
    return f"{plan.moments} moments {where}{gradients}"
