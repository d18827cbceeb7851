"""The GPU engine beside a reference-style step, in one run on one GPU: speed, memory under a cap, equality.

    python benchmarks/gpu.py                          # everything; about 8 minutes on an H200
    python benchmarks/gpu.py --only step uni          # some of it: peak proof encode step large lora uni small whole
    python benchmarks/gpu.py --profile step           # where the time of one step goes, by kernel
    python benchmarks/gpu.py --json out/gpu.json

Prints Markdown. Weights and tiles are random, tiles come from pinned host memory. A cap is set by
torch.cuda.set_per_process_memory_fraction: what torch takes from the card never exceeds it. Times are those of a loop
of steps, optimisers included, that the device is waited for only once.
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
from tapfm.aggregators.cls_attention import ClsAttention, tile_weights
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
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
PARTS = ("peak", "proof", "encode", "step", "large", "lora", "uni", "small", "whole")


@dataclass
class Row:
    """One measurement; `ratio` is to the reference-style step of the same run."""

    what: str
    way: str
    tiles: int
    cap_gib: float | None
    tiles_per_s: float | None
    peak_gib: float | None = None  # in tensors
    held_gib: float | None = None  # taken from the card
    predicted_gib: float | None = None
    ratio: float | None = None
    share_of_peak: float | None = None


class HostTiles:
    """Many tiles, made of a few: any slice is one of pinned memory. What is in them does not change speed."""

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
    """Measures one thing after the other, each alone on the card."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.peak_flop_per_s = 0.0
        torch.manual_seed(0)
        self.pixels = torch.randint(0, 256, (1024, 3, 224, 224), dtype=torch.uint8).pin_memory()

    def add(self, row: Row) -> None:
        """Note a row, and say it."""
        self.rows.append(row)
        speed = "does not fit" if row.tiles_per_s is None else f"{row.tiles_per_s:,.1f} tiles/s"
        memory = "" if row.peak_gib is None else f", {row.peak_gib:.1f} GiB in tensors, {row.held_gib:.1f} held"
        print(f"  {row.what}: {speed}{memory} [{row.way}]", flush=True)

    def matrix_peak(self) -> None:
        """Measure what the card's matrix units do at most, on random numbers."""
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        seconds = statistics.median(timed(lambda: a @ b) for _ in range(20))
        self.peak_flop_per_s = 2 * 8192**3 / seconds
        self.facts["matrix_peak_tflop_per_s"] = self.peak_flop_per_s / 1e12
        print(f"bfloat16 matrix peak: {self.peak_flop_per_s / 1e12:.0f} TFLOP/s", flush=True)

    def encode(self) -> None:
        """Encode without a graph: eager under autocast, as published code does, and as `tapfm predict` does."""
        reference = self.encode_eagerly()
        for precision in ("bfloat16", "float8"):
            self.encode_ready(precision, reference)
            free()

    @torch.no_grad()
    def encode_eagerly(self) -> Row:
        """Encode as published code does."""
        encoder = random_encoder(GIANT).eval()

        def autocast() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                encoder(self.pixels[:64])

        return self.encoding("autocast, eager", autocast, 64)

    def encode_ready(self, precision: Any, reference: Row) -> None:
        """Encode as `tapfm predict` does."""
        prepared = prepare_encoder(random_encoder(GIANT).eval(), precision, compiled=True)
        for batch in (64, 128):
            way = f"{precision}, compiled, batches of {batch}"
            row = self.encoding(way, partial(prepared.encode, self.pixels[:512], batch), 512)
            row.ratio = (row.tiles_per_s or 0) / (reference.tiles_per_s or 1)

    def encoding(self, way: str, run: Callable[[], object], tiles: int) -> Row:
        """Time one way to encode."""
        for _ in range(3):
            run()
        with watched() as seen:
            speed = tiles / statistics.median(timed(run) for _ in range(7))
        flop = 1e9 * (encoder_card(GIANT).gflops or 0)
        share = speed * flop / self.peak_flop_per_s if self.peak_flop_per_s else None
        row = Row(f"{GIANT}: encode", way, tiles, None, speed, seen[0], seen[1], share_of_peak=share)
        self.add(row)
        return row

    def steps(self, encoder: str, tiles: int, caps: list[float], *, reference: bool = True, **asked: Any) -> None:
        """The reference-style step, and ours as the planner plans it under each cap."""
        base = self.reference_step(encoder, tiles) if reference else None
        for cap in caps:
            self.planned(encoder, tiles, cap, base, **asked)

    def reference_step(self, key: str, tiles: int) -> float | None:
        """As published code does it: one graph, fp16 autocast, a hook that recomputes the full N x N attention."""
        encoder = random_encoder(key).train()
        aggregator = ClsAttention(encoder.feature_size).to(DEVICE)
        vit, inputs = encoder.vit, list[Tensor]()
        attn = vit.blocks[-1].attn
        attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-6)
        of_aggregator = torch.optim.AdamW(aggregator.parameters(), lr=1e-5)
        targets = TARGETS.to(DEVICE)

        def step(count: int) -> None:
            pixels = (self.pixels[:count].to(DEVICE, non_blocking=True).float() - encoder.mean) / encoder.std
            with torch.autocast("cuda", torch.float16):
                z_KD = vit.forward_features(pixels)[:, 0]
                q, k, _ = attn.qkv(inputs.pop()).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
                attention = ((q * attn.scale) @ k.transpose(-2, -1)).softmax(-1)
                a_K = tile_weights(attention.mean(1)[:, 0, vit.num_prefix_tokens :].mean(1).float(), tau=0.1)
            z_leaf, a_leaf = z_KD.detach().float().requires_grad_(), a_K.detach().requires_grad_()
            loss = TASK.loss(aggregator.classifier(a_leaf @ z_leaf), targets)
            torch.autograd.backward(loss)
            of_aggregator.step()
            assert z_leaf.grad is not None
            assert a_leaf.grad is not None
            torch.autograd.backward((z_KD.float() * z_leaf.grad).sum() + (a_K * a_leaf.grad).sum())
            optimizer.step()
            optimizer.zero_grad()
            of_aggregator.zero_grad()

        speed, peak, held = run_steps(step, tiles, warm_up=tiles)
        self.add(Row(f"{key}: full step", "reference style", tiles, None, speed, peak, held, ratio=1.0))
        return speed

    def planned(
        self, key: str, tiles: int, cap_gib: float, base: float | None, *, scope: str = "full", **asked: Any
    ) -> None:
        """Our step under a cap on the card's memory."""
        with capped(cap_gib):
            self.add(self.planned_row(key, tiles, cap_gib, base, scope=scope, **asked))

    def planned_row(self, key: str, tiles: int, cap_gib: float, base: float | None, *, scope: str, **asked: Any) -> Row:
        """Build it and time it; all of it is let go with the function."""
        learner, plan, shape = planned_learner(key, tiles, cap_gib, scope=scope, **asked)
        bag = bag_of(HostTiles(self.pixels, tiles))
        few = bag_of(HostTiles(self.pixels, min(tiles, 2 * plan.chunk)))

        def step(count: int) -> None:
            learner.train_step(bag if count == tiles else few, TARGETS, update=True, slide_id="slide")

        speed, peak, held = run_steps(step, tiles, warm_up=len(few.rows))
        way = (
            f"{plan.strategy}, chunks of {plan.chunk}, {plan.graphs_kept} kept; "
            if plan.strategy != "one-pass"
            else "one pass; "
        )
        way += f"recomputed: {describe_recompute(plan.recompute, shape)}; {describe_optimiser(plan)}"
        what = f"{key}: {'full step' if scope == 'full' else scope}"
        ratio = speed / base if speed and base else None
        return Row(what, way, tiles, cap_gib, speed, peak, held, plan.peak_bytes / GIB, ratio)

    def proof(self) -> None:
        """Gradients and a loss curve, against plain float32."""
        print("gradient against plain float32, K = 24, UNI's architecture:", flush=True)
        exact = gradient_of(plain_learner(), self.pixels[:24])
        ways: dict[str, tuple[Chunking, OptimiserSettings, dict[str, Any]]] = {
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
        for name, (chunking, optimisation, more) in ways.items():
            ours = gradient_of(plain_learner(chunking, optimisation, **more), self.pixels[:24])
            cosine = float(torch.dot(ours, exact) / (ours.norm() * exact.norm()))
            self.facts[f"cosine: {name}"] = cosine
            print(f"  {name}: cosine {cosine:.6f}, norm {float(ours.norm() / exact.norm()):.4f} of it", flush=True)
        curves = {"float32": self.curve(plain_learner(rate=1e-5))}
        for name in ("bfloat16, compiled, chunks of 7", "float16 autocast, loss scale"):
            chunking, optimisation, more = ways[name]
            curves[name] = self.curve(plain_learner(chunking, optimisation, rate=1e-5, **more))
        self.facts["curves"] = curves
        print("loss of 30 steps over 6 slides, fixed seed, every fifth:", flush=True)
        for name, losses in curves.items():
            off = max(abs(a - b) for a, b in zip(losses, curves["float32"], strict=True))
            print(f"  {name}: {' '.join(f'{loss:.4f}' for loss in losses[::5])}; at most {off:.4f} off", flush=True)

    def curve(self, learner: Learner) -> list[float]:
        """Learn from six slides in turn, three of them positive, and note the losses."""
        learner.start_epoch(0)
        losses = []
        for step in range(30):
            slide = step % 6
            pixels = self.pixels[24 * slide : 24 * (slide + 1)]
            report = learner.train_step(bag_of(pixels), encode_labels([slide % 2]), update=True, slide_id=str(slide))
            losses.append(report.loss_agg)
        return torch.stack(losses).tolist()

    def profile(self, key: str, tiles: int, cap_gib: float) -> str:
        """Say where the time of one step goes."""
        learner, _, _ = planned_learner(key, tiles, cap_gib)
        bag = bag_of(HostTiles(self.pixels, tiles))
        for _ in range(3):
            learner.train_step(bag, TARGETS, update=True, slide_id="slide")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            learner.train_step(bag, TARGETS, update=True, slide_id="slide")
            torch.cuda.synchronize()
        return profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=70)

    def table(self) -> str:
        """Write Markdown."""
        lines = [
            "| | K | cap GiB | tiles/s | to reference | GiB in tensors | GiB held | predicted | way |",
            "|---|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for row in self.rows:
            share = f" ({row.share_of_peak:.0%} of peak)" if row.share_of_peak else ""
            speed = "does not fit" if row.tiles_per_s is None else f"{row.tiles_per_s:,.0f}{share}"
            cells = [
                row.what,
                f"{row.tiles:,}",
                number(row.cap_gib, ".0f"),
                speed,
                number(row.ratio, ".2f"),
                number(row.peak_gib, ".1f"),
                number(row.held_gib, ".1f"),
                number(row.predicted_gib, ".1f"),
                row.way,
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    """Write a number, or that there is none."""
    return "-" if value is None else format(value, form)


def random_encoder(key: str, scope: str = "full") -> VitEncoder:
    """Build an encoder on the card, with random weights that let every block speak."""
    card = encoder_card(key)
    torch.manual_seed(0)
    with DEVICE:
        vit = build_vit(card)
        for name, parameter in vit.named_parameters():
            if name.endswith((".gamma", "cls_token", "reg_token")):  # a fresh LayerScale hides the blocks
                nn.init.normal_(parameter, std=0.5)
        encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature)
        apply_scope(encoder, Scope.parse(scope))
    return encoder.to(DEVICE)


def planned_learner(
    key: str, tiles: int, cap_gib: float, *, scope: str = "full", **asked: Any
) -> tuple[Learner, StepPlan, EncoderShape]:
    """Build what `tapfm train` would on a card of so much memory."""
    encoder = random_encoder(key, scope)
    shape = EncoderShape.of(encoder)
    plan = plan_step(shape, tiles=tiles, free_bytes=int(cap_gib * GIB), precision="bfloat16", compiled=True, **asked)
    encoder.recompute = plan.recompute
    encoder.compile_blocks()
    model = SlideModel(encoder, ClsAttention(encoder.feature_size).to(DEVICE), TASK)
    optimisation = OptimiserSettings(
        weights_dtype=torch.bfloat16,
        float32_gradients=plan.float32_gradients,
        moments=plan.moments,
        offload=plan.offload,
        compiled=True,
    )
    chunking = Chunking() if plan.strategy == "one-pass" else Chunking(plan.chunk, plan.graphs_kept)
    adaptation = AdaptationSettings(chunking=chunking, backward_tiles=plan.backward_tiles)
    learner = Learner(
        model, adaptation, optimisation, on_smaller_chunks=lambda size: print(f"  chunk halved to {size}")
    )
    learner.start_epoch(0)
    gc.collect()
    torch.cuda.empty_cache()
    return learner, plan, shape


def plain_learner(
    chunking: Chunking = Chunking(),  # noqa: B008 - frozen
    optimisation: OptimiserSettings = OptimiserSettings(),  # noqa: B008 - frozen
    *,
    compute_dtype: torch.dtype | None = None,
    compiled: bool = False,
    recompute: Any = "nothing",
    rate: float = 0.0,
) -> Learner:
    """Build UNI's architecture to be compared: always the same weights."""
    encoder = random_encoder(LARGE)
    encoder.recompute = (recompute,) * len(encoder.recompute)
    encoder.compile_blocks(compiled)
    torch.manual_seed(1)
    aggregator = ClsAttention(encoder.feature_size).to(DEVICE)
    values = asdict(optimisation) | {"encoder_lr": rate, "aggregator_lr": 100 * rate, "schedule": optimisation.schedule}
    model = SlideModel(encoder, aggregator, TASK, compute_dtype)
    return Learner(
        model, AdaptationSettings(chunking=chunking, compute_dtype=compute_dtype), OptimiserSettings(**values)
    )


def gradient_of(learner: Learner, pixels: Tensor) -> Tensor:
    """Take a step without an update, and give the encoder's whole gradient."""
    learner.start_epoch(0)
    learner.train_step(bag_of(pixels), TARGETS, update=False, slide_id="slide")
    assert learner.model.encoder is not None
    gradient = torch.cat([p.grad.flatten().double() for p in learner.model.encoder.parameters() if p.grad is not None])
    scale = learner.state().get("moments/loss_scale/value")
    return gradient if scale is None else gradient / scale


def bag_of(tiles: Any) -> Bag:
    """Make a bag of tiles."""
    return Bag(tiles, np.arange(len(tiles)))


def run_steps(
    step: Callable[[int], None], tiles: int, *, warm_up: int
) -> tuple[float | None, float | None, float | None]:
    """Give tiles per second of steps, and the peak of memory in tensors and of what was taken from the card."""
    repeats = 8 if tiles <= 512 else 1
    try:
        for _ in range(3):
            step(warm_up)
        with watched() as seen:
            start = time.perf_counter()
            for _ in range(repeats):
                step(tiles)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / repeats
        return tiles / seconds, seen[0], seen[1]
    except torch.OutOfMemoryError:
        return None, None, None


@contextmanager
def watched() -> Iterator[list[float]]:
    """Note the peak of memory, in GiB: in tensors, and taken from the card."""
    seen: list[float] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    yield seen
    torch.cuda.synchronize()
    seen += [torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB]


@contextmanager
def capped(cap_gib: float) -> Iterator[None]:
    """Let torch take no more from the card, as if it were smaller."""
    free()
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / torch.cuda.mem_get_info()[1]))
    try:
        yield
    finally:
        free()
        torch.cuda.set_per_process_memory_fraction(1.0)


