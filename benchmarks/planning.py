"""Compare the peak memory that the planner predicts with measurements on this GPU.

    python benchmarks/planning.py                 # 8 configurations that the coefficients were not fitted to
    python benchmarks/planning.py --fit           # also the others; fits and prints new coefficients
    python benchmarks/planning.py --json out/planning.json

Builds each configuration with random weights, runs three steps and reads the peak memory from torch. Prints Markdown:
predicted and measured GiB, the memory that torch reserved, tiles per second, and the predicted work per tile in forward
passes.
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
from tapfm.adaptation.step_coefficients import COMPILED, EAGER, Coefficients
from tapfm.adaptation.step_costs import GIB
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.blocks import Recompute
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.precision import can_compile_on_gpu
from tapfm.encoders.vit import VitEncoder
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels

TASK = BinaryTask.from_training_labels("FGFR3", [1] * 16 + [0] * 84)
TARGETS = encode_labels([1])
FITTED = ("saved_at_nothing", "saved_at_pointwise", "saved_at_mlp", "backward", "adapters_backward", "overhead_bytes")


@dataclass(frozen=True)
class Configuration:
    """Strategy of a step.

    recompute: (level, number of blocks) pairs, from the first block on. The last pair applies to all other blocks.
    """

    encoder: str
    tiles: int
    scope: str = "full"
    chunk: int | None = None
    graphs_kept: int = 1
    recompute: tuple[tuple[Recompute, int], ...] = (("nothing", 0),)
    moments: MomentFormat = "float32"
    offload: bool = False
    backward_tiles: int | None = None

    def levels(self, depth: int) -> tuple[Recompute, ...]:
        """Return the level of each block."""
        levels = [level for level, count in self.recompute[:-1] for _ in range(count)]
        return (*levels, *[self.recompute[-1][0]] * (depth - len(levels)))

    def __str__(self) -> str:
        chunk = "one chunk" if self.chunk is None else f"chunks of {self.chunk}, {self.graphs_kept} kept"
        levels = " / ".join(f"{count} x {level}" if count else level for level, count in self.recompute)
        subset = "" if self.backward_tiles is None else f", {self.backward_tiles} backward tiles"
        where = " on the CPU" if self.offload else ""
        return f"{self.encoder} {self.scope}, K = {self.tiles}, {chunk}{subset}; {levels}; {self.moments}{where}"


def recompute_level(name: Recompute, count: int = 0) -> tuple[Recompute, int]:
    """Return a pair for `Configuration.recompute`."""
    return name, count


# Sorted by encoder, so that compiled code is reused.
FIT = [
    Configuration("uni", 128),
    Configuration("uni", 256, recompute=(recompute_level("pointwise"),)),
    Configuration("uni", 256, recompute=(recompute_level("mlp"),)),
    Configuration("uni", 512, chunk=256, recompute=(recompute_level("block"),)),
    Configuration("uni", 128, scope="last:6"),
    Configuration("uni", 192, scope="lora:8", recompute=(recompute_level("mlp"),)),
    Configuration("h-optimus-0", 24),
    Configuration("h-optimus-0", 96, recompute=(recompute_level("block"),)),
    Configuration("h-optimus-0", 96, chunk=32, graphs_kept=2, recompute=(recompute_level("mlp"),)),
]
HELD_OUT = [
    Configuration("uni", 300, recompute=(recompute_level("pointwise", 10), recompute_level("nothing"))),
    Configuration("uni", 384, chunk=96, graphs_kept=3, recompute=(recompute_level("mlp"),), moments="bfloat16"),
    Configuration("uni", 200, scope="last:4", chunk=100),
    Configuration("h-optimus-0", 75, recompute=(recompute_level("mlp", 11), recompute_level("pointwise"))),
    Configuration(
        "h-optimus-0", 160, chunk=40, recompute=(recompute_level("block", 30), recompute_level("mlp")), moments="int8"
    ),
    Configuration("h-optimus-0", 64, chunk=16, recompute=(recompute_level("block"),), offload=True),
    Configuration("h-optimus-0", 128, scope="lora:16", chunk=64, recompute=(recompute_level("block"),)),
    Configuration("dinov2-s14", 1024, chunk=512, graphs_kept=2),
]


@dataclass(frozen=True)
class Measurement:
    """Predicted and measured memory of a configuration."""

    configuration: Configuration
    held_out: bool
    plan: StepPlan
    shape: EncoderShape
    peak_gib: float | None
    reserved_gib: float | None
    tiles_per_s: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.peak_gib is None else self.plan.peak_bytes / GIB / self.peak_gib - 1


def build_step(
    configuration: Configuration, device: torch.device, compiled: bool
) -> tuple[EncoderShape, Callable[[], None]]:
    """Build a model, and return its shape and a function that runs one training step."""
    card = find_encoder_card(configuration.encoder)
    torch.manual_seed(0)
    with device:
        vit = build_vit(card)
        encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature)
        aggregator = ClsAttention(encoder.feature_size)
    apply_scope(encoder, Scope.parse(configuration.scope))
    encoder.to(device)  # adapters may have been created on the CPU
    shape = EncoderShape.from_encoder(encoder)
    encoder.recompute = configuration.levels(shape.depth)
    encoder.compile_blocks(compiled)
    adaptation = AdaptationSettings(
        chunking=Chunking(configuration.chunk, configuration.graphs_kept), backward_tiles=configuration.backward_tiles
    )
    optimiser_settings = OptimiserSettings(
        weights_dtype=torch.bfloat16,
        float32_gradients=predict(configuration, shape, compiled, None).float32_gradients,
        moments=configuration.moments,
        offload=configuration.offload,
        compiled=compiled,
    )
    learner = Learner(SlideModel(encoder, aggregator, TASK), adaptation, optimiser_settings)
    learner.start_epoch(0)
    tiles = torch.randint(0, 256, (configuration.tiles, 3, card.tile_px, card.tile_px), dtype=torch.uint8)
    bag = Bag(tiles.pin_memory() if device.type == "cuda" else tiles, np.arange(configuration.tiles))

    def step() -> None:
        learner.train_step(bag, TARGETS, update=True, slide_id="random")
        if learner.adaptation.chunking != adaptation.chunking:  # the learner retried with smaller chunks
            raise torch.OutOfMemoryError

    return shape, step


def predict(
    configuration: Configuration, shape: EncoderShape, compiled: bool, coefficients: Coefficients | None
) -> StepPlan:
    return predict_step(
        shape,
        tiles=configuration.tiles,
        precision="bfloat16",
        compiled=compiled,
        chunk=configuration.chunk,
        graphs_kept=configuration.graphs_kept,
        recompute=configuration.levels(shape.depth),
        moments=configuration.moments,
        offload=configuration.offload,
        backward_tiles=configuration.backward_tiles,
        coefficients=coefficients,
    )


def measure(configuration: Configuration, device: torch.device, *, compiled: bool, held_out: bool) -> Measurement:
    """Run three steps. The first one compiles and is not measured."""
    cuda = device.type == "cuda"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if cuda else 0
    shape, step = build_step(configuration, device, compiled)
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
    plan = predict(configuration, shape, compiled, None)
    return Measurement(configuration, held_out, plan, shape, peak, reserved, speed)


def fit_coefficients(rows: Sequence[Measurement], start: Coefficients, compiled: bool) -> Coefficients:
    """Fit coefficients to the measurements: least squares of relative errors, with a penalty on changes."""
    measured = [row for row in rows if row.peak_gib is not None]
    first = np.array([getattr(start, name) for name in FITTED])

    def with_factors(factors: NDArray[np.float64]) -> Coefficients:
        return dataclasses.replace(start, **dict(zip(FITTED, (first * factors).tolist(), strict=True)))

    def errors(factors: NDArray[np.float64]) -> NDArray[np.float64]:
        plans = [predict(row.configuration, row.shape, compiled, with_factors(factors)) for row in measured]
        row_errors = [
            plan.peak_bytes / GIB / (row.peak_gib or 1) - 1 for plan, row in zip(plans, measured, strict=True)
        ]
        return np.concatenate([row_errors, 0.01 * (factors - 1)])

    factors = np.ones(len(FITTED))
    for _ in range(20):
        current = errors(factors)
        slopes = np.stack([errors(factors + 1e-3 * unit) - current for unit in np.eye(len(FITTED))], axis=1) / 1e-3
        factors = np.clip(factors - 0.5 * np.linalg.lstsq(slopes, current, rcond=None)[0], 0.0, 10.0)
    return with_factors(factors)


def format_table(rows: Sequence[Measurement]) -> str:
    lines = [
        "| configuration | used for fit | predicted, GiB | measured, GiB | error | reserved, GiB | tiles/s | passes |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        error = "-" if row.error is None else f"{row.error:+.1%}"
        reserved = "-" if row.reserved_gib is None else f"{row.reserved_gib:.2f}"
        speed = "-" if row.tiles_per_s is None else f"{row.tiles_per_s:.0f}"
        lines.append(
            f"| {row.configuration} | {'no' if row.held_out else 'yes'} | {row.plan.peak_bytes / GIB:.2f} | {peak} | "
            f"{error} | {reserved} | {speed} | {row.plan.passes:.2f} |"
        )
    return "\n".join(lines)


def describe_largest_error(rows: Sequence[Measurement]) -> str:
    errors = [abs(row.error) for row in rows if row.held_out and row.error is not None]
    if not errors:
        return "No held-out configuration was measured."
    return f"Largest error of {len(errors)} held-out configurations: {max(errors):.1%}"


def format_code(coefficients: Coefficients) -> str:
    """Return Python code that can be pasted into step_coefficients.py."""
    values = "\n".join(f"    {name}={value:.4g}," for name, value in asdict(coefficients).items())
    return f"Coefficients(\n{values}\n)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fit", action="store_true", help="also measure the configurations for the fit, and print fitted coefficients"
    )
    parser.add_argument("--eager", action="store_true", help="without compiled blocks")
    parser.add_argument("--only", default="", help="only configurations whose name contains this text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    compiled = can_compile_on_gpu(device) and not args.eager
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU (memory is not measured)"
    print(f"{name}; tapfm {tapfm.__version__}, torch {torch.__version__}, timm {timm.__version__}")
    print(f"random weights, bfloat16, {'compiled' if compiled else 'eager'} blocks", flush=True)
    selected = [(each, False) for each in FIT if args.fit] + [(each, True) for each in HELD_OUT]
    selected = sorted((pair for pair in selected if args.only in str(pair[0])), key=lambda pair: pair[0].encoder)
    rows = []
    for configuration, held_out in selected:
        start = time.perf_counter()
        rows.append(measure(configuration, device, compiled=compiled, held_out=held_out))
        error = "" if rows[-1].error is None else f", {rows[-1].error:+.1%}"
        print(f"  {configuration}: {time.perf_counter() - start:.0f} s{error}", flush=True)
    print(f"\n{format_table(rows)}\n\n{describe_largest_error(rows)}")
    coefficients = COMPILED if compiled else EAGER
    measured = [row for row in rows if not row.held_out and row.peak_gib is not None]
    if args.fit and measured:
        coefficients = fit_coefficients(measured, coefficients, compiled)
        refitted = [
            dataclasses.replace(row, plan=predict(row.configuration, row.shape, compiled, coefficients)) for row in rows
        ]
        print(f"\nNew coefficients:\n\n{format_code(coefficients)}\n\n{format_table(refitted)}\n")
        print(describe_largest_error(refitted))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "machine": name,
            "coefficients": asdict(coefficients),
            "rows": [asdict(row) | {"error": row.error, "predicted_bytes": row.plan.peak_bytes} for row in rows],
        }
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
