"""Measure the time from a slide file to its prediction, as in `tapfm predict`, for a 40x slide of about 10,000 tiles.

    python benchmarks/slide_to_prediction.py                          # H-optimus-0's architecture; for a GPU
    python benchmarks/slide_to_prediction.py --precision float8
    python benchmarks/slide_to_prediction.py --encoder tapfm-pocket --tiles 300 --workers 2

The slide has many copies of one synthetic 40x section (as from `tapfm synth`) on glass. It is a pyramid of JPEG tiles
of 512 px. A tile has 449 px at level 0 (0.2495 um per pixel) and is resized to the encoder's input size. Weights are
random: the time does not depend on them. The slide and an export folder are written once. Then the prediction runs
twice in this process, into new folders: `first` includes memory allocation and compilation, `again` is the time of each
further slide.
--whole-command also times `tapfm predict` as a new process, including imports and loading.

The stages are: `tiling` detects tissue and extracts tiles. `loading` computes digests of the weights and waits until
they are loaded; loading starts during tiling. `encoding` reads and encodes all tiles. `predicting` runs the aggregator
and writes the slide's files. `waiting` is the part of `encoding` in which the loop waits for tiles. `GPU busy` is the
time of the GPU in encoding, measured with CUDA events, as a fraction of the time from the slide file to the prediction
without loading, and as a fraction of `encoding`. Prints Markdown; --json saves the values.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import nn
from whole_slide import PROGRAM, render_section, write_slide

import tapfm
from tapfm.aggregators.catalog import build_aggregator
from tapfm.contracts import EncodedTiles
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.inference import InferenceEncoder
from tapfm.encoders.timm_folder import write_timm_folder
from tapfm.encoders.vit import VitEncoder
from tapfm.inference.bags import PixelBags
from tapfm.inference.loading import prepare_models
from tapfm.inference.predictor import Predictor
from tapfm.prediction import cohort_prediction as predicting
from tapfm.prediction.cohort_prediction import write_slide as write_prediction
from tapfm.prediction.inputs import find_or_create_tiles
from tapfm.runs.checkpoint import save_checkpoint
from tapfm.runs.ensemble import EXPORT_METADATA_FILE
from tapfm.runs.model_folder import open_model_folder
from tapfm.runs.saved_model import AGGREGATOR_FILE

SECTION_PX0 = 8_000  # side of a section and the glass around it, at level 0
SECTION_TILES = 80


@dataclass
class Row:
    """Times of one prediction."""

    name: str
    tiles: int = 0
    seconds: float = 0.0  # from the slide file to the prediction, without loading
    tiling_s: float = 0.0
    loading_s: float = 0.0
    encoding_s: float = 0.0
    predicting_s: float = 0.0
    waiting_s: float = 0.0
    gpu_busy_s: float | None = None  # in encoding


@dataclass
class StageTimer:
    """Times the stages of a prediction by wrapping the functions that run them."""

    row: Row
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def patch_stages(self) -> Iterator[None]:
        cuda, encode = torch.cuda.is_available(), InferenceEncoder.encode
        with (
            patch.object(predicting, "find_or_create_tiles", self.time_stage("tiling_s", find_or_create_tiles)),
            patch.object(predicting, "open_model_folder", self.time_stage("loading_s", open_model_folder)),
            patch.object(
                predicting, "prepare_models", self.time_stage("loading_s", prepare_models, self.discard_encoding)
            ),
            patch.object(Predictor, "encode_slide", self.time_stage("encoding_s", Predictor.encode_slide, synchronise)),
            patch.object(PixelBags, "close", self.record_waiting(PixelBags.close)),
            patch.object(Predictor, "predict", self.time_stage("predicting_s", Predictor.predict)),
            patch.object(predicting, "write_slide", self.time_stage("predicting_s", write_prediction)),
            patch.object(InferenceEncoder, "encode", self.time_on_gpu(encode) if cuda else encode),
        ):
            yield

    def time_stage(self, stage: str, function: Callable[..., Any], after: Callable[[], None] = lambda: None) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                after()
                setattr(self.row, stage, getattr(self.row, stage) + time.perf_counter() - start)

        return wrapped

    def discard_encoding(self) -> None:
        """Discard the times of tiles encoded during loading, where float8 is checked against bfloat16."""
        self.events.clear()
        self.row.encoding_s = 0.0

    def record_waiting(self, close: Callable[[PixelBags], None]) -> Any:
        def wrapped(bags: PixelBags) -> None:
            self.row.waiting_s = bags.waited_s
            close(bags)

        return wrapped

    def time_on_gpu(self, encode: Callable[..., EncodedTiles]) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> EncodedTiles:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            encoded = encode(*args, **kwargs)
            end.record()
            self.events.append((start, end))
            return encoded

        return wrapped


def synchronise() -> None:
    """Wait for the GPU, so that queued work counts for the stage that queued it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_model(folder: Path, key: str) -> None:
    """Write an export folder with a random encoder and an untrained aggregator."""
    folder.mkdir()
    card = find_encoder_card(key)
    torch.manual_seed(0)
    vit = build_vit(card)
    for name, parameter in vit.named_parameters():
        if name.endswith(".gamma"):  # with its initial values, LayerScale almost removes the blocks
            nn.init.normal_(parameter, std=0.1)
    encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature)
    write_timm_folder(encoder, card, folder, metadata={"targets": ["FGFR3"]})
    aggregator = build_aggregator("cls-attention", card.feature_size, 1)
    tensors = {f"aggregator/{name}": each.detach() for name, each in aggregator.named_parameters()}
    save_checkpoint(folder / AGGREGATOR_FILE, tensors, {"tapfm": tapfm.__version__, "kind": "aggregator"})
    aggregator_metadata = {
        "name": "cls-attention",
        "options": {},
        "tau": 1.0,
        "layer_norm": False,
        "feature_size": card.feature_size,
    }
    metadata = {
        "targets": ["FGFR3"],
        "encoder": {"name": card.key, "adapted": True, "base_weights_sha256": None},
        "aggregator": aggregator_metadata,
        "training_labels": {"FGFR3": {"positive": 1, "labelled": 2}},
        "run": "benchmark",
    }
    (folder / EXPORT_METADATA_FILE).write_text(json.dumps(metadata))


