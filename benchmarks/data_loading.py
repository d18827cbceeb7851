"""Measure whether training waits for tiles, with 40x slides and different numbers of worker processes.

    python benchmarks/data_loading.py                          # UNI's architecture; for a GPU
    python benchmarks/data_loading.py --encoder tapfm-pocket --tiles 40 --workers 0 1 2
    python benchmarks/data_loading.py --workers                # only augmentation

The training loop is that of `tapfm train`. The slides are those of reading.py (JPEG tiles of 256 px). Each tile has
448 px at level 0 and is resized to 224 px; every epoch samples other tiles. Weights are random. The first epoch, in
which workers start and memory is allocated, is not counted. Prints Markdown: tiles per second, and the fraction of time
in which the training loop waits for tiles. `step alone` repeats a step with tiles on the device. The speed of copying
tiles to the device and augmenting them is measured separately, with and without compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reading import list_positions, write_slide

import tapfm
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.trainer import TrainingSettings, fit
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.precision import can_compile_on_gpu, cast_weights
from tapfm.encoders.vit import VitEncoder
from tapfm.evaluation.predictions import LabelledSlide
from tapfm.inference.bags import Bag, PixelBags, SlideTiles
from tapfm.runs.model import SlideModel
from tapfm.runs.run_progress import RunProgress
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels
from tapfm.tiles.augment import Augmentation, AugmentedTiles
from tapfm.tiles.store import TileSet

SIDE_PX0 = 448


@dataclass
class Row:
    """One measurement."""

    workers: int | None  # None: step alone
    tiles_per_second: float
    data_wait_fraction: float


class NullListener:
    """Checkpoint writer and training listener that does nothing."""

    def save_last(self, learner: Learner, progress: RunProgress) -> None: ...

    def save_best(self, learner: Learner, progress: RunProgress) -> None: ...

    def on_pass_start(self, phase: str, epoch: int, slides: int, done: int) -> None: ...

    def on_slide_end(self, progress: RunProgress) -> None: ...

    def on_epoch_end(self, row: Any, *, best: bool) -> None: ...

    def on_slide_failed(self, slide_id: str, reason: str) -> None: ...

    def on_warning(self, message: str) -> None: ...


def make_learner(key: str, device: torch.device) -> Learner:
    card = find_encoder_card(key)
    torch.manual_seed(0)
    encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature).to(device)
    aggregator = ClsAttention(encoder.feature_size).to(device)
    if device.type == "cuda":
        cast_weights(encoder, torch.bfloat16)
    encoder.compile_blocks(can_compile_on_gpu(device))
    model = SlideModel(encoder, aggregator, BinaryTask.from_training_labels("target", [0, 1]))
    return Learner(
        model,
        AdaptationSettings(chunking=Chunking(tiles=64, keep_graphs=2)),
        OptimiserSettings(compiled=can_compile_on_gpu(device)),
    )


def measure_augmentation(device: torch.device, tile_px: int, *, compiled: bool, chunk: int = 64) -> float:
    """Return the tiles per second of copying chunks from host memory to the device and augmenting them."""
    tiles = torch.randint(
        0, 256, (8 * chunk if device.type == "cuda" else chunk, 3, tile_px, tile_px), dtype=torch.uint8
    )
    bag = AugmentedTiles(
        tiles.pin_memory() if device.type == "cuda" else tiles, Augmentation(), 0, device=device, compiled=compiled
    )
    seconds = []
    for _ in range(5):  # the result is the fastest repeat; the first one compiles
        start = time.perf_counter()
        for first in range(0, len(bag), chunk):
            bag[first : first + chunk]
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return len(bag) / min(seconds)


def measure_step(learner: Learner, tiles: int, steps: int) -> Row:
    encoder, device = learner.model.encoder, learner.model.device
    assert encoder is not None
    pixels = torch.randint(0, 256, (tiles, 3, encoder.tile_px, encoder.tile_px), dtype=torch.uint8, device=device)
    learner.start_epoch(0)
    seconds = 0.0
    for step in range(steps + 2):
        start = time.perf_counter()
        report = learner.train_step(Bag(pixels, np.arange(tiles)), encode_labels([1]), update=True, slide_id="s")
        report.loss_agg.item()  # synchronises
        seconds += time.perf_counter() - start if step >= 2 else 0.0
    return Row(None, steps * tiles / seconds, 0.0)


def measure_training(learner: Learner, paths: list[Path], tiles: int, epochs: int, workers: int) -> Row:
    encoder = learner.model.encoder
    assert encoder is not None
    grid = list_positions(SIDE_PX0, "grid", count=10_000)
    slides = {
        path.stem: SlideTiles(path, TileSet(path.stem, np.array(grid), SIDE_PX0, encoder.tile_px)) for path in paths
    }
    bags = PixelBags(
        slides,
        tile_px=encoder.tile_px,
        device=learner.model.device,
        workers=workers,
        prefetch_bytes=2**30,
    )
    labelled = [LabelledSlide(name, name, {"target": i % 2}, "train") for i, name in enumerate(slides)]
    listener = NullListener()
    settings = TrainingSettings(epochs=epochs + 1, tiles_per_slide=tiles)
    history = fit(learner, bags, labelled, [], settings, listener, listener).history[1:]
    seconds = sum(row["seconds"] for row in history)
    waited = sum(row["data_wait_fraction"] * row["seconds"] for row in history)
    return Row(workers, sum(row["tiles"] for row in history) / seconds, waited / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="uni")
    parser.add_argument("--tiles", type=int, default=300, help="tiles per slide and step")
    parser.add_argument("--slides", type=int, default=8)
    parser.add_argument(
        "--epochs", type=int, default=10, help="timed epochs; with few, tiles that were prefetched affect the speed"
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2, 4, 16])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learner = make_learner(arguments.encoder, device)
    tile_px = find_encoder_card(arguments.encoder).tile_px
    augmented = {"plain": measure_augmentation(device, tile_px, compiled=False)}
    if can_compile_on_gpu(device):
        augmented["compiled"] = measure_augmentation(device, tile_px, compiled=True)
    rows = [measure_step(learner, arguments.tiles, steps=2 * arguments.slides)] if arguments.workers else []
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "slide-0.svs"
        if arguments.workers:
            write_slide(first, 40)
        others = [Path(folder) / f"slide-{i}.svs" for i in range(1, arguments.slides)]
        for path in others if arguments.workers else []:
            path.write_bytes(first.read_bytes())
        for workers in arguments.workers:
            rows.append(measure_training(learner, [first, *others], arguments.tiles, arguments.epochs, workers))
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(
        f"tapfm {tapfm.__version__}, torch {torch.__version__}, {name}, {os.cpu_count()} cores; {arguments.encoder}, "
        f"{arguments.tiles} tiles per slide, {arguments.slides} slides, {arguments.epochs} epochs\n"
    )
    speeds = ", ".join(f"{variant} {speed:,.0f}" for variant, speed in augmented.items())
    print(f"only augmentation, tiles/s: {speeds}\n")
    print("| workers | tiles/s | waiting for tiles |\n|---|--:|--:|")
    for row in rows:
        label = "(step alone)" if row.workers is None else row.workers or "0 (in the main process)"
        print(f"| {label} | {row.tiles_per_second:,.0f} | {row.data_wait_fraction:.1%} |")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"augmentation": augmented, "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
