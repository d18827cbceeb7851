"""Data for `tapfm study --scale mini`: synthetic slides, their tiles, and tiles of another task for the probe."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from tapfm.cohort.cohort_table import read_cohort
from tapfm.runtime.commands import run_child_command
from tapfm.runtime.files import write_atomically
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.output_folder import lock_folder
from tapfm.runtime.seeding import make_rng
from tapfm.runtime.steps import Step
from tapfm.slides.opening import open_slide
from tapfm.study.folder import StudyFolder
from tapfm.study.runner import RunCommand, StudyStepResults, run_steps
from tapfm.synthetic.section import Compartment
from tapfm.synthetic.truth import read_truth
from tapfm.tiles.grid import TileSpec

SLIDES, EXTERNAL, TILES, _PREVALENCE = 40, 12, 40, 0.4
_SYNTH_OPTIONS = (
    *("--slides", str(SLIDES), "--external", str(EXTERNAL), "--tiles-per-slide", str(TILES)),
    *("--prevalence", str(_PREVALENCE)),
    *("--fractions", "0.6", "0.2", "0.2", "--difficulty", "easy"),
)
TABLES = {"test": "cohort.csv", "external": "external.csv"}
_PROBE_CLASSES = {"stroma": Compartment.STROMA, "epithelium": Compartment.EPITHELIUM, "lymphoid": Compartment.LYMPHOID}
_MAX_PROBE_TILES = 60  # per class and split
_MIN_TISSUE_TYPE_FRACTION = 0.6  # minimum fraction of a tile's area with the tissue type of its class
_MIN_PROBE_TILES = 8  # per split; classes with fewer tiles are not used


def synthetic_folder(folder: Path, task: str) -> Path:
    """Return the folder with the synthetic slides of a task."""
    return folder / "synthetic" / task


def tiles_folder(folder: Path, task: str, cohort: str) -> Path:
    """Return the folder with the tiles of the cohort `test` or `external`."""
    return folder / "tiles" / (task if cohort == "test" else f"{task}-{cohort}")


def prepare_mini_data(
    folder: Path, tasks: Sequence[str], *, console: Console, run_command: RunCommand = run_child_command
) -> StudyStepResults:
    """Generate and tile the slides of these tasks. Finished steps are not repeated."""
    folder = folder.absolute()
    steps = [step for task in tasks for step in _task_steps(folder, task)]
    with lock_folder(folder, "tapfm study"), StopSignalHandler(console.print) as stop:
        results = run_steps(steps, StudyFolder(folder), stop, console, run_command)
        return StudyStepResults(folder, results, stop.signal_number())


def _task_steps(folder: Path, task: str) -> list[Step]:
    slides, group, log = synthetic_folder(folder, task), f"synthetic {task}", StudyFolder(folder).log
    synth = Step(
        "synth",
        ("synth", str(slides), "--task", task, *_SYNTH_OPTIONS),
        log(f"synthetic-{task}"),
        group,
        expected_outputs=(slides / "README.md",),  # written last
    )
    steps = [synth]
    for cohort, table in TABLES.items():
        tiles = tiles_folder(folder, task, cohort)
        steps.append(
            Step(
                f"tile {cohort}",
                ("tile", str(slides / table), "--out", str(tiles)),
                log(f"tiles-{tiles.name}"),
                group,
                check_done=partial(_has_all_tiles, slides / table, tiles),
                needs=(synth.key,),
            )
        )
    return steps


def _has_all_tiles(table: Path, folder: Path) -> bool:
    """Return whether every slide of a cohort table is tiled."""
    if not table.is_file() or not (folder / "summary.csv").is_file():
        return False
    rows = read_cohort(table).rows
    return all((folder / "patches" / f"{row.slide_id}_patches.h5").is_file() for row in rows)


def extract_probe_tiles(folder: Path, task: str) -> Path:
    """Write tiles of stroma, epithelium and lymphoid tissue, unless they exist, and return their folder.

    Tiles for training and for testing are from different slides.
    """
    splits = ("train", "test")
    out, synthetic = folder / "probe-tiles", synthetic_folder(folder, task)
    readme = out / "README.md"  # written last
    if readme.is_file():
        return out
    rows = read_cohort(synthetic / TABLES["test"]).rows
    candidates: dict[tuple[str, str], list[tuple[str, int, int, int]]] = {}
    for number, row in enumerate(rows):
        truth = read_truth(synthetic / "truth", row.slide_id)
        positions, side_px0 = truth.default_tile_grid()
        for name, compartment in _PROBE_CLASSES.items():
            fraction = truth.coverage(np.asarray(truth.compartments == compartment), positions, side_px0)
            split = splits[number % 2]
            for index in np.flatnonzero(fraction >= _MIN_TISSUE_TYPE_FRACTION):
                x, y = positions[index].tolist()
                candidates.setdefault((split, name), []).append((row.slide_id, x, y, side_px0))
    paths = {row.slide_id: row.path for row in rows}
    classes = [
        name
        for name in _PROBE_CLASSES
        if all(len(candidates.get((split, name), [])) >= _MIN_PROBE_TILES for split in splits)
    ]
    for split in splits:
        for name in classes:
            tiles = candidates[split, name]
            order = make_rng(0, "probe tiles", split, name).permutation(len(tiles))[:_MAX_PROBE_TILES]
            for slide_id, x, y, side_px0 in sorted(tiles[index] for index in order):
                with closing(open_slide(paths[slide_id])) as slide:
                    pixels = slide.read(x, y, side_px0, TileSpec().tile_px)
                image = io.BytesIO()
                Image.fromarray(pixels).save(image, "PNG")
                write_atomically(out / split / name / f"{slide_id}_{x}_{y}.png", image.getvalue())
    text = f"Tiles of synthetic slides by tissue type ({', '.join(classes)}), for the probe of a forgetting study.\n"
    write_atomically(readme, text.encode())
    return out
