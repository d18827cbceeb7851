"""Data for `--scale mini`: painted slides, their tiles, and tiles of another task for the probe."""

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
_SYNTH = (
    *("--slides", str(SLIDES), "--external", str(EXTERNAL), "--tiles", str(TILES), "--prevalence", str(_PREVALENCE)),
    *("--fractions", "0.6", "0.2", "0.2", "--difficulty", "easy"),
)
TABLES = {"test": "cohort.csv", "external": "external.csv"}
_PROBE_CLASSES = {"stroma": Compartment.STROMA, "epithelium": Compartment.EPITHELIUM, "lymphoid": Compartment.LYMPHOID}
_PROBE_TILES = 60  # of each class, on either side
_MIN_SHARE = 0.6  # of a tile's area that is of its class
_MIN_TILES = 8  # of a class that is used


def synthetic_folder(folder: Path, task: str) -> Path:
    """Return the folder of a task's painted slides."""
    return folder / "synthetic" / task


def tiles_folder(folder: Path, task: str, cohort: str) -> Path:
    """Return the folder of their tiles."""
    return folder / "tiles" / (task if cohort == "test" else f"{task}-{cohort}")


def prepare_mini_data(
    folder: Path, tasks: Sequence[str], *, console: Console, run_command: RunCommand = run_child_command
) -> StudyStepResults:
    """Paint and tile the slides of these tasks, as far as that is not done yet."""
    folder = folder.absolute()
    steps = [step for task in tasks for step in _task_steps(folder, task)]
    with lock_folder(folder, "tapfm study"), StopSignalHandler(console.print) as stop:
        results = run_steps(steps, StudyFolder(folder), stop, console, run_command)
        return StudyStepResults(folder, results, stop.signal_number())


def _task_steps(folder: Path, task: str) -> list[Step]:
    slides, group, log = synthetic_folder(folder, task), f"synthetic {task}", StudyFolder(folder).log
    paint = Step(
        "synth",
        ("synth", str(slides), "--task", task, *_SYNTH),
        log(f"synthetic-{task}"),
        group,
        files=(slides / "README.md",),  # written last
    )
    steps = [paint]
    for cohort, table in TABLES.items():
        tiles = tiles_folder(folder, task, cohort)
        steps.append(
            Step(
                f"tile {cohort}",
                ("tile", str(slides / table), "--out", str(tiles)),
                log(f"tiles-{tiles.name}"),
                group,
                check_done=partial(_all_tiled, slides / table, tiles),
                needs=(paint.key,),
            )
        )
    return steps


def _all_tiled(table: Path, folder: Path) -> bool:
    """Return whether every slide of a table has its tiles."""
    if not table.is_file() or not (folder / "summary.csv").is_file():
        return False
    rows = read_cohort(table, must_exist=False).rows
    return all((folder / "patches" / f"{row.slide_id}_patches.h5").is_file() for row in rows)


def cut_probe_tiles(folder: Path, task: str) -> Path:
    """Cut tiles of stroma, epithelium and lymphoid tissue from painted slides: half of the slides to learn from."""
    sides = ("train", "test")
    out, made = folder / "probe-tiles", synthetic_folder(folder, task)
    mark = out / "README.md"
    if mark.is_file():
        return out
    rows = read_cohort(made / TABLES["test"], must_exist=False).rows
    found: dict[tuple[str, str], list[tuple[str, int, int, int]]] = {}
    for number, row in enumerate(rows):
        truth = read_truth(made / "truth", row.slide_id)
        positions, side_px0 = truth.default_grid()
        for name, compartment in _PROBE_CLASSES.items():
            share = truth.coverage(np.asarray(truth.compartments == compartment), positions, side_px0)
            side = sides[number % 2]
            for index in np.flatnonzero(share >= _MIN_SHARE):
                x, y = positions[index].tolist()
                found.setdefault((side, name), []).append((row.slide_id, x, y, side_px0))
    paths = {row.slide_id: row.path for row in rows}
    classes = [name for name in _PROBE_CLASSES if all(len(found.get((side, name), [])) >= _MIN_TILES for side in sides)]
    for side in sides:
        for name in classes:
            places = found[side, name]
            order = make_rng(0, "probe tiles", side, name).permutation(len(places))[:_PROBE_TILES]
            for slide_id, x, y, side_px0 in sorted(places[index] for index in order):
                with closing(open_slide(paths[slide_id])) as slide:
                    pixels = slide.read(x, y, side_px0, TileSpec().tile_px)
                picture = io.BytesIO()
                Image.fromarray(pixels).save(picture, "PNG")
                write_atomically(out / side / name / f"{slide_id}_{x}_{y}.png", picture.getvalue())
    write_atomically(mark, f"Tiles of painted slides, by what most of them is: {', '.join(classes)}.\n".encode())
    return out
