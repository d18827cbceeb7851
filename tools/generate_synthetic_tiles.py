"""Paint tiles to pretrain and to probe tapfm-pocket with, on all cores, without writing slides.

    PYTHONPATH=src python tools/generate_synthetic_tiles.py out/tiles --slides 800
    PYTHONPATH=src python tools/generate_synthetic_tiles.py out/probe --probe --slides 240

The first writes unlabelled tiles, `NNN.npy` (n, 224, 224, 3), of slides of both tasks and all difficulties. The second
writes `train.npz`, `test.npz` and `external.npz`, from seeds that the first never uses, with `tiles`, `slide` (which
one), `label` (the slide's), `signal` (which part of the tile shows it), `truth` (does the tile carry it) and `nests`
(which part of the tile is epithelium).
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from tapfm.synthetic.cohort import DIFFICULTIES, TASKS, CohortSpec, PlannedSlide, plan_cohort
from tapfm.synthetic.slides import render_slide
from tapfm.synthetic.truth import SIGNAL_THRESHOLD
from tapfm.tiles.grid import TileSpec

PRETRAINING_SEED = 10_000  # tapfm synth's default is 0: nobody's cohort is likely to be among the pretraining slides
PROBE_SEED = 20_000
SHARD = 4096
LEAST_TISSUE = 0.25
COLUMNS = ("tiles", "slide", "label", "truth", "signal", "nests")


def tiles_of(planned: PlannedSlide) -> tuple[str, npt.NDArray[np.uint8], dict[str, npt.NDArray[np.float64]]]:
    """Paint a slide and cut its tiles, after JPEG, at 0.5 um per pixel; with the part of each that shows a target."""
    cv2.setNumThreads(1)  # the slides are what runs in parallel
    painted = render_slide(planned)
    quality = [cv2.IMWRITE_JPEG_QUALITY, planned.scanner.jpeg_quality]
    file = cv2.imencode(".jpg", painted.scan.pixels[..., ::-1], quality)[1]
    pixels = np.asarray(cv2.imdecode(file, cv2.IMREAD_COLOR))[..., ::-1]
    truth = painted.truth
    positions, side = truth.default_grid()
    positions = positions[truth.coverage(truth.tissue, positions, side) >= LEAST_TISSUE]
    size = (TileSpec().tile_px, TileSpec().tile_px)
    tiles = [cv2.resize(pixels[y : y + side, x : x + side], size, interpolation=cv2.INTER_AREA) for x, y in positions]
    signals = {name: truth.signal(name, positions, side) for name in planned.labels}
    signals["nests"] = truth.coverage(truth.epithelium, positions, side)
    return planned.slide_id, np.stack(tiles), signals


def painted(slides: Iterable[PlannedSlide], what: str, minutes: float = np.inf) -> Iterator[Any]:
    """Paint slides side by side, in order, saying how far it is, until the time is up."""
    todo, start, tiles = list(slides), time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool() as pool:
        for done, result in enumerate(pool.imap(tiles_of, todo), 1):
            tiles += len(result[1])
            if done % 50 == 0 or done == len(todo):
                seconds = time.monotonic() - start
                print(f"{what}: {done} of {len(todo)} slides, {tiles} tiles, {tiles / seconds:.0f} tiles/s", flush=True)
            yield result
            if time.monotonic() - start > 60 * minutes:
                return


def pretraining_slides(count: int, tiles: int) -> list[PlannedSlide]:
    """Plan slides of every task and difficulty, half of them as the external sites stain."""
    kinds = [(task, difficulty) for task in TASKS for difficulty in DIFFICULTIES]
    planned = []
    for index, (task, difficulty) in enumerate(kinds):
        half = max(2, count // len(kinds) // 2)
        spec = CohortSpec(
            slides=half,
            external=half,
            task=task,
            difficulty=difficulty,
            seed=PRETRAINING_SEED + index,
            tiles=tiles,
            prevalence={target.name: 0.4 for target in TASKS[task]},
        )
        planned += plan_cohort(spec)
    return [planned[index] for index in np.random.default_rng(0).permutation(len(planned))]


def write_shards(folder: Path, count: int, tiles_each: int, minutes: float) -> None:
    """Write unlabelled tiles."""
    waiting: list[npt.NDArray[np.uint8]] = []
    shards, held = 0, 0
    for _, tiles, _ in painted(pretraining_slides(count, tiles_each), "pretraining", minutes):
        waiting.append(tiles)
        held += len(tiles)
        if held >= SHARD:
            np.save(folder / f"{shards:03d}.npy", np.concatenate(waiting))
            waiting, shards, held = [], shards + 1, 0
    if waiting:
        np.save(folder / f"{shards:03d}.npy", np.concatenate(waiting))


def write_probe(folder: Path, count: int, tiles_each: int, task: str, difficulty: str) -> None:
    """Write labelled tiles: half of the development slides to train a probe, half to test it, and external ones."""
    spec = CohortSpec(
        slides=count,
        external=count // 2,
        task=task,
        difficulty=difficulty,
        seed=PROBE_SEED,
        tiles=tiles_each,
        fractions=(0.5, 0.0, 0.5),
        prevalence={TASKS[task][0].name: 0.4},
    )
    target = spec.targets[0].name
    slides = plan_cohort(spec)
    rows: dict[str, dict[str, list[Any]]] = {}
    for planned, (slide_id, tiles, signals) in zip(slides, painted(slides, "probe"), strict=True):
        name = "external" if planned.cohort == "external" else planned.split
        into = rows.setdefault(name, {name: [] for name in COLUMNS})
        into["tiles"].append(tiles)
        into["slide"].append(np.full(len(tiles), slide_id))
        into["label"].append(np.full(len(tiles), planned.labels[target]))
        into["truth"].append(signals[target] >= SIGNAL_THRESHOLD)
        into["signal"].append(signals[target])
        into["nests"].append(signals["nests"])
    for name, into in rows.items():
        columns: dict[str, Any] = {key: np.concatenate(values) for key, values in into.items()}
        np.savez(folder / f"{name}.npz", **columns)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slides", type=int, default=800)
    parser.add_argument("--tiles", type=int, default=80, help="of tissue on a slide, about")
    parser.add_argument("--minutes", type=float, default=np.inf, help="stop then, with what is painted")
    parser.add_argument("--probe", action="store_true", help="labelled tiles for a probe instead")
    parser.add_argument("--task", default="fgfr3", choices=list(TASKS))
    parser.add_argument("--difficulty", default="medium", choices=list(DIFFICULTIES))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.probe:
        write_probe(arguments.folder, arguments.slides, arguments.tiles, arguments.task, arguments.difficulty)
    else:
        write_shards(arguments.folder, arguments.slides, arguments.tiles, arguments.minutes)


if __name__ == "__main__":
    main()
