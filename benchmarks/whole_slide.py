"""How much memory does `tapfm predict` take for a very large slide? 100,000 x 100,000 px, on a CPU.

    python benchmarks/whole_slide.py                    # makes the slide, predicts it with maps and GeoJSON
    python benchmarks/whole_slide.py --side 20000 --copies 2

The slide is a painted section (as `tapfm synth` paints them, 40x) laid many times on glass, a pyramid of JPEG
tiles of 512 px. The model is tapfm-pocket with an aggregator that has learnt nothing: memory does not depend on it.
Memory is that of the command and all of its processes together: their proportional set sizes (what they share is
counted once), looked at ten times a second. Prints Markdown; --json keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
import tifffile
import torch

import tapfm
from tapfm.aggregators.catalog import build_aggregator
from tapfm.encoders.catalog import encoder_card
from tapfm.prediction.folder import PredictionFolder
from tapfm.runs.checkpoint import save_checkpoint
from tapfm.runs.saved_model import AGGREGATOR_FILE, DESCRIPTION_FILE
from tapfm.slides.slide import Pixels
from tapfm.synthetic.cohort import CohortSpec, plan_cohort
from tapfm.synthetic.slides import render_slide

TILE_PX = 512
PYRAMID = (1, 4, 16, 64)
GLASS = 243
LOOK_EVERY_S = 0.1
PROGRAM = "from tapfm.cli.main import main; main()"


@dataclass
class Row:
    """One command."""

    what: str
    tiles: int
    seconds: float
    peak_gib: float


def painted_section() -> tuple[Pixels, float]:
    """Paint one 40x section."""
    planned = next(slide for slide in plan_cohort(CohortSpec(slides=10, external=0)) if slide.scanner.mpp < 0.3)
    return render_slide(planned).scan.pixels, planned.scanner.mpp


def write_slide(path: Path, section: Pixels, mpp: float, side_px0: int, copies: int) -> None:
    """Lay copies of a section in rows over a square of glass and write the pyramid tile by tile."""
    across = int(np.ceil(np.sqrt(copies)))
    step = side_px0 // across
    corners = [(step * (i % across), step * (i // across)) for i in range(copies)]
    options = {"photometric": "rgb", "compression": "jpeg", "metadata": None, "software": False}
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for level in PYRAMID:
            side_px = side_px0 // level
            height, width = section.shape[0] // level, section.shape[1] // level
            small = cv2.resize(section, (width, height), interpolation=cv2.INTER_AREA) if level > 1 else section
            places = [(x // level, y // level) for x, y in corners]
            description = (
                f"Aperio Image Library\r\n{side_px0}x{side_px0} (512x512) JPEG/RGB Q=80|AppMag = 40|MPP = {mpp:.4f}"
            )
            writer.write(
                tiles_of(small, places, side_px),
                shape=(side_px, side_px, 3),
                dtype=np.uint8,
                tile=(TILE_PX, TILE_PX),
                description=description if level == 1 else "",
                compressionargs={"level": 80},
                **options,
            )


def tiles_of(section: Pixels, places: list[tuple[int, int]], side_px: int) -> Iterator[Pixels]:
    """Give the tiles of a level, row by row."""
    height, width = section.shape[:2]
    for y in range(0, side_px, TILE_PX):
        near = [(left, top) for left, top in places if top - TILE_PX < y < top + height]
        for x in range(0, side_px, TILE_PX):
            tile = np.full((TILE_PX, TILE_PX, 3), GLASS, np.uint8)
            for left, top in near:
                from_x, from_y = max(x, left), max(y, top)
                to_x, to_y = min(x + TILE_PX, left + width), min(y + TILE_PX, top + height)
                if from_x < to_x and from_y < to_y:
                    part = section[from_y - top : to_y - top, from_x - left : to_x - left]
                    tile[from_y - y : to_y - y, from_x - x : to_x - x] = part
            yield tile


def write_model(folder: Path) -> None:
    """Write an export of tapfm-pocket with an aggregator that has learnt nothing."""
    folder.mkdir()
    card = encoder_card("tapfm-pocket")
    torch.manual_seed(0)
    aggregator = build_aggregator("cls-attention", card.feature_size, 1)
    tensors = {f"aggregator/{name}": each.detach() for name, each in aggregator.named_parameters()}
    save_checkpoint(folder / AGGREGATOR_FILE, tensors, {"tapfm": tapfm.__version__, "kind": "aggregator"})
    description = {
        "targets": ["FGFR3"],
        "encoder": {"name": card.key, "adapted": False, "base_weights_sha256": None},
        "aggregator": {
            "name": "cls-attention",
            "options": {},
            "tau": 1.0,
            "layer_norm": False,
            "feature_size": card.feature_size,
        },
        "training_labels": {"FGFR3": {"positive": 1, "labelled": 2}},
        "run": "benchmark",
    }
    (folder / DESCRIPTION_FILE).write_text(json.dumps(description))


def measured(what: str, words: list[str]) -> tuple[float, float]:
    """Run a command; gives its seconds and the most memory that it and its processes had together, in bytes."""
    most = 0
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stdout=subprocess.DEVNULL)
    ended = threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(LOOK_EVERY_S):
            most = max(most, sum(map(share_of, family_of(process.pid))))

    watcher = threading.Thread(target=look)
    start = time.monotonic()
    watcher.start()
    code = process.wait()
    seconds = time.monotonic() - start
    ended.set()
    watcher.join()
    if code != 0:
        raise SystemExit(f"{what}: tapfm ended with code {code}")
    return seconds, most


def family_of(pid: int) -> list[int]:
    """List a process and all that descend from it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in family_of(int(child)))]


def share_of(pid: int) -> int:
    """Read a process's proportional set size in bytes; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=100_000, help="of the slide, in pixels of level 0")
    parser.add_argument("--copies", type=int, default=36, help="of the section, of about 80 tiles each")
    parser.add_argument("--workers", default="2", help="processes that read tiles")
    parser.add_argument("--no-maps", action="store_true", help="predict only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        section, mpp = painted_section()
        write_slide(folder / "large.svs", section, mpp, chosen.side, chosen.copies)
        print(
            f"large.svs: {chosen.side:,} x {chosen.side:,} px, {(folder / 'large.svs').stat().st_size / 2**20:,.0f} MiB"
        )
        write_model(folder / "model")
        model, out = str(folder / "model"), str(folder / "predicted")
        words = ["predict", "--model", model, str(folder / "large.svs"), "--out", out, "--workers", chosen.workers]
        words += ["--device", chosen.device]
        commands = [("predict", list[str]()), ("heatmaps and GeoJSON", ["--heatmaps", "--geojson", "--resume"])]
        for what, more in commands[:1] if chosen.no_maps else commands:
            seconds, most = measured(what, [*words, *more])
            tiles = PredictionFolder(Path(out)).slides()[0].tiles
            rows.append(Row(what, tiles, seconds, most / 2**30))
    print("| | tiles | seconds | most memory, GiB |\n|---|--:|--:|--:|")
    for row in rows:
        print(f"| {row.what} | {row.tiles:,} | {row.seconds:.0f} | {row.peak_gib:.2f} |")
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
