"""Measure the memory of `tapfm predict` for a very large slide of 100,000 x 100,000 px, on a CPU.

    python benchmarks/whole_slide.py                    # writes the slide, predicts it with heatmaps and GeoJSON
    python benchmarks/whole_slide.py --side 20000 --copies 2

The slide has many copies of one synthetic 40x section (as from `tapfm synth`) on glass. It is a pyramid of JPEG tiles
of 512 px. The model is tapfm-pocket with an untrained aggregator: memory does not depend on the weights. Memory is the
sum of the proportional set sizes (PSS, which counts shared memory once) of the command and its child processes, sampled
ten times per second. Prints Markdown; --json saves the values.
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
from tapfm.encoders.catalog import find_encoder_card
from tapfm.prediction.folder import PredictionFolder
from tapfm.runs.checkpoint import save_checkpoint
from tapfm.runs.ensemble import EXPORT_METADATA_FILE
from tapfm.runs.saved_model import AGGREGATOR_FILE
from tapfm.slides.slide import Pixels
from tapfm.synthetic.cohort_plan import CohortSpec, plan_cohort
from tapfm.synthetic.slide_rendering import render_slide

TILE_PX = 512
PYRAMID = (1, 4, 16, 64)
GLASS = 243
SAMPLING_INTERVAL_S = 0.1
PROGRAM = "from tapfm.cli.main import main; main()"


@dataclass
class Row:
    """Measurements of one command."""

    command: str
    tiles: int
    seconds: float
    peak_gib: float


def render_section() -> tuple[Pixels, float]:
    """Render one synthetic 40x section. Return its pixels and microns per pixel."""
    planned = next(slide for slide in plan_cohort(CohortSpec(slides=10, external=0)) if slide.scanner.mpp < 0.3)
    return render_slide(planned).scan.pixels, planned.scanner.mpp


def write_slide(path: Path, section: Pixels, mpp: float, side_px0: int, copies: int) -> None:
    """Write a square slide with copies of a section in rows on glass, as a pyramid, tile by tile."""
    columns = int(np.ceil(np.sqrt(copies)))
    step = side_px0 // columns
    corners = [(step * (i % columns), step * (i // columns)) for i in range(copies)]
    options = {"photometric": "rgb", "compression": "jpeg", "metadata": None, "software": False}
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for level in PYRAMID:
            side_px = side_px0 // level
            height, width = section.shape[0] // level, section.shape[1] // level
            small = cv2.resize(section, (width, height), interpolation=cv2.INTER_AREA) if level > 1 else section
            positions = [(x // level, y // level) for x, y in corners]
            description = (
                f"Aperio Image Library\r\n{side_px0}x{side_px0} (512x512) JPEG/RGB Q=80|AppMag = 40|MPP = {mpp:.4f}"
            )
            writer.write(
                render_tiles(small, positions, side_px),
                shape=(side_px, side_px, 3),
                dtype=np.uint8,
                tile=(TILE_PX, TILE_PX),
                description=description if level == 1 else "",
                compressionargs={"level": 80},
                **options,
            )


def render_tiles(section: Pixels, positions: list[tuple[int, int]], side_px: int) -> Iterator[Pixels]:
    """Yield the tiles of a level with copies of the section at these positions, row by row."""
    height, width = section.shape[:2]
    for y in range(0, side_px, TILE_PX):
        in_this_row = [(left, top) for left, top in positions if top - TILE_PX < y < top + height]
        for x in range(0, side_px, TILE_PX):
            tile = np.full((TILE_PX, TILE_PX, 3), GLASS, np.uint8)
            for left, top in in_this_row:
                from_x, from_y = max(x, left), max(y, top)
                to_x, to_y = min(x + TILE_PX, left + width), min(y + TILE_PX, top + height)
                if from_x < to_x and from_y < to_y:
                    part = section[from_y - top : to_y - top, from_x - left : to_x - left]
                    tile[from_y - y : to_y - y, from_x - x : to_x - x] = part
            yield tile


def write_model(folder: Path) -> None:
    """Write an export of tapfm-pocket with an untrained aggregator."""
    folder.mkdir()
    card = find_encoder_card("tapfm-pocket")
    torch.manual_seed(0)
    aggregator = build_aggregator("cls-attention", card.feature_size, 1)
    tensors = {f"aggregator/{name}": each.detach() for name, each in aggregator.named_parameters()}
    save_checkpoint(folder / AGGREGATOR_FILE, tensors, {"tapfm": tapfm.__version__, "kind": "aggregator"})
    metadata = {
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
    (folder / EXPORT_METADATA_FILE).write_text(json.dumps(metadata))


def run_command(name: str, arguments: list[str]) -> tuple[float, float]:
    """Run a command. Return its seconds and the peak memory of all its processes in bytes."""
    peak_bytes = 0
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.DEVNULL)
    finished = threading.Event()

    def sample_memory() -> None:
        nonlocal peak_bytes
        while not finished.wait(SAMPLING_INTERVAL_S):
            peak_bytes = max(peak_bytes, sum(map(read_pss, list_processes(process.pid))))

    sampler = threading.Thread(target=sample_memory)
    start = time.monotonic()
    sampler.start()
    code = process.wait()
    seconds = time.monotonic() - start
    finished.set()
    sampler.join()
    if code != 0:
        raise SystemExit(f"{name}: tapfm failed with exit code {code}. Its messages are above.")
    return seconds, peak_bytes


def list_processes(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in list_processes(int(child)))]


def read_pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes, or 0 if it has exited."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=100_000, help="width and height of the slide in pixels")
    parser.add_argument("--copies", type=int, default=36, help="copies of the section, with about 80 tiles each")
    parser.add_argument("--workers", default="2", help="worker processes that read tiles")
    parser.add_argument("--no-heatmaps", action="store_true", help="skip heatmaps and GeoJSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        section, mpp = render_section()
        write_slide(folder / "large.svs", section, mpp, arguments.side, arguments.copies)
        size_mib = (folder / "large.svs").stat().st_size / 2**20
        print(f"large.svs: {arguments.side:,} x {arguments.side:,} px, {size_mib:,.0f} MiB")
        write_model(folder / "model")
        model, out = str(folder / "model"), str(folder / "predicted")
        command = ["predict", "--model", model, str(folder / "large.svs"), "--out", out, "--workers", arguments.workers]
        command += ["--device", arguments.device]
        commands = [("predict", list[str]()), ("heatmaps and GeoJSON", ["--heatmaps", "--geojson", "--resume"])]
        for name, options in commands[:1] if arguments.no_heatmaps else commands:
            seconds, peak_bytes = run_command(name, [*command, *options])
            tiles = PredictionFolder(Path(out)).slides()[0].tiles
            rows.append(Row(name, tiles, seconds, peak_bytes / 2**30))
    print("| | tiles | seconds | peak memory, GiB |\n|---|--:|--:|--:|")
    for row in rows:
        print(f"| {row.command} | {row.tiles:,} | {row.seconds:.0f} | {row.peak_gib:.2f} |")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
