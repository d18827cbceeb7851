"""How well the planner predicts the peak memory of a step, on this GPU.

    python benchmarks/planning.py                 # 8 configurations that the coefficients were not fitted to
    python benchmarks/planning.py --fit           # also those they are fitted to; prints new coefficients
    python benchmarks/planning.py --json out/planning.json

Builds each configuration with random weights, takes three steps and reads torch's own count of the peak. Prints
Markdown: predicted and measured GiB, what torch held for it, and tiles per second beside the predicted passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from numpy.typing import NDArray

import tapfm
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.moments import MomentFormat
from tapfm.adaptation.planner import StepPlan, predict_step
from tapfm.adaptation.step_costs import COMPILED, EAGER, GIB, Coefficients
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.blocks import Recompute
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.precision import can_compile
from tapfm.encoders.vit import VitEncoder
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels

TASK = BinaryTask.from_training_labels("FGFR3", [1] * 16 + [0] * 84)
TARGETS = encode_labels([1])
FITTED = ("nothing", "pointwise", "mlp", "backward", "adapters_backward", "overhead_bytes")


@dataclass(frozen=True)
class Configuration:
    """One way to take a step; `recompute`: (level, number of blocks) from the first block on, the last for the rest."""

    encoder: str
    tiles: int
    scope: str = "full"
    chunk: int | None = None
    kept: int = 1
    recompute: tuple[tuple[Recompute, int], ...] = (("nothing", 0),)
    moments: MomentFormat = "float32"
    offload: bool = False
    backward_tiles: int | None = None

    def levels(self, depth: int) -> tuple[Recompute, ...]:
        """Give the level of each block."""
        levels = [level for level, count in self.recompute[:-1] for _ in range(count)]
        return (*levels, *[self.recompute[-1][0]] * (depth - len(levels)))

    def __str__(self) -> str:
        chunk = "all at once" if self.chunk is None else f"chunks of {self.chunk}, {self.kept} kept"
        levels = " / ".join(f"{count} x {level}" if count else level for level, count in self.recompute)
        subset = "" if self.backward_tiles is None else f", back through {self.backward_tiles}"
        where = " on the CPU" if self.offload else ""
        return f"{self.encoder} {self.scope}, K = {self.tiles}, {chunk}{subset}; {levels}; {self.moments}{where}"


def level(name: Recompute, count: int = 0) -> tuple[Recompute, int]:
    """Write one part of a mixture."""
    return name, count


# Sorted by encoder: what is compiled for one configuration serves the next.
FIT = [
    Configuration("uni", 128),
    Configuration("uni", 256, recompute=(level("pointwise"),)),
    Configuration("uni", 256, recompute=(level("mlp"),)),
    Configuration("uni", 512, chunk=256, recompute=(level("block"),)),
    Configuration("uni", 128, scope="last:6"),
    Configuration("uni", 192, scope="lora:8", recompute=(level("mlp"),)),
    Configuration("h-optimus-0", 24),
    Configuration("h-optimus-0", 96, recompute=(level("block"),)),
    Configuration("h-optimus-0", 96, chunk=32, kept=2, recompute=(level("mlp"),)),
]
HELD_OUT = [
    Configuration("uni", 300, recompute=(level("pointwise", 10), level("nothing"))),
    Configuration("uni", 384, chunk=96, kept=3, recompute=(level("mlp"),), moments="bfloat16"),
    Configuration("uni", 200, scope="last:4", chunk=100),
    Configuration("h-optimus-0", 75, recompute=(level("mlp", 11), level("pointwise"))),
    Configuration("h-optimus-0", 160, chunk=40, recompute=(level("block", 30), level("mlp")), moments="int8"),
    Configuration("h-optimus-0", 64, chunk=16, recompute=(level("block"),), offload=True),
    Configuration("h-optimus-0", 128, scope="lora:16", chunk=64, recompute=(level("block"),)),
    Configuration("dinov2-s14", 1024, chunk=512, kept=2),
]


@dataclass(frozen=True)
class Measured:
    """A configuration, its prediction, and what was seen."""

    configuration: Configuration
    held_out: bool
    plan: StepPlan
    shape: EncoderShape
    peak_gib: float | None
    reserved_gib: float | None
    tiles_per_s: float | None

    @property
    def error(self) -> float | None:
        """Part by which the prediction is above what was seen."""
        return None if self.peak_gib is None else self.plan.peak_bytes / GIB / self.peak_gib - 1


def build(
    configuration: Configuration, device: torch.device, compiled: bool
) -> tuple[EncoderShape, Callable[[], None]]:
    """Make the encoder, its optimiser and a function that takes one step: the one place that knows how."""
    card = encoder_card(configuration.encoder)
    torch.manual_seed(0)
    with device:
        vit = build_vit(card)
        encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature)
        aggregator = ClsAttention(encoder.feature_size)
    apply_scope(encoder, Scope.parse(configuration.scope))
    encoder.to(device)  # adapters are made where their layers are, or on the CPU
    shape = EncoderShape.of(encoder)
    encoder.recompute = configuration.levels(shape.depth)
    encoder.compile_blocks(compiled)
    adaptation = AdaptationSettings(
        chunking=Chunking(configuration.chunk, configuration.kept), backward_tiles=configuration.backward_tiles
    )
    optimisation = OptimiserSettings(
        weights_dtype=torch.bfloat16,
        float32_gradients=prediction(configuration, shape, compiled, None).float32_gradients,
        moments=configuration.moments,
        offload=configuration.offload,
        compiled=compiled,
    )
    learner = Learner(SlideModel(encoder, aggregator, TASK), adaptation, optimisation)
    learner.start_epoch(0)
    tiles = torch.randint(0, 256, (configuration.tiles, 3, card.tile_px, card.tile_px), dtype=torch.uint8)
    bag = Bag(tiles.pin_memory() if device.type == "cuda" else tiles, np.arange(configuration.tiles))

    def step() -> None:
        learner.train_step(bag, TARGETS, update=True, slide_id="random")
        if learner.adaptation.chunking != adaptation.chunking:  # it would go on with half as many tiles at once
            raise torch.OutOfMemoryError

    return shape, step


def prediction(
    configuration: Configuration, shape: EncoderShape, compiled: bool, coefficients: Coefficients | None
) -> StepPlan:
    """Ask the planner."""
    return predict_step(
        shape,
        tiles=configuration.tiles,
        precision="bfloat16",
        compiled=compiled,
        chunk=configuration.chunk,
        graphs_kept=configuration.kept,
        recompute=configuration.levels(shape.depth),
        moments=configuration.moments,
        offload=configuration.offload,
        backward_tiles=configuration.backward_tiles,
        coefficients=coefficients,
    )


def measure(configuration: Configuration, device: torch.device, *, compiled: bool, held_out: bool) -> Measured:
    """Take three steps; the first compiles, and makes what is made once."""
    cuda = device.type == "cuda"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    shape, step = build(configuration, device, compiled)
    peak = reserved = speed = None
    try:
        step()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(2):
            step()
        if cuda:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / GIB
            reserved = torch.cuda.max_memory_reserved() / GIB
        speed = 2 * configuration.tiles / (time.perf_counter() - start)
    except torch.OutOfMemoryError:
        print(f"  out of memory: {configuration}", flush=True)
    plan = prediction(configuration, shape, compiled, None)
    return Measured(configuration, held_out, plan, shape, peak, reserved, speed)


def fitted(rows: Sequence[Measured], start: Coefficients, compiled: bool) -> Coefficients:
    """Move the coefficients that can be measured so that relative errors are least; none moves without a reason."""
    seen = [row for row in rows if row.peak_gib is not None]
    first = np.array([getattr(start, name) for name in FITTED])

    def with_factors(factors: NDArray[np.float64]) -> Coefficients:
        return dataclasses.replace(start, **dict(zip(FITTED, (first * factors).tolist(), strict=True)))

    def errors(factors: NDArray[np.float64]) -> NDArray[np.float64]:
        plans = [prediction(row.configuration, row.shape, compiled, with_factors(factors)) for row in seen]
        of_rows = [plan.peak_bytes / GIB / (row.peak_gib or 1) - 1 for plan, row in zip(plans, seen, strict=True)]
        return np.concatenate([of_rows, 0.01 * (factors - 1)])

    factors = np.ones(len(FITTED))
    for _ in range(20):
        here = errors(factors)
        slopes = np.stack([errors(factors + 1e-3 * unit) - here for unit in np.eye(len(FITTED))], axis=1) / 1e-3
        factors = np.clip(factors - 0.5 * np.linalg.lstsq(slopes, here, rcond=None)[0], 0.0, 10.0)
    return with_factors(factors)


def table(rows: Sequence[Measured]) -> str:
    """Write Markdown."""
    lines = [
        "| configuration | fitted to | predicted GiB | measured GiB | error | held by torch | tiles/s | passes |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        seen = "-" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        error = "-" if row.error is None else f"{row.error:+.1%}"
        held = "-" if row.reserved_gib is None else f"{row.reserved_gib:.2f}"
        speed = "-" if row.tiles_per_s is None else f"{row.tiles_per_s:.0f}"
        lines.append(
            f"| {row.configuration} | {'no' if row.held_out else 'yes'} | {row.plan.peak_bytes / GIB:.2f} | {seen} | "
            f"{error} | {held} | {speed} | {row.plan.passes:.2f} |"
        )
    return "\n".join(lines)


def worst(rows: Sequence[Measured]) -> str:
    """Say how far off the prediction is at most, of what it was not fitted to."""
    errors = [abs(row.error) for row in rows if row.held_out and row.error is not None]
    return f"worst error of {len(errors)} held-out configurations: {max(errors):.1%}" if errors else "nothing measured"


def as_code(coefficients: Coefficients) -> str:
    """Write them to be pasted."""
    values = "\n".join(f"    {name}={value:.4g}," for name, value in asdict(coefficients).items())
    return f"Coefficients(\n{values}\n)"


def main() -> None:
    """Measure, and fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="also measure what is fitted to, and print coefficients")
    parser.add_argument("--plain", action="store_true", help="without compiled blocks")
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    args = parser.parse_args()
    device = torch.device(args.device)
    compiled = can_compile(device) and not args.plain
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU (no memory is measured)"
    print(f"{name}; tapfm {tapfm.__version__}, torch {torch.__version__}, timm {timm.__version__}")
    print(f"random weights, bfloat16, {'compiled' if compiled else 'plain'} blocks", flush=True)
    asked = [(each, False) for each in FIT if args.fit] + [(each, True) for each in HELD_OUT]
    asked = sorted((pair for pair in asked if args.only in str(pair[0])), key=lambda pair: pair[0].encoder)
    rows = []
    for configuration, held_out in asked:
        start = time.perf_counter()
        rows.append(measure(configuration, device, compiled=compiled, held_out=held_out))
        error = "" if rows[-1].error is None else f", {rows[-1].error:+.1%}"
        print(f"  {configuration}: {time.perf_counter() - start:.0f} s{error}", flush=True)
    print(f"\n{table(rows)}\n\n{worst(rows)}")
    coefficients = COMPILED if compiled else EAGER
    measured = [row for row in rows if not row.held_out and row.peak_gib is not None]
    if args.fit and measured:
        coefficients = fitted(measured, coefficients, compiled)
        again = [
            dataclasses.replace(row, plan=prediction(row.configuration, row.shape, compiled, coefficients))
            for row in rows
        ]
        print(f"\nFitted anew:\n\n{as_code(coefficients)}\n\n{table(again)}\n\n{worst(again)}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "machine": name,
            "coefficients": asdict(coefficients),
            "rows": [asdict(row) | {"error": row.error, "predicted_bytes": row.plan.peak_bytes} for row in rows],
        }
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
