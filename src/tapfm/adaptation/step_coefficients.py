"""Measured coefficients of the memory and time of a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coefficients:
    """Measured values that the architecture does not determine.

    saved_at_nothing, saved_at_pointwise, saved_at_mlp: activations that a block saves per token at this recomputation
        level, without the hidden values of its MLP, as a multiple of the block's width.
    layer_scale: additional activations for a trainable LayerScale at level "nothing", in widths.
    adapters: additional activations for adapters at levels "pointwise" and "mlp", in widths.
    gated: additional activations for a gated MLP at level "nothing", as a multiple of its hidden size.
    backward: temporary gradients inside a block, as a fraction of its input, output and MLP values.
    adapters_backward: the same for a block with adapters.
    adapters_recomputed: fraction of the adapters' activations that exists twice while a block is recomputed.
    own_gradients: fraction of a block's weight gradients that exists at that block's memory peak.
    update: temporary bytes per parameter of a shard during the optimiser's update.
    overhead_bytes: memory that does not depend on the encoder: workspaces of matrix products, the aggregator.
    pointwise_cost: cost of recomputing norms and activation functions, as a fraction of a block's forward pass.
    launch_bound_size: tokens x width^2 of a chunk whose computation takes as long as launching its kernels.
    margin, margin_bytes: memory left free for fragmentation, as a fraction and in bytes.
    """

    saved_at_nothing: float
    saved_at_pointwise: float
    saved_at_mlp: float
    layer_scale: float
    adapters: float
    gated: float
    backward: float
    adapters_backward: float
    adapters_recomputed: float
    own_gradients: float
    update: float
    overhead_bytes: float = 0.1 * 2**30
    pointwise_cost: float = 0.12
    launch_bound_size: float = 2.4e10
    margin: float = 0.05
    margin_bytes: float = 0.25 * 2**30


# The values of saved activations in EAGER are counts of what autograd saves; tests/adaptation/test_planner.py counts
# them. `backward`, `adapters_backward` and `overhead_bytes` are fitted with `python benchmarks/planning.py --fit`. In
# COMPILED, all values of adapters are set by hand, from one step on an H200 and from blocks on a CPU.
EAGER = Coefficients(
    saved_at_nothing=8,
    saved_at_pointwise=8,
    saved_at_mlp=7,
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
    saved_at_nothing=8,
    saved_at_pointwise=6,
    saved_at_mlp=6,
    layer_scale=1,
    adapters=3,
    gated=0,
    backward=0.55,
    adapters_backward=1.15,
    adapters_recomputed=1,
    own_gradients=1.0,
    update=16,
    pointwise_cost=0.0,  # fusion saves as much time as recomputation costs
)
