"""A folder with every kind of file that tapfm writes, all of them small, made by its own commands."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tapfm.cli.main import app
from tapfm.config.study import resolve_study
from tapfm.runs.ensemble import write_ensemble
from tapfm.study.folder import StudyFolder
from tapfm.study.report import write_report
from tapfm.study.runs import runs_of
from tapfm.study.status import write_status

TARGET = "FGFR3"  # the one that is painted; on the page it stands for any
SLIDE = "S001"  # the first that is painted; on the page ID


def make_lab(folder: Path) -> None:
    """Paint six slides and do everything with them that leaves a file behind."""
    with contextlib.chdir(folder), one_thread():
        painted = ("--slides", 6, "--external", 1, "--tiles", 10, "--prevalence", 0.5, "--workers", 1)
        tapfm("synth", "painted", *painted, "--fractions", 0.34, 0.33, 0.33)
        tapfm("inspect", "painted/slides", "--write-cohort", "cohort.csv")
        tapfm("split", "painted/cohort.csv", "--out", "split.csv", "--force", "--fractions", 0.34, 0.33, 0.33)
        tapfm("tile", "split.csv", "--out", "tiles", "--workers", 1)
        tapfm("tile", f"painted/slides/{SLIDE}.svs", "--out", "tiles-clam", "--layout", "clam", "--workers", 1)
        one = ("--only", SLIDE, "--device", "cpu", "--workers", 0)
        tapfm("embed", "split.csv", "--encoder", "tapfm-pocket", "--tiles", "tiles", "--out", "features", *one)
        tapfm("config", "--cohort", "split.csv", "--encoder", "tapfm-pocket", "--out", "run.toml")
        small = ("--set", "schedule.epochs=1", "--set", "adaptation.tiles_per_slide=4")
        tapfm("train", "run.toml", "--out", "runs/first", *small, "--device", "cpu", "--workers", 0)
        tapfm("evaluate", "runs/first", "--out", "evaluated", "--device", "cpu", "--workers", 0, "--resamples", 20)
        tables = ("model=evaluated/predictions.csv", "colours=evaluated/predictions-baseline.csv")
        tapfm("compare", *tables, "--out", "compared", "--resamples", 20)
        slide = (f"painted/slides/{SLIDE}.svs", "--tiles", "tiles", "--heatmaps", "--geojson")
        tapfm("predict", "--model", "runs/first", *slide, "--out", "predicted", "--device", "cpu", "--workers", 0)
        tapfm("export", "runs/first", "--out", "exported")
        tapfm("report", "runs/first", "--out", "report.html")
        write_ensemble(Path("ensemble"), [Path("runs/first")], "seeds")
        make_study(StudyFolder(Path("study")))


def make_study(folder: StudyFolder) -> None:
    """Write the results of studies; the run and the evaluation of the lab stand for theirs, which take minutes."""
    given: dict[str, object] = {"name": "A study", "targets": [TARGET], "encoders": ["tapfm-pocket"], "unit": "slide"}
    given |= {"regimes": ["tapfm"], "resamples": 20, "cohort": {"table": "split.csv", "tiles": "tiles"}}
    write_status(folder, [], {})
    write_report(resolve_study(given | {"report": "forgetting", "probe": {"tiles": "tiles"}}), folder)
    orders = ("before", "after", "joint")
    variants = [{"name": order, "settings": {"adaptation": {"bag_gradient": order}}} for order in orders]
    study = resolve_study(given | {"report": "stability", "variants": variants})
    run = runs_of(study)[0]
    shutil.copytree("runs/first", folder.run(run))
    shutil.copytree("evaluated", folder.evaluation(run, "test"))
    write_report(study, folder)
    for name in ("runs", "evaluations"):
        shutil.rmtree(folder.path / name)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Of so small an encoder, threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tapfm(*arguments: object) -> None:
    """Run a command in this process; what it says is shown where it fails."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            ended = app([str(each) for each in arguments], standalone_mode=False)
    except BaseException:
        os.write(2, said.getvalue().encode())
        raise
    if ended:
        raise RuntimeError(f"tapfm {arguments[0]} ended with {ended}:\n{said.getvalue()}")
