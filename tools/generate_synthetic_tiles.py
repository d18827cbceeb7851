"""Generate synthetic tiles to pretrain and to probe tapfm-pocket, on all cores and without writing slides.

    PYTHONPATH=src python tools/generate_synthetic_tiles.py out/tiles --slides 800
    PYTHONPATH=src python tools/generate_synthetic_tiles.py out/probe --probe --slides 240

The first command writes unlabelled tiles as `NNN.npy` (n, 224, 224, 3), from slides of both tasks and all difficulties.
The second writes `train.npz`, `test.npz` and `external.npz`, with another seed. Their arrays have a row per tile:
`tiles` (pixels), `slide` (slide id), `label` (of the slide), `signal` (fraction of the tile with the signal), `truth`
(whether the tile counts as positive) and `nests` (fraction of the tile that is epithelium).
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

from tapfm.synthetic.cohort_plan import DIFFICULTIES, TASKS, CohortSpec, PlannedSlide, plan_cohort
from tapfm.synthetic.slide_rendering import render_slide
from tapfm.synthetic.truth import SIGNAL_THRESHOLD
from tapfm.tiles.grid import TileSpec

PRETRAINING_SEED = 10_000  # far from 0, the default of tapfm synth, so that users' slides are not pretraining slides
PROBE_SEED = 20_000
SHARD_TILES = 4096
MIN_TISSUE = 0.25  # fraction of a tile
COLUMNS = ("tiles", "slide", "label", "truth", "signal", "nests")


def generate_tiles(planned: PlannedSlide) -> tuple[str, npt.NDArray[np.uint8], dict[str, npt.NDArray[np.float64]]]:
    """Return id, tiles and signal fractions of a slide. Tiles have 0.5 um per pixel and JPEG artefacts."""
    cv2.setNumThreads(1)  # slides are processed in parallel
    rendered = render_slide(planned)
    quality = [cv2.IMWRITE_JPEG_QUALITY, planned.scanner.jpeg_quality]
    file = cv2.imencode(".jpg", rendered.scan.pixels[..., ::-1], quality)[1]
    pixels = np.asarray(cv2.imdecode(file, cv2.IMREAD_COLOR))[..., ::-1]
    truth = rendered.truth
    positions, side = truth.default_tile_grid()
    positions = positions[truth.coverage(truth.tissue, positions, side) >= MIN_TISSUE]
    size = (TileSpec().tile_px, TileSpec().tile_px)
    tiles = [cv2.resize(pixels[y : y + side, x : x + side], size, interpolation=cv2.INTER_AREA) for x, y in positions]
    signals = {name: truth.signal_coverage(name, positions, side) for name in planned.labels}
    signals["nests"] = truth.coverage(truth.epithelium, positions, side)
    return planned.slide_id, np.stack(tiles), signals


def generate_in_parallel(slides: Iterable[PlannedSlide], title: str, max_minutes: float = np.inf) -> Iterator[Any]:
    """Yield the results of `generate_tiles` in the order of the slides, and print the progress after `title`.

    Stops after `max_minutes`, even if slides are left.
    """
    planned, start, tiles = list(slides), time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool() as pool:
        for done, result in enumerate(pool.imap(generate_tiles, planned), 1):
            tiles += len(result[1])
            if done % 50 == 0 or done == len(planned):
                seconds = time.monotonic() - start
                print(
                    f"{title}: {done} of {len(planned)} slides, {tiles} tiles, {tiles / seconds:.0f} tiles/s",
                    flush=True,
                )
            yield result
            if time.monotonic() - start > 60 * max_minutes:
                return


def plan_pretraining_slides(count: int, tiles: int) -> list[PlannedSlide]:
    """Plan slides of every task and difficulty, half of them with the stains of the external cohort."""
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


def write_shards(folder: Path, count: int, tiles_per_slide: int, max_minutes: float) -> None:
    """Write unlabelled tiles as .npy shards."""
    pending: list[npt.NDArray[np.uint8]] = []
    shards, pending_tiles = 0, 0
    for _, tiles, _ in generate_in_parallel(
        plan_pretraining_slides(count, tiles_per_slide), "pretraining", max_minutes
    ):
        pending.append(tiles)
        pending_tiles += len(tiles)
        if pending_tiles >= SHARD_TILES:
            np.save(folder / f"{shards:03d}.npy", np.concatenate(pending))
            pending, shards, pending_tiles = [], shards + 1, 0
    if pending:
        np.save(folder / f"{shards:03d}.npy", np.concatenate(pending))


def write_probe_tiles(folder: Path, count: int, tiles_per_slide: int, task: str, difficulty: str) -> None:
    """Write labelled tiles: half of the slides for training a probe, half for testing it, and external slides."""
    spec = CohortSpec(
        slides=count,
        external=count // 2,
        task=task,
        difficulty=difficulty,
        seed=PROBE_SEED,
        tiles=tiles_per_slide,
        fractions=(0.5, 0.0, 0.5),
        prevalence={TASKS[task][0].name: 0.4},
    )
    target = spec.targets[0].name
    slides = plan_cohort(spec)
    columns_by_split: dict[str, dict[str, list[Any]]] = {}
    for planned, (slide_id, tiles, signals) in zip(slides, generate_in_parallel(slides, "probe"), strict=True):
        name = "external" if planned.cohort == "external" else planned.split
        columns = columns_by_split.setdefault(name, {column: [] for column in COLUMNS})
        columns["tiles"].append(tiles)
        columns["slide"].append(np.full(len(tiles), slide_id))
        columns["label"].append(np.full(len(tiles), planned.labels[target]))
        columns["truth"].append(signals[target] >= SIGNAL_THRESHOLD)
        columns["signal"].append(signals[target])
        columns["nests"].append(signals["nests"])
    for name, columns in columns_by_split.items():
        arrays: dict[str, Any] = {key: np.concatenate(values) for key, values in columns.items()}
        np.savez(folder / f"{name}.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument(
        "--slides", type=int, default=800, help="number of slides; --probe adds half as many external slides"
    )
    parser.add_argument("--tiles", type=int, default=80, help="approximate number of tissue tiles per slide")
    parser.add_argument(
        "--minutes", type=float, default=np.inf, help="without --probe: stop after this time and keep the tiles so far"
    )
    parser.add_argument("--probe", action="store_true", help="write labelled tiles for a probe")
    parser.add_argument("--task", default="fgfr3", choices=list(TASKS), help="with --probe: task of the slides")
    parser.add_argument(
        "--difficulty", default="medium", choices=list(DIFFICULTIES), help="with --probe: difficulty of the task"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.probe:
        write_probe_tiles(arguments.folder, arguments.slides, arguments.tiles, arguments.task, arguments.difficulty)
    else:
        write_shards(arguments.folder, arguments.slides, arguments.tiles, arguments.minutes)


if __name__ == "__main__":
    main()
