"""`--scale mini`: painted slides, their tiles, and tiles of another task, made for a study as it needs them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from tapfm.cohort.manifest import read_cohort
from tapfm.runtime.files import write_atomically
from tapfm.runtime.interrupts import StopRequests
from tapfm.runtime.output_folder import locked
from tapfm.runtime.seeding import rng_for
from tapfm.slides.opening import open_slide
from tapfm.study.folder import StudyFolder
from tapfm.study.runner import Outcome, Start, do_steps
from tapfm.study.steps import Step
from tapfm.synthetic.section import Compartment
from tapfm.synthetic.truth import read_truth
from tapfm.tiles.grid import TileSpec

SLIDES, EXTERNAL, TILES, PREVALENCE = 40, 12, 40, 0.4
SYNTH = (
    *("--slides", str(SLIDES), "--external", str(EXTERNAL), "--tiles", str(TILES), "--prevalence", str(PREVALENCE)),
    *("--fractions", "0.6", "0.2", "0.2", "--difficulty", "easy"),
)
TABLES = {"test": "cohort.csv", "external": "external.csv"}
PROBE_CLASSES = {"stroma": Compartment.STROMA, "epithelium": Compartment.EPITHELIUM, "lymphoid": Compartment.LYMPHOID}
PROBE_TILES = 60  # of each class, on either side
MOSTLY = 0.6  # of a tile that is of its class
FEWEST = 8  # tiles, for a class to take part


def painted(folder: Path, task: str) -> Path:
    """Name the folder of a painted cohort."""
    return folder / "painted" / task


def tiles_of(folder: Path, task: str, cohort: str) -> Path:
    """Name the folder of its tiles."""
    return folder / "tiles" / (task if cohort == "test" else f"{task}-{cohort}")


def prepare(folder: Path, tasks: Sequence[str], *, console: Console, start: Start | None = None) -> Outcome:
    """Paint and tile what is not there yet."""
    folder = folder.absolute()
    steps = [step for task in tasks for step in steps_of(folder, task)]
    with locked(folder, "tapfm study"), StopRequests(console.print) as stop:
        ended = do_steps(steps, StudyFolder(folder), stop, console, start)
        return Outcome(folder, ended, stop.asked())


def steps_of(folder: Path, task: str) -> list[Step]:
    """List what makes a painted cohort and its tiles."""
    made, logs = painted(folder, task), StudyFolder(folder)
    paint = Step(
        f"painted {task}",
        "synth",
        ("synth", str(made), "--task", task, *SYNTH),
        (made / "README.md").is_file,  # is written last
        logs.log(f"painted-{task}"),
    )
    steps = [paint]
    for cohort, table in TABLES.items():
        out = tiles_of(folder, task, cohort)
        steps.append(
            Step(
                f"painted {task}",
                f"tile {cohort}",
                ("tile", str(made / table), "--out", str(out)),
                partial(all_tiled, made / table, out),
                logs.log(f"tiles-{out.name}"),
                (paint.key,),
            )
        )
    return steps


def all_tiled(table: Path, folder: Path) -> bool:
    """Say whether every slide has its tiles."""
    if not table.is_file() or not (folder / "summary.csv").is_file():
        return False
    rows = read_cohort(table, must_exist=False).rows
    return all((folder / "patches" / f"{row.slide_id}_patches.h5").is_file() for row in rows)


def cut_probe_tiles(folder: Path, task: str) -> Path:
    """Cut tiles of stroma, epithelium and lymphoid tissue from painted slides: half of the slides to learn from."""
    out, made = folder / "probe-tiles", painted(folder, task)
    mark = out / "README.md"
    if mark.is_file():
        return out
    rows = read_cohort(made / TABLES["test"], must_exist=False).rows
    found: dict[tuple[str, str], list[tuple[str, int, int, int]]] = {}
    for number, row in enumerate(rows):
        truth = read_truth(made / "truth", row.slide_id)
        positions, side_px0 = truth.grid()
        for name, compartment in PROBE_CLASSES.items():
            share = truth.share(np.asarray(truth.compartments == compartment), positions, side_px0)
            side = ("train", "test")[number % 2]
            for index in np.flatnonzero(share >= MOSTLY):
                x, y = positions[index].tolist()
                found.setdefault((side, name), []).append((row.slide_id, x, y, side_px0))
    paths = {row.slide_id: row.path for row in rows}
    classes = [
        name for name in PROBE_CLASSES if all(len(found.get((side, name), [])) >= FEWEST for side in ("train", "test"))
    ]
    for side in ("train", "test"):
        for name in classes:
            places = found[side, name]
            order = rng_for(0, "probe tiles", side, name).permutation(len(places))[:PROBE_TILES]
            for slide_id, x, y, side_px0 in sorted(places[index] for index in order):
                with closing(open_slide(paths[slide_id])) as slide:
                    pixels = slide.read(x, y, side_px0, TileSpec().tile_px)
                picture = io.BytesIO()
                Image.fromarray(pixels).save(picture, "PNG")
                write_atomically(out / side / name / f"{slide_id}_{x}_{y}.png", picture.getvalue())
    write_atomically(mark, f"Tiles of painted slides, by what most of them is: {', '.join(classes)}.\n".encode())
    return out
