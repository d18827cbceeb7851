"""Steps of a study: status.csv, features that are no longer needed, and the number of threads."""

import csv
import io

import pytest
from rich.console import Console

from tapfm.config.study import load_study
from tapfm.errors import InputError
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.steps import Step
from tapfm.study import runner as study_runner
from tapfm.study.folder import StudyFolder
from tapfm.study.runner import _thread_settings as thread_settings
from tapfm.study.runner import run_steps
from tapfm.study.status import read_status
from tapfm.study.steps import find_finished_steps


def make_step(folder, group, name, *needs):
    files = (folder / f"{group}-{name}",)
    return Step(name, (name, group), folder / "logs" / f"{group}.log", group, expected_outputs=files, needs=needs)


def test_status_csv_has_all_steps_and_keeps_rows_of_other_runs(tmp_path):
    (tmp_path / "status.csv").write_text(
        'run,step,state,reason,command,log\nother,train,failed,"a, b",tapfm train,logs/other.log\n'
    )
    steps = [
        make_step(tmp_path, "features", "embed"),
        *(make_step(tmp_path, run, "train", "features: embed") for run in ("a", "b")),
        make_step(tmp_path, "a", "evaluate test", "a: train"),
    ]

    def run_command(arguments, log, check):
        assert check() is None
        log.parent.mkdir(exist_ok=True)
        log.write_text("error: it is broken\n")
        if arguments == ("train", "a"):
            return 1
        (tmp_path / f"{arguments[1]}-{arguments[0]}").touch()
        return 0

    printed = io.StringIO()
    with StopSignalHandler(print) as stop:
        run_steps(steps, StudyFolder(tmp_path), stop, Console(file=printed, width=200), run_command, jobs=2)
    with (tmp_path / "status.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert "a: train" in rows[-1].pop(3)  # the reason
    assert rows == [
        ["run", "step", "state", "reason", "command", "log"],
        ["other", "train", "failed", "a, b", "tapfm train", "logs/other.log"],
        ["features", "embed", "done", "", "tapfm embed features", "logs/features.log"],
        ["a", "train", "failed", "it is broken", "tapfm train a", "logs/a.log"],
        ["b", "train", "done", "", "tapfm train b", "logs/b.log"],
        ["a", "evaluate test", "not run", "tapfm 'evaluate test' a", "logs/a.log"],
    ]
    assert read_status(StudyFolder(tmp_path))["b", "train"][2] == "done"
    assert "0 of 2 runs done; starting features: embed" in printed.getvalue()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00broken", b"state\nfailed\n"])
def test_damaged_status_csv_is_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "status.csv").write_bytes(content)
    with pytest.raises(InputError, match=r"status\.csv") as caught:
        read_status(StudyFolder(tmp_path))
    assert "Delete" in caught.value.hint


def test_features_are_not_needed_if_all_their_runs_are_finished(tmp_path):
    steps = [make_step(tmp_path, "features", "embed"), make_step(tmp_path, "a", "train", "features: embed")]
    assert find_finished_steps(steps) == set()
    (tmp_path / "a-train").touch()
    assert find_finished_steps(steps) == {"features: embed", "a: train"}


def test_small_encoders_have_few_threads(tmp_path, monkeypatch):
    (tmp_path / "study.toml").write_text(
        'name = "s"\ntargets = ["FGFR3"]\nencoders = ["tapfm-pocket"]\n[cohort]\ntable = "c.csv"\ntiles = "tiles"\n'
    )
    study = load_study(tmp_path / "study.toml")
    monkeypatch.setattr(study_runner, "available_cores", lambda: 6)
    assert thread_settings(study) == {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
    assert thread_settings(study, jobs=2)["OMP_NUM_THREADS"] == "3"
    assert thread_settings(study, jobs=9)["OMP_NUM_THREADS"] == "1"
    large = study.model_copy(update={"encoders": ["tapfm-pocket", "uni"]})
    assert thread_settings(large) == {}
