"""Create small sample files of every format that tapfm writes, with its own commands."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tapfm.cli.main import app
from tapfm.config.loading import load_config
from tapfm.config.study import resolve_study
from tapfm.runs.cross_validation import CrossValidationFolder
from tapfm.runs.ensemble import write_ensemble
from tapfm.study.folder import StudyFolder
from tapfm.study.runs import list_runs
from tapfm.study.status import write_status
from tapfm.study.study_tables import write_study_tables

TARGET = "FGFR3"  # target of the synthetic cohort; shown as `TARGET` on the page
SLIDE = "S001"  # first slide of the synthetic cohort; shown as `ID` on the page


def create_sample_files(folder: Path) -> None:
    """Generate synthetic slides, and run the commands whose files are documented on them."""
    with contextlib.chdir(folder), _single_thread():
        cohort_options = ("--slides", 6, "--external", 1, "--tiles-per-slide", 10, "--prevalence", 0.5, "--workers", 1)
        _run_tapfm("synth", "synthetic", *cohort_options, "--fractions", 0.34, 0.33, 0.33)
        _run_tapfm("inspect", "synthetic/slides", "--write-cohort", "cohort.csv")
        fractions = ("--fractions", 0.34, 0.33, 0.33)
        _run_tapfm("split", "synthetic/cohort.csv", "--target", TARGET, "--out", "split.csv", "--force", *fractions)
        _run_tapfm("tile", "split.csv", "--out", "tiles", "--workers", 1)
        _run_tapfm("tile", f"synthetic/slides/{SLIDE}.svs", "--out", "tiles-clam", "--layout", "clam", "--workers", 1)
        one_slide = ("--only", SLIDE, "--device", "cpu", "--workers", 0)
        _run_tapfm(
            "embed", "split.csv", "--encoder", "tapfm-pocket", "--tiles", "tiles", "--out", "features", *one_slide
        )
        _run_tapfm(
            *("config", "--cohort", "split.csv", "--target", TARGET, "--encoder", "tapfm-pocket", "--out", "run.toml")
        )
        small = ("--set", "schedule.epochs=1", "--set", "adaptation.tiles_per_slide=4")
        _run_tapfm("train", "run.toml", "--out", "runs/first", *small, "--device", "cpu", "--workers", 0)
        _run_tapfm("evaluate", "runs/first", "--out", "evaluated", "--device", "cpu", "--workers", 0, "--resamples", 20)
        tables = ("model=evaluated/predictions.csv", "colours=evaluated/predictions-baseline.csv")
        _run_tapfm("compare", *tables, "--out", "compared", "--resamples", 20)
        slide = (f"synthetic/slides/{SLIDE}.svs", "--tiles", "tiles", "--heatmaps", "--geojson")
        _run_tapfm("predict", "--model", "runs/first", *slide, "--out", "predicted", "--device", "cpu", "--workers", 0)
        _run_tapfm("export", "runs/first", "--out", "exported")
        _run_tapfm("report", "runs/first", "--out", "report.html")
        write_ensemble(Path("ensemble"), [Path("runs/first")], "seeds")
        CrossValidationFolder(Path("cross-validated"), 5).start(load_config(Path("run.toml")))
        Path("cross-validated/run.toml").unlink()
        _create_study_files(StudyFolder(Path("study")))


def _create_study_files(folder: StudyFolder) -> None:
    """Write results of studies from the sample run and its evaluation, because a real study takes minutes."""
    settings: dict[str, object] = {
        "name": "A study",
        "targets": [TARGET],
        "encoders": ["tapfm-pocket"],
        "unit": "slide",
    }
    settings |= {"methods": ["tapfm"], "resamples": 20, "cohort": {"table": "split.csv", "tiles": "tiles"}}
    write_status(folder, [], {})
    write_study_tables(resolve_study(settings | {"report": "forgetting", "probe": {"tiles": "tiles"}}), folder)
    orders = ("before", "after", "joint")
    variants = [{"name": order, "settings": {"adaptation": {"bag_gradient": order}}} for order in orders]
    study = resolve_study(settings | {"report": "stability", "variants": variants})
    run = list_runs(study)[0]
    shutil.copytree("runs/first", folder.run(run))
    shutil.copytree("evaluated", folder.evaluation(run, "test"))
    write_study_tables(study, folder)
    for name in ("runs", "evaluations"):
        shutil.rmtree(folder.path / name)


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    """Use one torch thread; more threads slow down a small encoder."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _run_tapfm(*arguments: object) -> None:
    """Run a command in this process, and print its output only if it fails."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            exit_code = app([str(argument) for argument in arguments], standalone_mode=False)
    except BaseException:
        os.write(2, output.getvalue().encode())
        raise
    if exit_code:
        raise RuntimeError(f"tapfm {arguments[0]} failed with exit code {exit_code}:\n{output.getvalue()}")
