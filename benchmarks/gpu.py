"""Compare tapfm's training step on a GPU with a step in the style of published code: speed, memory and gradients.

    python benchmarks/gpu.py                          # everything; about 8 minutes on an H200
    python benchmarks/gpu.py --only step uni          # only some parts, see --help
    python benchmarks/gpu.py --profile step           # profile one step, by kernel
    python benchmarks/gpu.py --json out/gpu.json

Prints Markdown. Weights and tiles are random; tiles are in pinned host memory. A memory limit is set with
torch.cuda.set_per_process_memory_fraction. Step times are of a loop of steps with both optimisers, with one
synchronisation at the end. Encoding times are the median of seven runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

import tapfm
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.plan_text import describe_optimiser, describe_recompute
from tapfm.adaptation.planner import StepPlan, plan_step
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.cls_attention import ClsAttention, compute_tile_weights
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.inference import prepare_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.inference.bags import Bag
from tapfm.runs.model import SlideModel
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels

GIB = 2**30
DEVICE = torch.device("cuda")
TASK = BinaryTask.from_training_labels("FGFR3", [1] * 16 + [0] * 84)
TARGETS = encode_labels([1])
GIANT, LARGE = "h-optimus-0", "uni"
PARTS = ("peak", "gradients", "encode", "step", "large", "lora", "uni", "small", "whole")


@dataclass
class Row:
    """One measurement. `ratio` is the speed relative to the reference: the step or the encoding of published code."""

    task: str
    strategy: str
    tiles: int
    limit_gib: float | None
    tiles_per_s: float | None
    peak_gib: float | None = None  # allocated by tensors
    reserved_gib: float | None = None  # by torch's allocator
    predicted_gib: float | None = None
    ratio: float | None = None
    peak_fraction: float | None = None  # of the speed of a matrix product


class HostTiles:
    """Many tiles that share the pixels of a few in pinned host memory. Slices are copied to the GPU."""

    def __init__(self, pixels: Tensor, count: int) -> None:
        self._pixels, self._count = pixels, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: slice | Tensor, /) -> Tensor:
        if isinstance(rows, Tensor):
            return self._pixels[rows % len(self._pixels)].to(DEVICE)
        size = min(rows.stop, self._count) - rows.start
        start = rows.start % (len(self._pixels) - size + 1)
        return self._pixels[start : start + size].to(DEVICE, non_blocking=True)


class Bench:
    """Runs the measurements one after the other, each alone on the GPU."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.results: dict[str, Any] = {}
        self.peak_flop_per_s = 0.0
        torch.manual_seed(0)
        self.pixels = torch.randint(0, 256, (1024, 3, 224, 224), dtype=torch.uint8).pin_memory()

    def add(self, row: Row) -> None:
        """Store and print a row."""
        self.rows.append(row)
        speed = "does not fit" if row.tiles_per_s is None else f"{row.tiles_per_s:,.1f} tiles/s"
        memory = (
            "" if row.peak_gib is None else f", {row.peak_gib:.1f} GiB allocated, {row.reserved_gib:.1f} GiB reserved"
        )
        print(f"  {row.task}: {speed}{memory} [{row.strategy}]", flush=True)

    def measure_matrix_product(self) -> None:
        """Measure the speed of a product of random matrices."""
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        seconds = statistics.median(time_on_gpu(lambda: a @ b) for _ in range(20))
        self.peak_flop_per_s = 2 * 8192**3 / seconds
        self.results["matrix_peak_tflop_per_s"] = self.peak_flop_per_s / 1e12
        print(f"matrix peak (bfloat16 matrix product): {self.peak_flop_per_s / 1e12:.0f} TFLOP/s", flush=True)

    def compare_encoding(self) -> None:
        """Measure inference: eager under autocast, as in published code, and as in `tapfm predict`."""
        reference = self.measure_autocast_encoding()
        for precision in ("bfloat16", "float8"):
            self.measure_prepared_encoding(precision, reference)
            free_memory()

    @torch.no_grad()
    def measure_autocast_encoding(self) -> Row:
        encoder = build_random_encoder(GIANT).eval()

        def encode_with_autocast() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                encoder(self.pixels[:64])

        return self.measure_encoding("autocast, eager", encode_with_autocast, 64)

    def measure_prepared_encoding(self, precision: Any, reference: Row) -> None:
        prepared = prepare_encoder(build_random_encoder(GIANT).eval(), precision, compiled=True)
        for batch in (64, 128):
            strategy = f"{precision}, compiled, batches of {batch}"
            row = self.measure_encoding(strategy, partial(prepared.encode, self.pixels[:512], batch), 512)
            row.ratio = (row.tiles_per_s or 0) / (reference.tiles_per_s or 1)

    def measure_encoding(self, strategy: str, run: Callable[[], object], tiles: int) -> Row:
        for _ in range(3):
            run()
        with record_peak_memory() as peaks:
            speed = tiles / statistics.median(time_on_gpu(run) for _ in range(7))
        flop = 1e9 * (find_encoder_card(GIANT).gflops or 0)
        peak_fraction = speed * flop / self.peak_flop_per_s if self.peak_flop_per_s else None
        row = Row(f"{GIANT}: encode", strategy, tiles, None, speed, peaks[0], peaks[1], peak_fraction=peak_fraction)
        self.add(row)
        return row

    def measure_steps(
        self, encoder: str, tiles: int, limits_gib: list[float], *, reference: bool = True, **settings: Any
    ) -> None:
        """Measure the reference step, and tapfm's step as planned for each memory limit."""
        reference_speed = self.measure_reference_step(encoder, tiles) if reference else None
        for limit_gib in limits_gib:
            self.measure_planned_step(encoder, tiles, limit_gib, reference_speed, **settings)

    def measure_reference_step(self, key: str, tiles: int) -> float | None:
        """Measure a step as in published code: one graph, fp16 autocast, a hook that computes the N x N attention."""
        encoder = build_random_encoder(key).train()
        aggregator = ClsAttention(encoder.feature_size).to(DEVICE)
        vit, inputs = encoder.vit, list[Tensor]()
        attn = vit.blocks[-1].attn
        attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-6)
        aggregator_optimizer = torch.optim.AdamW(aggregator.parameters(), lr=1e-5)
        targets = TARGETS.to(DEVICE)

        def step(count: int) -> None:
            pixels = (self.pixels[:count].to(DEVICE, non_blocking=True).float() - encoder.mean) / encoder.std
            with torch.autocast("cuda", torch.float16):
                z_KD = vit.forward_features(pixels)[:, 0]
                q, k, _ = attn.qkv(inputs.pop()).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
                attention = ((q * attn.scale) @ k.transpose(-2, -1)).softmax(-1)
                a_K = compute_tile_weights(attention.mean(1)[:, 0, vit.num_prefix_tokens :].mean(1).float(), tau=0.1)
            z_leaf, a_leaf = z_KD.detach().float().requires_grad_(), a_K.detach().requires_grad_()
            loss = TASK.loss(aggregator.classifier(a_leaf @ z_leaf), targets)
            torch.autograd.backward(loss)
            aggregator_optimizer.step()
            assert z_leaf.grad is not None
            assert a_leaf.grad is not None
            torch.autograd.backward((z_KD.float() * z_leaf.grad).sum() + (a_K * a_leaf.grad).sum())
            optimizer.step()
            optimizer.zero_grad()
            aggregator_optimizer.zero_grad()

        speed, peak, reserved = run_steps(step, tiles, warmup_tiles=tiles)
        self.add(Row(f"{key}: full step", "reference", tiles, None, speed, peak, reserved, ratio=1.0))
        return speed

    def measure_planned_step(
        self,
        key: str,
        tiles: int,
        limit_gib: float,
        reference_speed: float | None,
        *,
        scope: str = "full",
        **settings: Any,
    ) -> None:
        """Measure tapfm's step with a memory limit."""
        with limit_memory(limit_gib):
            self.add(self.time_planned_step(key, tiles, limit_gib, reference_speed, scope=scope, **settings))

    def time_planned_step(
        self, key: str, tiles: int, limit_gib: float, reference_speed: float | None, *, scope: str, **settings: Any
    ) -> Row:
        """Build a learner and time its steps. Its memory is freed on return."""
        learner, plan, shape = build_planned_learner(key, tiles, limit_gib, scope=scope, **settings)
        bag = make_bag(HostTiles(self.pixels, tiles))
        warmup_bag = make_bag(HostTiles(self.pixels, min(tiles, 2 * plan.chunk)))

        def step(count: int) -> None:
            learner.train_step(bag if count == tiles else warmup_bag, TARGETS, update=True, slide_id="slide")

        speed, peak, reserved = run_steps(step, tiles, warmup_tiles=len(warmup_bag.rows))
        strategy = (
            f"{plan.strategy}, chunks of {plan.chunk}, {plan.graphs_kept} graphs kept; "
            if plan.strategy != "one-pass"
            else "one pass; "
        )
        strategy += f"recomputed: {describe_recompute(plan.recompute, shape)}; {describe_optimiser(plan)}"
        task = f"{key}: {'full step' if scope == 'full' else scope}"
        ratio = speed / reference_speed if speed and reference_speed else None
        return Row(task, strategy, tiles, limit_gib, speed, peak, reserved, plan.peak_bytes / GIB, ratio)

    def check_gradients(self) -> None:
        """Compare gradients and a loss curve with eager float32."""
        print("gradient compared with eager float32, K = 24, architecture of UNI:", flush=True)
        exact = compute_gradient(make_learner(), self.pixels[:24])
        variants: dict[str, tuple[Chunking, OptimiserSettings, dict[str, Any]]] = {
            "float32, compiled, chunks of 7": (
                Chunking(7, keep_graphs=1),
                OptimiserSettings(compiled=True),
                {"compiled": True},
            ),
            **{
                f"bfloat16, compiled, recompute {level}": (
                    Chunking(),
                    OptimiserSettings(weights_dtype=torch.bfloat16, compiled=True, float32_gradients=False),
                    {"compiled": True, "recompute": level},
                )
                for level in ("nothing", "pointwise", "mlp", "block")
            },
            "bfloat16, compiled, chunks of 7": (
                Chunking(7, keep_graphs=0),
                OptimiserSettings(weights_dtype=torch.bfloat16, compiled=True),
                {"compiled": True, "recompute": "pointwise"},
            ),
            "bfloat16 autocast, eager": (Chunking(), OptimiserSettings(), {"compute_dtype": torch.bfloat16}),
            "float16 autocast, loss scale": (Chunking(), OptimiserSettings(), {"compute_dtype": torch.float16}),
        }
        for name, (chunking, optimiser_settings, options) in variants.items():
            gradient = compute_gradient(make_learner(chunking, optimiser_settings, **options), self.pixels[:24])
            cosine = float(torch.dot(gradient, exact) / (gradient.norm() * exact.norm()))
            self.results[f"cosine: {name}"] = cosine
            print(
                f"  {name}: cosine {cosine:.6f}, relative norm {float(gradient.norm() / exact.norm()):.4f}", flush=True
            )
        curves = {"float32": self.compute_losses(make_learner(encoder_lr=1e-5))}
        for name in ("bfloat16, compiled, chunks of 7", "float16 autocast, loss scale"):
            chunking, optimiser_settings, options = variants[name]
            curves[name] = self.compute_losses(make_learner(chunking, optimiser_settings, encoder_lr=1e-5, **options))
        self.results["curves"] = curves
        print("every fifth loss of 30 steps over 6 slides, with a fixed seed:", flush=True)
        for name, losses in curves.items():
            difference = max(abs(a - b) for a, b in zip(losses, curves["float32"], strict=True))
            print(
                f"  {name}: {' '.join(f'{loss:.4f}' for loss in losses[::5])}; largest difference {difference:.4f}",
                flush=True,
            )

    def compute_losses(self, learner: Learner) -> list[float]:
        """Return the losses of 30 steps on six slides in turn, three of them positive."""
        learner.start_epoch(0)
        losses = []
        for step in range(30):
            slide = step % 6
            pixels = self.pixels[24 * slide : 24 * (slide + 1)]
            report = learner.train_step(make_bag(pixels), encode_labels([slide % 2]), update=True, slide_id=str(slide))
            losses.append(report.loss_agg)
        return torch.stack(losses).tolist()

    def profile_step(self, key: str, tiles: int, limit_gib: float) -> str:
        """Return a table of the kernels of one step with their times."""
        learner, _, _ = build_planned_learner(key, tiles, limit_gib)
        bag = make_bag(HostTiles(self.pixels, tiles))
        for _ in range(3):
            learner.train_step(bag, TARGETS, update=True, slide_id="slide")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            learner.train_step(bag, TARGETS, update=True, slide_id="slide")
            torch.cuda.synchronize()
        return profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=70)

    def format_table(self) -> str:
        lines = [
            "| | K | limit, GiB | tiles/s | speed / reference | allocated, GiB | reserved, GiB | predicted, GiB "
            "| strategy |",
            "|---|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for row in self.rows:
            fraction = f"; {row.peak_fraction:.0%} of the measured peak of matrix products" if row.peak_fraction else ""
            speed = "does not fit" if row.tiles_per_s is None else f"{row.tiles_per_s:,.0f}"
            cells = [
                row.task,
                f"{row.tiles:,}",
                format_or_dash(row.limit_gib, ".0f"),
                speed,
                format_or_dash(row.ratio, ".2f"),
                format_or_dash(row.peak_gib, ".1f"),
                format_or_dash(row.reserved_gib, ".1f"),
                format_or_dash(row.predicted_gib, ".1f"),
                row.strategy + fraction,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def format_or_dash(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def build_random_encoder(key: str, scope: str = "full") -> VitEncoder:
    """Build an encoder on the GPU, with random weights in which every block has an effect."""
    card = find_encoder_card(key)
    torch.manual_seed(0)
    with DEVICE:
        vit = build_vit(card)
        for name, parameter in vit.named_parameters():
            if name.endswith(
                (".gamma", "cls_token", "reg_token")
            ):  # with its initial values, LayerScale almost removes the blocks
                nn.init.normal_(parameter, std=0.5)
        encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature)
        apply_scope(encoder, Scope.parse(scope))
    return encoder.to(DEVICE)


def build_planned_learner(
    key: str, tiles: int, limit_gib: float, *, scope: str = "full", **settings: Any
) -> tuple[Learner, StepPlan, EncoderShape]:
    """Build the learner that `tapfm train` would build with this memory."""
    encoder = build_random_encoder(key, scope)
    shape = EncoderShape.from_encoder(encoder)
    plan = plan_step(
        shape, tiles=tiles, free_bytes=int(limit_gib * GIB), precision="bfloat16", compiled=True, **settings
    )
    encoder.recompute = plan.recompute
    encoder.compile_blocks()
    model = SlideModel(encoder, ClsAttention(encoder.feature_size).to(DEVICE), TASK)
    optimiser_settings = OptimiserSettings(
        weights_dtype=torch.bfloat16,
        float32_gradients=plan.float32_gradients,
        moments=plan.moments,
        offload=plan.offload,
        compiled=True,
    )
    chunking = Chunking() if plan.strategy == "one-pass" else Chunking(plan.chunk, plan.graphs_kept)
    adaptation = AdaptationSettings(chunking=chunking, backward_tiles=plan.backward_tiles)
    learner = Learner(
        model,
        adaptation,
        optimiser_settings,
        on_smaller_chunks=lambda size: print(f"  out of memory; retrying with {size} tiles per chunk"),
    )
    learner.start_epoch(0)
    gc.collect()
    torch.cuda.empty_cache()
    return learner, plan, shape


def make_learner(
    chunking: Chunking = Chunking(),  # noqa: B008 - frozen
    optimiser_settings: OptimiserSettings = OptimiserSettings(),  # noqa: B008 - frozen
    *,
    compute_dtype: torch.dtype | None = None,
    compiled: bool = False,
    recompute: Any = "nothing",
    encoder_lr: float = 0.0,
) -> Learner:
    """Build a learner with the architecture of UNI and the same weights every time."""
    encoder = build_random_encoder(LARGE)
    encoder.recompute = (recompute,) * len(encoder.recompute)
    encoder.compile_blocks(compiled)
    torch.manual_seed(1)
    aggregator = ClsAttention(encoder.feature_size).to(DEVICE)
    values = asdict(optimiser_settings) | {
        "encoder_lr": encoder_lr,
        "aggregator_lr": 100 * encoder_lr,
        "schedule": optimiser_settings.schedule,
    }
    model = SlideModel(encoder, aggregator, TASK, compute_dtype)
    return Learner(
        model, AdaptationSettings(chunking=chunking, compute_dtype=compute_dtype), OptimiserSettings(**values)
    )


def compute_gradient(learner: Learner, pixels: Tensor) -> Tensor:
    """Return the encoder's gradient of one step, without an update."""
    learner.start_epoch(0)
    learner.train_step(make_bag(pixels), TARGETS, update=False, slide_id="slide")
    assert learner.model.encoder is not None
    gradient = torch.cat([p.grad.flatten().double() for p in learner.model.encoder.parameters() if p.grad is not None])
    scale = learner.state().get("moments/loss_scale/value")
    return gradient if scale is None else gradient / scale


def make_bag(tiles: Any) -> Bag:
    return Bag(tiles, np.arange(len(tiles)))


def run_steps(
    step: Callable[[int], None], tiles: int, *, warmup_tiles: int
) -> tuple[float | None, float | None, float | None]:
    """Return tiles per second, peak allocated GiB and peak reserved GiB. All are None if out of memory."""
    repeats = 8 if tiles <= 512 else 1
    try:
        for _ in range(3):
            step(warmup_tiles)
        with record_peak_memory() as peaks:
            start = time.perf_counter()
            for _ in range(repeats):
                step(tiles)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / repeats
        return tiles / seconds, peaks[0], peaks[1]
    except torch.OutOfMemoryError:
        return None, None, None


@contextmanager
def record_peak_memory() -> Iterator[list[float]]:
    """Yield a list that contains the peak allocated GiB and peak reserved GiB after the context."""
    peaks: list[float] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    yield peaks
    torch.cuda.synchronize()
    peaks += [torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB]


@contextmanager
def limit_memory(limit_gib: float) -> Iterator[None]:
    """Limit the GPU memory that torch can use."""
    free_memory()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / torch.cuda.mem_get_info()[1]))
    try:
        yield
    finally:
        free_memory()
        torch.cuda.set_per_process_memory_fraction(1.0)


