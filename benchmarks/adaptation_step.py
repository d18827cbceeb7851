"""The adaptation step, side by side: a reference-style step and ours in one pass, hybrid and chunked.

    python benchmarks/adaptation_step.py                     # this machine: the ViT-g on a GPU, a small ViT on a CPU
    python benchmarks/adaptation_step.py --json out/step.json

Prints Markdown: tiles per second and peak GPU memory of each way for each K, how far the memory of the chunked step
grows with K, and how well its gradient agrees with the one-pass gradient in bfloat16. Weights and tiles are random.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import tapfm
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.two_graph import Adaptation, two_graph_step
from tapfm.aggregators.cls_attention import ClsAttention, tile_weights
from tapfm.contracts import Targets
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.vit import VitEncoder
from tapfm.tasks.binary import BinaryTask

GIB = 2**30
TASK = BinaryTask.from_training_labels("FGFR3", [1] * 16 + [0] * 84)
TARGETS = Targets.of([1])


@dataclass
class Row:
    """One measurement."""

    way: str
    tiles: int
    tiles_per_second: float | None
    peak_gib: float | None
    graphs_kept: int | None = None


class Bench:
    """One model of each kind at a time on the device, so that a peak is the peak of one way."""

    def __init__(
        self, device: torch.device, encoder: str, shrink: dict[str, Any], sizes: list[int], chunk: int
    ) -> None:
        self.device, self.card, self.shrink = device, encoder_card(encoder), shrink
        self.sizes, self.chunk, self.rows = sizes, chunk, list[Row]()
        self.tile_px = shrink.get("img_size", self.card.tile_px)
        torch.manual_seed(0)
        tiles = torch.randint(0, 256, (max(sizes), 3, self.tile_px, self.tile_px), dtype=torch.uint8)
        self.tiles = tiles.pin_memory() if device.type == "cuda" else tiles

    def model(self) -> tuple[VitEncoder, ClsAttention]:
        torch.manual_seed(0)
        with self.device:
            vit = build_vit(self.card, extra=self.shrink)
            for name, parameter in vit.named_parameters():
                if name.endswith((".gamma", "cls_token", "reg_token")):  # a fresh LayerScale hides the blocks
                    nn.init.normal_(parameter, std=0.5)
            encoder = VitEncoder(vit, mean=self.card.mean, std=self.card.std, feature=self.card.feature)
            return encoder.train(), ClsAttention(encoder.feature_size)

    def time(
        self,
        way: str,
        make_step: Callable[[], Callable[[Tensor], int | None]],
        *,
        sizes: list[int] | None = None,
        warm_up: int | None = None,
    ) -> None:
        """Time a way for every K; the warm-up uses few tiles but chunks of the same shape."""
        step = make_step()
        for index, size in enumerate(sizes or self.sizes):
            try:
                if index == 0 or size <= 300:
                    step(self.tiles[: warm_up or size])
                    step(self.tiles[: min(size, 300)])
                self._reset_peak()
                repeats = 3 if size <= 300 else 1
                start = self._now()
                for _ in range(repeats):
                    kept = step(self.tiles[:size])
                seconds = (self._now() - start) / repeats
                self.rows.append(Row(way, size, size / seconds, self._peak(), kept))
            except torch.OutOfMemoryError:
                self.rows.append(Row(way, size, None, None))
                torch.cuda.empty_cache()
            row = self.rows[-1]
            speed = f"{row.tiles_per_second:.1f} tiles/s" if row.tiles_per_second else "out of memory"
            print(f"  {way}, K = {size}: {speed}, peak {row.peak_gib and round(row.peak_gib, 1)} GiB", flush=True)
        del step
        self._free()

    def ours(self, chunking: Chunking, compiled: bool = False) -> Callable[[], Callable[[Tensor], int | None]]:
        def make() -> Callable[[Tensor], int | None]:
            encoder, aggregator = self.model()
            if compiled:
                for block in encoder.vit.blocks[:-1]:
                    block.compile()
            fused = self.device.type == "cuda"
            optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-6, weight_decay=1e-4, fused=fused)
            aggregator_optimizer = torch.optim.AdamW(aggregator.parameters(), lr=1e-5, weight_decay=1e-4)
            adaptation = Adaptation(chunking=chunking, compute_dtype=torch.bfloat16)

            def step(tiles: Tensor) -> int:
                optimizer.zero_grad(set_to_none=False)
                aggregator_optimizer.zero_grad()
                return two_graph_step(
                    encoder,
                    aggregator,
                    TASK,
                    tiles,
                    TARGETS,
                    adaptation=adaptation,
                    update_aggregator=aggregator_optimizer.step,
                    update_encoder=optimizer.step,
                ).graphs_kept

            return step

        return make

    def reference_style(self) -> Callable[[Tensor], None]:
        """As published code does it: one graph, fp16 autocast, a hook that recomputes the full N x N attention."""
        encoder, aggregator = self.model()
        vit, inputs = encoder.vit, list[Tensor]()
        attn = vit.blocks[-1].attn
        attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-6)
        aggregator_optimizer = torch.optim.AdamW(aggregator.parameters(), lr=1e-5)

        def step(tiles: Tensor) -> None:
            inputs.clear()
            pixels = (tiles.to(self.device).float() - encoder.mean) / encoder.std
            dtype = torch.float16 if self.device.type == "cuda" else torch.bfloat16
            with torch.autocast(self.device.type, dtype):
                z_KD = vit.forward_features(pixels)[:, 0]
                q, k, _ = attn.qkv(inputs.pop()).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
                attention = ((q * attn.scale) @ k.transpose(-2, -1)).softmax(-1)
                a_K = tile_weights(attention.mean(1)[:, 0, vit.num_prefix_tokens :].mean(1).float(), tau=0.1)
            z_leaf, a_leaf = z_KD.detach().float().requires_grad_(), a_K.detach().requires_grad_()
            loss = TASK.loss(aggregator.classifier(a_leaf @ z_leaf), TARGETS)
            torch.autograd.backward(loss)
            aggregator_optimizer.step()
            assert z_leaf.grad is not None
            assert a_leaf.grad is not None
            torch.autograd.backward((z_KD.float() * z_leaf.grad).sum() + (a_K * a_leaf.grad).sum())
            optimizer.step()
            optimizer.zero_grad()
            aggregator_optimizer.zero_grad()

        return step

    def agreement(self, size: int, chunk: int) -> dict[str, float]:
        """Cosines of chunked and hybrid gradients to the one-pass gradient, all in bfloat16."""
        tiles = self.tiles[:size]
        one_pass = self._gradient(tiles, Chunking())
        cosines = {"chunked": cosine(one_pass, self._gradient(tiles, Chunking(chunk, keep=0)))}
        cosines["hybrid"] = cosine(one_pass, self._gradient(tiles, Chunking(chunk, keep=2)))
        # The attention term is a small part of the gradient: a large lambda shows it alone.
        pair = [self._gradient(tiles, chunking, lambda_=1e6) for chunking in (Chunking(), Chunking(chunk, keep=0))]
        cosines["chunked, attention term (lambda = 1e6)"] = cosine(*pair)
        return cosines

    def _gradient(self, tiles: Tensor, chunking: Chunking, lambda_: float = 1.0) -> Tensor:
        encoder, aggregator = self.model()
        adaptation = Adaptation(chunking=chunking, lambda_=lambda_, compute_dtype=torch.bfloat16)
        two_graph_step(encoder, aggregator, TASK, tiles, TARGETS, adaptation=adaptation)
        gradient = torch.cat([p.grad.flatten().cpu() for p in encoder.parameters() if p.grad is not None])
        del encoder, aggregator
        self._free()
        return gradient

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _peak(self) -> float | None:
        return torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else None

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def table(self) -> str:
        lines = ["| way | K | tiles/s | peak GiB | chunks kept |", "|---|--:|--:|--:|--:|"]
        for row in self.rows:
            speed = "out of memory" if row.tiles_per_second is None else f"{row.tiles_per_second:.1f}"
            peak = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
            lines.append(f"| {row.way} | {row.tiles:,} | {speed} | {peak} | {row.graphs_kept or '-'} |")
        return "\n".join(lines)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.double(), b.double()) / (a.double().norm() * b.double().norm()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--encoder", default="h-optimus-0", help="architecture, with random weights")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--tiles", type=int, nargs="+", default=None, help="values of K")
    parser.add_argument("--chunk", type=int, default=None, help="tiles per chunk")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    whole = on_gpu or encoder_card(args.encoder).packaged  # small enough for a CPU as it is
    shrink = {} if whole else {"depth": 4, "embed_dim": 128, "num_heads": 2, "img_size": 112}
    sizes = args.tiles or ([75, 256, 300, 1024, 4096] if on_gpu else [16, 64, 256])
    chunk = args.chunk or (64 if on_gpu else 16)
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.processor() or platform.machine()} CPU"
    small = ", made small" if shrink else ""
    print(f"{args.encoder} architecture{small}, random weights, chunks of {chunk} tiles; {machine}")
    print(f"tapfm {tapfm.__version__}, torch {torch.__version__}, timm {timm.__version__}", flush=True)

    bench = Bench(device, args.encoder, shrink, sizes, chunk)
    bench.time("reference style", bench.reference_style)
    bench.time("one pass", bench.ours(Chunking()))
    bench.time("hybrid", bench.ours(Chunking(chunk, keep="fit" if on_gpu else 2)), warm_up=2 * chunk)
    bench.time("chunked", bench.ours(Chunking(chunk)), warm_up=2 * chunk)
    if on_gpu:
        even = [size for size in sizes if size % chunk == 0]  # a ragged chunk would compile once more
        bench.time("chunked, compiled blocks", bench.ours(Chunking(chunk), compiled=True), sizes=even)
    agreement = bench.agreement(size=75 if on_gpu else 16, chunk=16 if on_gpu else 5)

    print("\n" + bench.table())
    peaks = {row.tiles: row.peak_gib for row in bench.rows if row.way == "chunked" and row.peak_gib is not None}
    growth = None
    if 256 in peaks and 4096 in peaks:
        growth = peaks[4096] / peaks[256] - 1
        print(f"\nchunked: peak memory at K = 4,096 over that at K = 256: {growth:+.2%}")
    print("\ngradient cosine to one pass, bfloat16:")
    for way, value in agreement.items():
        print(f"  {way}: {value:.6f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {
            "machine": machine,
            "rows": [asdict(row) for row in bench.rows],
            "growth": growth,
            "cosine": agreement,
        }
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