def time_prediction(name: str, model: Path, slides: Path, out: Path, arguments: argparse.Namespace) -> Row:
    """Predict the slides into a new folder and time the stages."""
    row = Row(name)
    timer = StageTimer(row)
    start = time.perf_counter()
    with timer.patch_stages():
        predicted = predicting.predict_slides(
            model,
            [slides],
            out,
            batch=arguments.batch,
            device=arguments.device,
            precision=arguments.precision,
            compiled=arguments.compile,
            workers=arguments.workers,
            console=Console(file=io.StringIO() if arguments.quiet else sys.stderr),
        )
    row.seconds = time.perf_counter() - start - row.loading_s
    row.tiles = sum(slide.tiles for slide in predicted.slides)
    if timer.events:
        row.gpu_busy_s = sum(start.elapsed_time(end) for start, end in timer.events) / 1e3
    return row


def time_command(model: Path, slides: Path, out: Path, arguments: argparse.Namespace) -> float:
    """Time the whole command in a new process, including imports, loading and compilation."""
    command = ["predict", "--model", str(model), str(slides), "--out", str(out), "--workers", str(arguments.workers)]
    command += ["--device", arguments.device, "--precision", arguments.precision]
    command += [] if arguments.batch is None else ["--batch", str(arguments.batch)]
    command += [] if arguments.compile is None else ["--compile" if arguments.compile else "--no-compile"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", PROGRAM, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def print_table(rows: list[Row]) -> None:
    names = "tiling | loading | encoding | predicting | waiting"
    print(
        f"| | tiles | slide to prediction, s | {names} | tiles/s | GPU busy | GPU busy in encoding |\n|---|"
        + "--:|" * 10
    )
    for row in rows:
        busy = [
            "-" if row.gpu_busy_s is None else f"{row.gpu_busy_s / seconds:.0%}"
            for seconds in (row.seconds, row.encoding_s)
        ]
        stages = (row.tiling_s, row.loading_s, row.encoding_s, row.predicting_s, row.waiting_s)
        print(
            f"| {row.name} | {row.tiles:,} | {row.seconds:.1f} | {' | '.join(f'{each:.2f}' for each in stages)} "
            f"| {row.tiles / row.encoding_s:,.0f} | {' | '.join(busy)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="h-optimus-0")
    parser.add_argument("--tiles", type=int, default=10_000, help="approximate number of tiles")
    parser.add_argument("--slides", type=int, default=1, help="number of slides, all copies of one slide")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: as in tapfm predict")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", type=int, default=2, help="predictions in this process; the first one warms up")
    parser.add_argument("--whole-command", action="store_true", help="also time the whole command in a new process")
    parser.add_argument("--quiet", action="store_true", help="do not show the progress of the prediction")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    copies = max(1, round(arguments.tiles / SECTION_TILES))
    side_px0 = SECTION_PX0 * max(1, round(copies**0.5 + 0.49))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        slides, model = folder / "slides", folder / "model"
        slides.mkdir()
        first, *others = [slides / f"slide-{number}.svs" for number in range(arguments.slides)]
        section, mpp = render_section()
        write_slide(first, section, mpp, side_px0, copies)
        for other in others:
            other.hardlink_to(first)
        write_model(model, arguments.encoder)
        rows = [
            time_prediction("again" if number else "first", model, slides, folder / f"predicted-{number}", arguments)
            for number in range(arguments.times)
        ]
        command_s = None
        if arguments.whole_command:
            command_s = time_command(model, slides, folder / "command", arguments)
        size = f"{side_px0:,} x {side_px0:,} px, {first.stat().st_size / 2**20:,.0f} MiB"
    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cores = f"{os.cpu_count()} cores, {arguments.workers} workers"
    print(
        f"tapfm {tapfm.__version__}, torch {torch.__version__}, {device_name}, {cores}; {arguments.encoder}, precision "
        f"{arguments.precision}; {arguments.slides} x a slide of {size}\n"
    )
    print_table(rows)
    if command_s is not None:
        print(f"\nWhole command: {command_s:.1f} s")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "encoder": arguments.encoder,
            "precision": arguments.precision,
            "slides": arguments.slides,
            "device": device_name,
            "command_s": command_s,
        }
        arguments.json.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
