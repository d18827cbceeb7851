"""`tapfm train` stopped, killed and gone on with: nothing is lost, nothing changes, nothing else is gone on with."""

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from cohort_files import rows_of
from command_line import start, tapfm, wait_for
from training_lab import edit, history_of, same_weights, slide_id, train_in, untimed

from tapfm.encoders.catalog import encoder_card
from tapfm.errors import CheckpointError, Interrupted
from tapfm.inference.cohort import FinishedSlides
from tapfm.runs.checkpoint import read_description
from tapfm.runs.folder import RunFolder


@pytest.fixture(scope="module")
def first(train):
    return train("first", "schedule.epochs=3")


def test_a_killed_run_goes_on_to_the_same_weights(lab, tmp_path):
    """Killed three times at random steps, by the signal that no program hears."""
    settings = ["--set", "schedule.epochs=3", "--set", "machine.checkpoint_minutes=1e-9", "--set", "adaptation.chunk=2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tapfm("train", lab / "run.toml", "--out", whole, *settings).returncode == 0
    last = killed / "checkpoints" / "last.safetensors"

    def step():
        try:
            return read_description(last)["progress"]["step"]
        except CheckpointError:
            return -1

    rng = np.random.default_rng(0)
    deadly = np.cumsum(rng.integers(1, 4, 3)).tolist()
    for number in deadly:
        process = start("train", lab / "run.toml", "--out", killed, *settings, "--resume")
        wait_for(lambda number=number: step() >= number, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert 0 < read_description(last)["progress"]["step"] < 12
    result = tapfm("train", lab / "run.toml", "--out", killed, *settings, "--resume")
    assert result.returncode == 0, result.stderr
    assert "Resuming in epoch" in result.stderr
    assert same_weights(whole, killed)
    assert untimed(whole) == untimed(killed)
    assert len(json.loads((killed / "environment.json").read_text())) == 4
    assert not list(killed.rglob("*.unfinished"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(lab, tmp_path, number, code):
    out = tmp_path / "run"
    settings = ["--set", "schedule.epochs=100", "--set", "machine.checkpoint_minutes=1e-9"]
    process = start("train", lab / "run.toml", "--out", out, *settings)
    wait_for((out / "checkpoints" / "last.safetensors").exists, process)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == code, said
    assert "Traceback" not in said
    (command,) = re.findall(r"To resume: (tapfm train .*)", said)
    step = read_description(out / "checkpoints" / "last.safetensors")["progress"]["step"]
    assert step > 0
    settings = ["--set", "schedule.epochs=100"]
    process = start(*shlex.split(command)[1:])
    wait_for(lambda: read_description(out / "checkpoints" / "last.safetensors")["progress"]["step"] > step, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_run_is_not_written_over_and_a_finished_one_is_not_trained_again(first, lab):
    before = (first / "checkpoints" / "last.safetensors").read_bytes()
    result = tapfm("train", lab / "run.toml", "--out", first, "--set", "schedule.epochs=3")
    assert result.returncode == 2
    assert "holds a finished run" in result.said
    assert f"tapfm export {first} --out exported/first" in result.said
    result = tapfm("train", first / "config.toml", "--out", first, "--resume")
    assert result.returncode == 0
    assert "Kept: epoch" in result.said
    assert (first / "checkpoints" / "last.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["adaptation.lambda=0.5"], "adaptation.lambda was 1.0, is 0.5"),
        (["schedule.epochs=9", "seed=3"], "seed was 0, is 3"),
        (['task.targets=["TP53"]'], "task.targets was ['FGFR3'], is ['TP53']"),
        (["adaptation.scope=lora:2"], "adaptation.scope was 'full', is 'lora:2'"),
    ],
)
def test_resuming_with_another_configuration_is_refused_with_the_difference(first, lab, changes, said):
    options = [part for change in ["schedule.epochs=3", *changes] for part in ("--set", change)]
    result = tapfm("train", lab / "run.toml", "--out", first, "--resume", *options)
    assert result.returncode == 2
    assert said in result.said
    assert "adaptation.tau" not in result.said


def test_what_the_machine_does_may_change(first, lab):
    options = ["--set", "schedule.epochs=3", "--workers", 1, "--allow-failures", 4]
    assert tapfm("train", lab / "run.toml", "--out", first, "--resume", *options).returncode == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[5].update(FGFR3="0"), "case-05: FGFR3 was '1', is '0'"),
        (lambda rows: rows.pop(7), "1 slides are gone: case-07"),
        (lambda rows: rows[7].update(split="val"), "case-07: split was 'test', is 'val'"),
        (lambda rows: rows[0].update(patient_id="Roe"), "case-00: patient_id was 'Doe0', is 'Roe'"),
    ],
)
def test_resuming_with_another_cohort_is_refused_with_the_difference(own_lab, change, said):
    assert train_in(own_lab).returncode == 0
    edit(own_lab / "cohort.csv", change)
    result = train_in(own_lab, "--resume")
    assert result.returncode == 2
    assert said in result.said


def test_resuming_with_other_tiles_is_refused(own_lab):
    import h5py

    assert train_in(own_lab).returncode == 0
    with h5py.File(own_lab / "tiles" / "patches" / "case-03_patches.h5", "r+") as file:
        file["coords"].attrs["tapfm_fingerprint"] = "of another version"
    assert train_in(own_lab, "--resume").returncode == 0  # the same tiles, whichever code made them
    with h5py.File(own_lab / "tiles" / "patches" / "case-03_patches.h5", "r+") as file:
        file["coords"][0] += 1
    result = train_in(own_lab, "--resume")
    assert result.returncode == 2
    assert "case-03: its tiles are others" in result.said


def test_a_checkpoint_of_another_run_is_refused(own_lab):
    assert train_in(own_lab).returncode == 0
    assert train_in(own_lab, "--set", "seed=1", out="other").returncode == 0
    shutil.copy(own_lab / "other" / "checkpoints" / "last.safetensors", own_lab / "run" / "checkpoints")
    result = train_in(own_lab, "--resume")
    assert result.returncode == 2
    assert "was not made with the config.toml" in result.said
    assert read_description(own_lab / "other" / "checkpoints" / "last.safetensors")["config"]["seed"] == 1


def test_a_moved_lab_goes_on(own_lab, tmp_path_factory):
    assert train_in(own_lab).returncode == 0
    moved = tmp_path_factory.mktemp("moved") / "lab"
    shutil.move(own_lab, moved)
    result = train_in(moved, "--resume")
    assert result.returncode == 0, result.said


def test_a_folder_in_use_is_locked(lab, tmp_path):
    process = start("train", lab / "run.toml", "--out", tmp_path / "run", "--set", "schedule.epochs=100")
    wait_for((tmp_path / "run" / "config.toml").exists, process)
    result = tapfm("train", lab / "run.toml", "--out", tmp_path / "run", "--resume")
    process.kill()
    process.communicate()
    assert result.returncode == 2
    assert "Another tapfm train is at work" in result.stderr


def test_a_slide_that_was_mended_is_learnt_from_when_the_run_goes_on(own_lab):
    whole = (own_lab / "2.svs").read_bytes()
    (own_lab / "2.svs").write_bytes(b"no slide")
    two = ["--set", "schedule.epochs=2"]
    assert train_in(own_lab, *two).returncode == 3
    (own_lab / "2.svs").write_bytes(whole)
    result = train_in(own_lab, *two, "--resume")
    assert result.returncode == 0, result.said
    assert [row["slides"] for row in history_of(own_lab / "run")] == [3, 4]
    assert rows_of(own_lab / "run" / "failures.csv") == []


def test_other_weights_of_the_encoder_are_refused_when_resuming(own_lab):
    from safetensors.torch import load_file, save_file

    card = encoder_card("tapfm-pocket")
    weights = load_file(card.package_folder / card.file)
    save_file({name: weight * 1.01 for name, weight in weights.items()}, own_lab / "other.safetensors")
    assert train_in(own_lab, "--set", "adaptation.scope=last:1").returncode == 0
    other = ["--set", f"encoder.weights={own_lab / 'other.safetensors'}", "--set", "adaptation.scope=last:1"]
    result = train_in(own_lab, "--resume", *other)
    assert result.returncode == 2
    assert "begun with other weights of its encoder" in result.said


def test_a_refused_start_leaves_the_folder_to_the_next_one(own_lab):
    assert train_in(own_lab, "--set", "adaptation.scope=last:99").returncode == 2
    result = train_in(own_lab)
    assert result.returncode == 0, result.said


def test_memory_may_be_saved_when_a_run_goes_on(own_lab):
    assert train_in(own_lab).returncode == 0
    less = ["--set", "adaptation.chunk=1", "--set", "adaptation.recompute=block"]
    assert train_in(own_lab, "--resume", *less).returncode == 0


def test_copied_features_are_the_same_features(own_lab):
    fixed = ["--set", "adaptation.method=fixed"]
    assert train_in(own_lab, *fixed).returncode == 0
    for path in (own_lab / "features").glob("*.h5"):
        os.utime(path, (0, 0))
    assert train_in(own_lab, *fixed, "--resume").returncode == 0


def test_the_best_weights_are_those_that_the_last_checkpoint_names(tmp_path):
    from training_slides import make_learner

    from tapfm.runs.progress import RunProgress

    learner, folder = make_learner(), begun(tmp_path)
    progress = RunProgress(best_epoch=0, best_score=0.7, history=[{"epoch": 1}])
    folder.save_best(learner, progress)
    assert not folder.best.exists(), "not before the last checkpoint is there"
    folder.save_last(learner, progress)
    assert read_description(folder.best)["epoch"] == 1
    orphan = RunProgress(best_epoch=1, best_score=0.8, history=[{"epoch": 1}, {"epoch": 2}])
    folder.save_best(learner, orphan)  # and killed before the last one is saved
    found = RunFolder(tmp_path).load_progress(learner)
    assert found.best_epoch == 0
    assert read_description(folder.best)["epoch"] == 1
    assert not folder.next_best.exists()


def test_a_resumed_run_does_not_hold_on_to_the_old_file(tmp_path):
    from training_slides import labelled, make_learner, run, write_slides

    slides = write_slides(tmp_path / "slides", 2)
    learner, folder = make_learner(), begun(tmp_path)
    progress = run(learner, slides, training=labelled(slides), memory=folder_with_ears(folder))
    again = make_learner(seed=1)
    assert folder.load_progress(again).step == progress.step
    assert str(folder.last) not in Path("/proc/self/maps").read_text()  # others may be waiting for the collector


def begun(folder):
    (folder / "config.toml").write_text("seed = 0\n")
    (folder / "split.csv").write_text("slide_id\n")
    return RunFolder(folder)


def folder_with_ears(folder):
    """A run folder that also listens."""
    from training_slides import Memory

    memory = Memory()
    memory.save_last, memory.save_best = folder.save_last, folder.save_best
    return memory


def test_stopped_in_the_final_predictions_it_goes_on_there(own_lab, monkeypatch):
    added = []
    add = FinishedSlides.add

    def add_and_stop(self, slide, finished):
        add(self, slide, finished)
        added.append(slide)
        if len(added) == 4:
            raise Interrupted(15)

    monkeypatch.setattr(FinishedSlides, "add", add_and_stop)
    assert train_in(own_lab).returncode == 143
    assert train_in(own_lab, "--resume").returncode == 0
    assert added == [slide_id(i) for i in range(4, 10)], "none of them twice"
    assert train_in(own_lab, "--resume").returncode == 0
    assert len(added) == 6, "nor when all is done"
