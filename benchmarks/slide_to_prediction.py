"""How long does it take from a slide file to its prediction? One 40x slide of about 10,000 tiles, as `tapfm predict`.

    python benchmarks/slide_to_prediction.py                          # H-optimus-0's architecture; needs a GPU
    python benchmarks/slide_to_prediction.py --precision float8
    python benchmarks/slide_to_prediction.py --encoder tapfm-pocket --tiles 300 --workers 2

The slide is a painted section (as `tapfm synth` paints them, 40x) laid many times on glass, a pyramid of JPEG tiles of
512 px; a tile is 448 px of level 0, resized to the encoder's 224 px or so. Weights are random; the time does not depend
on them. Written once are the slide and a folder as `tapfm export` makes it. Then, in this process, `predict` runs
twice into new folders: `first` takes memory and compiles, `again` is what each further slide takes. --whole-command
also times `tapfm predict` from the shell, where nothing is loaded and imported yet.

Stages in order: `laying` detects tissue and extracts tiles, `loading` computes digests of the weights and waits until
they are loaded, which starts during `laying`, `encoding` reads and encodes all tiles, `predicting` is the aggregator
and the tables. `waiting` is the part of encoding in which the loop had no tiles. `busy` is the time that the GPU spent
in encoding, by CUDA events around each part of the slide, over the seconds from the slide file to its prediction
without loading; and over those of encoding alone. Prints Markdown; --json keeps it.
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
from whole_slide import PROGRAM, painted_section, write_slide

import tapfm
from tapfm.aggregators.catalog import build_aggregator
from tapfm.contracts import EncodedTiles
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
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
from tapfm.runs.model_folder import open_model_folder
from tapfm.runs.saved_model import AGGREGATOR_FILE, DESCRIPTION_FILE

SECTION_PX0 = 8_000  # of level 0 for each copy of the section and the glass around it
SECTION_TILES = 80


@dataclass
class Row:
    """One prediction."""

    what: str
    tiles: int = 0
    seconds: float = 0.0  # from the slide file to the prediction, without loading
    laying_s: float = 0.0
    loading_s: float = 0.0
    encoding_s: float = 0.0
    predicting_s: float = 0.0
    waiting_s: float = 0.0
    busy_s: float | None = None  # of the GPU, in encoding


@dataclass
class Watch:
    """Times the stages of a prediction from outside: the functions that make them are wrapped while it runs."""

    row: Row
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        cuda, encode = torch.cuda.is_available(), InferenceEncoder.encode
        with (
            patch.object(predicting, "find_or_create_tiles", self.timed("laying_s", find_or_create_tiles)),
            patch.object(predicting, "open_model_folder", self.timed("loading_s", open_model_folder)),
            patch.object(predicting, "prepare_models", self.timed("loading_s", prepare_models, self.forget)),
            patch.object(Predictor, "encode_slide", self.timed("encoding_s", Predictor.encode_slide, synchronise)),
            patch.object(PixelBags, "close", self.noting_waits(PixelBags.close)),
            patch.object(Predictor, "predict", self.timed("predicting_s", Predictor.predict)),
            patch.object(predicting, "write_slide", self.timed("predicting_s", write_prediction)),
            patch.object(InferenceEncoder, "encode", self.between_events(encode) if cuda else encode),
        ):
            yield

    def timed(self, stage: str, function: Callable[..., Any], after: Callable[[], None] = lambda: None) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                after()
                setattr(self.row, stage, getattr(self.row, stage) + time.perf_counter() - start)

        return wrapped

    def forget(self) -> None:
        """Leave out what was encoded while loading: float8 is held against bfloat16 there."""
        self.events.clear()
        self.row.encoding_s = 0.0

    def noting_waits(self, close: Callable[[PixelBags], None]) -> Any:
        def wrapped(bags: PixelBags) -> None:
            self.row.waiting_s = bags.waited_s
            close(bags)

        return wrapped

    def between_events(self, encode: Callable[..., EncodedTiles]) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> EncodedTiles:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            encoded = encode(*args, **kwargs)
            end.record()
            self.events.append((start, end))
            return encoded

        return wrapped


def synchronise() -> None:
    """Wait for the GPU: what is queued belongs to the stage that queued it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_model(folder: Path, key: str) -> None:
    """Write an export with random weights, as the writer of `tapfm export` does, and an aggregator without learning."""
    folder.mkdir()
    card = encoder_card(key)
    torch.manual_seed(0)
    vit = build_vit(card)
    for name, parameter in vit.named_parameters():
        if name.endswith(".gamma"):  # a fresh LayerScale hides the blocks
            nn.init.normal_(parameter, std=0.1)
    encoder = VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature)
    write_timm_folder(encoder, card, folder, about={"targets": ["FGFR3"]})
    aggregator = build_aggregator("cls-attention", card.feature_size, 1)
    tensors = {f"aggregator/{name}": each.detach() for name, each in aggregator.named_parameters()}
    save_checkpoint(folder / AGGREGATOR_FILE, tensors, {"tapfm": tapfm.__version__, "kind": "aggregator"})
    facts = {"name": "cls-attention", "options": {}, "tau": 1.0, "layer_norm": False, "feature_size": card.feature_size}
    description = {
        "targets": ["FGFR3"],
        "encoder": {"name": card.key, "adapted": True, "base_weights_sha256": None},
        "aggregator": facts,
        "training_labels": {"FGFR3": {"positive": 1, "labelled": 2}},
        "run": "benchmark",
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description))