def time_on_gpu(run: Callable[[], object]) -> float:
    """Return the seconds that a function takes on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="run only these parts")
    parser.add_argument(
        "--profile", choices=("step", "uni"), default=None, help="only profile one step of this part, by kernel"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the results to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs an NVIDIA GPU, but torch found none. On a CPU, use: tapfm bench")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device_name = torch.cuda.get_device_name()
    print(f"{device_name}; tapfm {tapfm.__version__}, torch {torch.__version__}, timm {timm.__version__}", flush=True)
    bench = Bench()
    if arguments.profile is not None:
        print(bench.profile_step(*{"step": (GIANT, 75, 60.0), "uni": (LARGE, 300, 45.0)}[arguments.profile]))
        return
    parts: dict[str, Callable[[], None]] = {
        "peak": bench.measure_matrix_product,
        "gradients": bench.check_gradients,
        "encode": bench.compare_encoding,
        "step": lambda: bench.measure_steps(GIANT, 75, [60.0, 40.0]),
        "large": lambda: bench.measure_steps(GIANT, 4096, [24.0, 80.0], reference=False),
        "lora": lambda: bench.measure_steps(GIANT, 1024, [8.0], reference=False, scope="lora:16"),
        "uni": lambda: bench.measure_steps(LARGE, 300, [45.0, 25.0]),
        "small": lambda: bench.measure_steps(GIANT, 75, [24.0, 16.0, 12.0], reference=False),
        "whole": lambda: bench.measure_steps(GIANT, 20_000, [24.0], reference=False),  # all tiles of a large slide
    }
    for part in arguments.only:
        parts[part]()
        free_memory()
    print("\n" + bench.format_table())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        values = {"machine": device_name, "results": bench.results, "rows": [asdict(row) for row in bench.rows]}
        arguments.json.write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