def timed(run: Callable[[], object]) -> float:
    """Give the device's seconds for something."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def free() -> None:
    """Give all memory back."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--profile", choices=("step", "uni"), default=None)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This measures a GPU, and torch finds none. On a CPU: tapfm bench")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    card = torch.cuda.get_device_name()
    print(f"{card}; tapfm {tapfm.__version__}, torch {torch.__version__}, timm {timm.__version__}", flush=True)
    bench = Bench()
    if arguments.profile is not None:
        print(bench.profile(*{"step": (GIANT, 75, 60.0), "uni": (LARGE, 300, 45.0)}[arguments.profile]))
        return
    work: dict[str, Callable[[], None]] = {
        "peak": bench.matrix_peak,
        "proof": bench.proof,
        "encode": bench.encode,
        "step": lambda: bench.steps(GIANT, 75, [60.0, 40.0]),
        "large": lambda: bench.steps(GIANT, 4096, [24.0, 80.0], reference=False),
        "lora": lambda: bench.steps(GIANT, 1024, [8.0], reference=False, scope="lora:16"),
        "uni": lambda: bench.steps(LARGE, 300, [45.0, 25.0]),
        "small": lambda: bench.steps(GIANT, 75, [24.0, 16.0, 12.0], reference=False),
        "whole": lambda: bench.steps(GIANT, 20_000, [24.0], reference=False),  # every tile of a large slide
    }
    for part in arguments.only:
        work[part]()
        free()
    print("\n" + bench.table())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {"machine": card, "facts": bench.facts, "rows": [asdict(row) for row in bench.rows]}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