def measured(what: str, model: Path, slides: Path, out: Path, chosen: argparse.Namespace) -> Row:
    """Predict the slides into a new folder, watching the stages."""
    row = Row(what)
    watch = Watch(row)
    start = time.perf_counter()
    with watch.watching():
        predicted = predicting.predict_slides(
            model,
            [slides],
            out,
            batch=chosen.batch,
            device=chosen.device,
            precision=chosen.precision,
            compiled=chosen.compile,
            workers=chosen.workers,
            console=Console(file=io.StringIO() if chosen.quiet else sys.stderr),
        )
    row.seconds = time.perf_counter() - start - row.loading_s
    row.tiles = sum(slide.tiles for slide in predicted.slides)
    if watch.events:
        row.busy_s = sum(start.elapsed_time(end) for start, end in watch.events) / 1e3
    return row


def whole_command(model: Path, slides: Path, out: Path, chosen: argparse.Namespace) -> float:
    """Time the command from the shell: imports, weights, and compilation where nothing of it is cached."""
    words = ["predict", "--model", str(model), str(slides), "--out", str(out), "--workers", str(chosen.workers)]
    words += ["--device", chosen.device, "--precision", chosen.precision]
    words += [] if chosen.batch is None else ["--batch", str(chosen.batch)]
    words += [] if chosen.compile is None else ["--compile" if chosen.compile else "--no-compile"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", PROGRAM, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def printed(rows: list[Row]) -> None:
    """Print the table."""
    names = "laying | loading | encoding | predicting | waiting"
    print(f"| | tiles | slide to prediction, s | {names} | tiles/s | busy | busy in encoding |\n|---|" + "--:|" * 10)
    for row in rows:
        whole = (row.seconds, row.encoding_s)
        busy = ["-" if row.busy_s is None else f"{row.busy_s / seconds:.0%}" for seconds in whole]
        stages = (row.laying_s, row.loading_s, row.encoding_s, row.predicting_s, row.waiting_s)
        print(
            f"| {row.what} | {row.tiles:,} | {row.seconds:.1f} | {' | '.join(f'{each:.2f}' for each in stages)} "
            f"| {row.tiles / row.encoding_s:,.0f} | {' | '.join(busy)} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="h-optimus-0")
    parser.add_argument("--tiles", type=int, default=10_000, help="about as many")
    parser.add_argument("--slides", type=int, default=1, help="the same one, so often")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: as the command decides")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", type=int, default=2, help="predictions in this process; the first one warms up")
    parser.add_argument("--whole-command", action="store_true", help="also from the shell")
    parser.add_argument("--quiet", action="store_true", help="without what the command says")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    copies = max(1, round(chosen.tiles / SECTION_TILES))
    side_px0 = SECTION_PX0 * max(1, round(copies**0.5 + 0.49))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slides, model = folder / "slides", folder / "model"
        slides.mkdir()
        first, *others = [slides / f"slide-{number}.svs" for number in range(chosen.slides)]
        section, mpp = painted_section()
        write_slide(first, section, mpp, side_px0, copies)
        for other in others:
            other.hardlink_to(first)
        write_model(model, chosen.encoder)
        rows = [
            measured("again" if number else "first", model, slides, folder / f"predicted-{number}", chosen)
            for number in range(chosen.times)
        ]
        command_s = whole_command(model, slides, folder / "commanded", chosen) if chosen.whole_command else None
        size = f"{side_px0:,} x {side_px0:,} px, {first.stat().st_size / 2**20:,.0f} MiB"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cores = f"{os.cpu_count()} cores, {chosen.workers} of them reading"
    print(
        f"tapfm {tapfm.__version__}, torch {torch.__version__}, {name}, {cores}; {chosen.encoder} in "
        f"{chosen.precision}; {chosen.slides} x a slide of {size}\n"
    )
    printed(rows)
    if command_s is not None:
        print(f"\nThe whole command, from the shell: {command_s:.1f} s")
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "encoder": chosen.encoder,
            "precision": chosen.precision,
            "slides": chosen.slides,
            "device": name,
            "command_s": command_s,
        }
        chosen.json.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
