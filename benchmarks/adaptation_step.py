"""Time one adaptation step: one pass, chunked with kept graphs, and chunked.

    python benchmarks/adaptation_step.py                              # tapfm-pocket on the CPU
    python benchmarks/adaptation_step.py --encoder uni --device cuda --tiles 300 --chunk 64
    python benchmarks/adaptation_step.py --json out/step.json

A step is the two-graph step of one slide, with the updates of both optimizers. Weights and tiles are random. In each
repeat, every strategy runs once, one after the other. Before the repeats, every strategy computes one gradient from the
same weights, as a warm-up, and the gradient is compared with that of one pass. On a GPU the encoder runs under bfloat16
autocast. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import tapfm
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.two_graph import AdaptationSettings, two_graph_step
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.vit import VitEncoder
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels

KEPT_GRAPHS = 2
TASK = BinaryTask.from_training_labels("FGFR3", [1] * 16 + [0] * 84)
TARGETS = encode_labels([1])


@dataclass
class Row:
    """Times of one strategy. `gradient_difference` is relative to the gradient of one pass."""

    strategy: str
    median_s: float
    fastest_s: float
    slowest_s: float
    tiles_per_second: float
    gradient_difference: float


class StepTimer:
    """Encoder, aggregator and optimizers for one strategy."""

    def __init__(self, encoder_key: str, device: torch.device, chunking: Chunking) -> None:
        card = find_encoder_card(encoder_key)
        self._device = device
        torch.manual_seed(0)
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
        self._encoder = encoder.to(device).train()
        self._aggregator = ClsAttention(encoder.feature_size).to(device)
        self._encoder_optimizer = torch.optim.AdamW(self._encoder.parameters(), lr=1e-6)
        self._aggregator_optimizer = torch.optim.AdamW(self._aggregator.parameters(), lr=1e-5)
        compute_dtype = torch.bfloat16 if device.type == "cuda" else None
        self._adaptation = AdaptationSettings(chunking=chunking, compute_dtype=compute_dtype)

    def compute_gradient(self, tiles: Tensor) -> Tensor:
        """Return the encoder's gradient as one vector. No weights change."""
        self._step(tiles)
        gradients = [p.grad.flatten() for p in self._encoder.parameters() if p.grad is not None]
        return torch.cat(gradients).double().cpu()

    def time_step(self, tiles: Tensor) -> float:
        """Return the seconds of one step with both updates."""
        start = self._now()
        self._step(tiles, self._aggregator_optimizer.step, self._encoder_optimizer.step)
        return self._now() - start

    def _step(
        self,
        tiles: Tensor,
        update_aggregator: Callable[[], object] = lambda: None,
        update_encoder: Callable[[], object] = lambda: None,
    ) -> None:
        self._encoder_optimizer.zero_grad()
        self._aggregator_optimizer.zero_grad()
        two_graph_step(
            self._encoder,
            self._aggregator,
            TASK,
            tiles,
            TARGETS,
            adaptation=self._adaptation,
            update_aggregator=lambda *_: update_aggregator(),
            update_encoder=lambda *_: update_encoder(),
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure(encoder_key: str, device: torch.device, tile_count: int, chunk: int, repeats: int) -> list[Row]:
    """Time all strategies, in turn."""
    strategies = {
        "one pass": Chunking(),
        "chunked, kept graphs": Chunking(chunk, keep_graphs=KEPT_GRAPHS),
        "chunked": Chunking(chunk),
    }
    tile_px = find_encoder_card(encoder_key).tile_px
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randint(0, 256, (tile_count, 3, tile_px, tile_px), dtype=torch.uint8, generator=generator).to(device)
    timers = {strategy: StepTimer(encoder_key, device, chunking) for strategy, chunking in strategies.items()}
    gradients = {strategy: timer.compute_gradient(tiles) for strategy, timer in timers.items()}
    seconds: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for _ in range(repeats):
        for strategy, timer in timers.items():
            seconds[strategy].append(timer.time_step(tiles))
    one_pass = gradients["one pass"]
    return [
        Row(
            strategy=strategy,
            median_s=statistics.median(times),
            fastest_s=min(times),
            slowest_s=max(times),
            tiles_per_second=tile_count / statistics.median(times),
            gradient_difference=float((gradients[strategy] - one_pass).norm() / one_pass.norm()),
        )
        for strategy, times in seconds.items()
    ]


def format_table(rows: list[Row]) -> str:
    lines = [
        "| strategy | step, ms (median) | fastest | slowest | tiles/s | gradient: difference to one pass |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.strategy} | {1e3 * row.median_s:,.1f} | {1e3 * row.fastest_s:,.1f} | {1e3 * row.slowest_s:,.1f} | "
        f"{row.tiles_per_second:,.0f} | {row.gradient_difference:.1e} |"
        for row in rows
    ]
    return "\n".join(lines)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="tapfm-pocket", help="architecture, with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiles", type=_at_least_one, default=64, help="number of tiles of the slide (K)")
    parser.add_argument("--chunk", type=_at_least_one, default=16, help="tiles per chunk")
    parser.add_argument("--repeats", type=_at_least_one, default=5, help="timed steps per strategy")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = measure(arguments.encoder, device, arguments.tiles, arguments.chunk, arguments.repeats)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"tapfm {tapfm.__version__}, torch {torch.__version__}, {machine}, {torch.get_num_threads()} threads; "
        f"{arguments.encoder}, {arguments.tiles} tiles, chunks of {arguments.chunk}, {arguments.repeats} repeats\n"
    )
    print(format_table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        results = {"machine": machine, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
