"""`tapfm train --resume` after signals and kills, and with changed settings or data."""

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from cohort_files import read_rows
from command_line import start_tapfm, tapfm, wait_for
from training_workspace import case_id, edit_csv, have_same_weights, history_without_times, read_history, run_train

from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import CheckpointError, Interrupted
from tapfm.inference.cohort import FinishedSlides
from tapfm.runs.checkpoint import read_checkpoint_metadata
from tapfm.runs.folder import RunFolder


@pytest.fixture(scope="module")
def first(train):
    return train("first", "schedule.epochs=3")


def test_resume_after_kill_gives_the_same_weights(workspace, tmp_path):
    """The run is killed with SIGKILL at three random steps."""
    settings = ["--set", "schedule.epochs=3", "--set", "machine.checkpoint_minutes=1e-9", "--set", "adaptation.chunk=2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert tapfm("train", workspace / "run.toml", "--out", whole, *settings).returncode == 0
    last = killed / "checkpoints" / "last.safetensors"

    def step():
        try:
            return read_checkpoint_metadata(last)["progress"]["step"]
        except CheckpointError:
            return -1

    rng = np.random.default_rng(0)
    kill_steps = np.cumsum(rng.integers(1, 4, 3)).tolist()
    for number in kill_steps:
        process = start_tapfm("train", workspace / "run.toml", "--out", killed, *settings, "--resume")
        wait_for(lambda number=number: step() >= number, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert 0 < read_checkpoint_metadata(last)["progress"]["step"] < 12
    result = tapfm("train", workspace / "run.toml", "--out", killed, *settings, "--resume")
    assert result.returncode == 0, result.stderr
    assert "Resuming in epoch" in result.stderr
    assert have_same_weights(whole, killed)
    assert history_without_times(whole) == history_without_times(killed)
    assert len(json.loads((killed / "environment.json").read_text())) == 4
    assert not list(killed.rglob("*.unfinished"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_a_checkpoint_and_prints_the_resume_command(workspace, tmp_path, number, code):
    out = tmp_path / "run"
    settings = ["--set", "schedule.epochs=100", "--set", "machine.checkpoint_minutes=1e-9"]
    process = start_tapfm("train", workspace / "run.toml", "--out", out, *settings)
    wait_for((out / "checkpoints" / "last.safetensors").exists, process)
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    (command,) = re.findall(r"To resume: (tapfm train .*)", stderr)
    step = read_checkpoint_metadata(out / "checkpoints" / "last.safetensors")["progress"]["step"]
    assert step > 0
    settings = ["--set", "schedule.epochs=100"]
    process = start_tapfm(*shlex.split(command)[1:])
    wait_for(
        lambda: read_checkpoint_metadata(out / "checkpoints" / "last.safetensors")["progress"]["step"] > step, process
    )
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_existing_run_is_not_overwritten_and_finished_run_is_not_trained_again(first, workspace):
    before = (first / "checkpoints" / "last.safetensors").read_bytes()
    result = tapfm("train", workspace / "run.toml", "--out", first, "--set", "schedule.epochs=3")
    assert result.returncode == 2
    assert "already contains a finished run" in result.output
    assert f"tapfm export {first} --out exported/first" in result.output
    result = tapfm("train", first / "config.toml", "--out", first, "--resume")
    assert result.returncode == 0
    assert "Best epoch: " in result.output
    assert (first / "checkpoints" / "last.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (["adaptation.lambda=0.5"], "adaptation.lambda was 1.0 and is now 0.5"),
        (["schedule.epochs=9", "seed=3"], "seed was 0 and is now 3"),
        (['task.targets=["TP53"]'], "task.targets was ['FGFR3'] and is now ['TP53']"),
        (["adaptation.scope=lora:2"], "adaptation.scope was 'full' and is now 'lora:2'"),
    ],
)
def test_resume_with_different_settings_lists_the_differences(first, workspace, changes, difference):
    options = [part for change in ["schedule.epochs=3", *changes] for part in ("--set", change)]
    result = tapfm("train", workspace / "run.toml", "--out", first, "--resume", *options)
    assert result.returncode == 2
    assert difference in result.output
    assert "adaptation.tau" not in result.output
    assert f"--out {first} --resume" in result.output


def test_machine_settings_may_change_on_resume(first, workspace):
    options = ["--set", "schedule.epochs=3", "--workers", 1, "--allow-failures", 4]
    assert tapfm("train", workspace / "run.toml", "--out", first, "--resume", *options).returncode == 0


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda rows: rows[5].update(FGFR3="0"), "case-05: FGFR3 was '1', is now '0'"),
        (lambda rows: rows.pop(7), "1 slide removed: case-07"),
        (lambda rows: rows[7].update(split="val"), "case-07: split was 'test', is now 'val'"),
        (lambda rows: rows[0].update(patient_id="Roe"), "case-00: patient_id was 'Doe0', is now 'Roe'"),
    ],
)
def test_resume_with_different_cohort_lists_the_differences(workspace_copy, change, difference):
    assert run_train(workspace_copy).returncode == 0
    edit_csv(workspace_copy / "cohort.csv", change)
    result = run_train(workspace_copy, "--resume")
    assert result.returncode == 2
    assert difference in result.output


def test_hint_after_resuming_with_another_cohort_table_works(workspace_copy):
    assert run_train(workspace_copy).returncode == 0
    other = shutil.copyfile(workspace_copy / "cohort.csv", workspace_copy / "other.csv")
    edit_csv(other, lambda rows: rows[5].update(FGFR3="0"))
    result = run_train(workspace_copy, "--resume", "--set", f"cohort.table={other}")
    assert result.returncode == 2
    (command,) = re.findall(r"original settings: tapfm (.*)", result.output)
    assert tapfm(*shlex.split(command)).returncode == 0


def test_resume_with_different_tiles_is_rejected(workspace_copy):
    import h5py

    assert run_train(workspace_copy).returncode == 0
    with h5py.File(workspace_copy / "tiles" / "patches" / "case-03_patches.h5", "r+") as file:
        file["coords"].attrs["tapfm_fingerprint"] = "of another version"
    assert run_train(workspace_copy, "--resume").returncode == 0  # the same tiles, written by another version
    with h5py.File(workspace_copy / "tiles" / "patches" / "case-03_patches.h5", "r+") as file:
        file["coords"][0] += 1
    result = run_train(workspace_copy, "--resume")
    assert result.returncode == 2
    assert "case-03: its tiles or features have changed" in result.output
    assert "--resume" not in result.output, "the same command would fail again"


def test_checkpoint_of_another_run_is_rejected(workspace_copy):
    assert run_train(workspace_copy).returncode == 0
    assert run_train(workspace_copy, "--set", "seed=1", out="other").returncode == 0
    shutil.copy(workspace_copy / "other" / "checkpoints" / "last.safetensors", workspace_copy / "run" / "checkpoints")
    result = run_train(workspace_copy, "--resume")
    assert result.returncode == 2
    assert "does not belong to" in result.output
    assert (
        read_checkpoint_metadata(workspace_copy / "other" / "checkpoints" / "last.safetensors")["config"]["seed"] == 1
    )


def test_run_can_be_resumed_after_a_path_in_its_config_was_edited(workspace_copy):
    assert run_train(workspace_copy).returncode == 0
    config = workspace_copy / "run" / "config.toml"
    before = RunFolder(config.parent).compute_run_id()
    (workspace_copy / "tiles").rename(workspace_copy / "moved-tiles")
    text = config.read_text()
    assert str(workspace_copy / "tiles") in text
    config.write_text(text.replace(str(workspace_copy / "tiles"), str(workspace_copy / "moved-tiles")))
    assert RunFolder(config.parent).compute_run_id() == before
    result = tapfm("train", config, "--out", config.parent, "--resume")
    assert result.returncode == 0, result.output


def test_run_can_be_resumed_after_moving_all_files(workspace_copy, tmp_path_factory):
    assert run_train(workspace_copy).returncode == 0
    moved = tmp_path_factory.mktemp("moved") / "workspace"
    shutil.move(workspace_copy, moved)
    result = run_train(moved, "--resume")
    assert result.returncode == 0, result.output


def test_run_folder_is_locked_while_in_use(workspace, tmp_path):
    process = start_tapfm("train", workspace / "run.toml", "--out", tmp_path / "run", "--set", "schedule.epochs=100")
    wait_for((tmp_path / "run" / "config.toml").exists, process)
    result = tapfm("train", workspace / "run.toml", "--out", tmp_path / "run", "--resume")
    process.kill()
    process.communicate()
    assert result.returncode == 2
    assert "Another tapfm command is running" in result.stderr


def test_repaired_slide_is_used_after_resume(workspace_copy):
    whole = (workspace_copy / "2.svs").read_bytes()
    (workspace_copy / "2.svs").write_bytes(b"not a slide")
    two = ["--set", "schedule.epochs=2"]
    assert run_train(workspace_copy, *two).returncode == 3
    (workspace_copy / "2.svs").write_bytes(whole)
    result = run_train(workspace_copy, *two, "--resume")
    assert result.returncode == 0, result.output
    assert [row["slides"] for row in read_history(workspace_copy / "run")] == [3, 4]
    assert read_rows(workspace_copy / "run" / "failures.csv") == []


def test_resume_with_different_encoder_weights_is_rejected(workspace_copy):
    from safetensors.torch import load_file, save_file

    card = find_encoder_card("tapfm-pocket")
    weights = load_file(card.package_folder / card.file)
    save_file({name: weight * 1.01 for name, weight in weights.items()}, workspace_copy / "other.safetensors")
    assert run_train(workspace_copy, "--set", "adaptation.scope=last:1").returncode == 0
    other = ["--set", f"encoder.weights={workspace_copy / 'other.safetensors'}", "--set", "adaptation.scope=last:1"]
    result = run_train(workspace_copy, "--resume", *other)
    assert result.returncode == 2
    assert "was started with different encoder weights" in result.output


def test_rejected_start_does_not_claim_the_folder(workspace_copy):
    assert run_train(workspace_copy, "--set", "adaptation.scope=last:99").returncode == 2
    result = run_train(workspace_copy)
    assert result.returncode == 0, result.output


def test_memory_settings_may_change_on_resume(workspace_copy):
    assert run_train(workspace_copy).returncode == 0
    less = ["--set", "adaptation.chunk=1", "--set", "adaptation.recompute=block"]
    assert run_train(workspace_copy, "--resume", *less).returncode == 0


def test_copied_features_are_accepted_on_resume(workspace_copy):
    fixed = ["--set", "adaptation.method=fixed"]
    assert run_train(workspace_copy, *fixed).returncode == 0
    for path in (workspace_copy / "features").glob("*.h5"):
        os.utime(path, (0, 0))
    assert run_train(workspace_copy, *fixed, "--resume").returncode == 0


def test_best_weights_are_those_recorded_in_the_last_checkpoint(tmp_path):
    from training_slides import make_learner

    from tapfm.runs.run_progress import RunProgress

    learner, folder = make_learner(), make_run_folder(tmp_path)
    progress = RunProgress(best_epoch=0, best_score=0.7, history=[{"epoch": 1}])
    folder.save_best(learner, progress)
    assert not folder.best_checkpoint.exists(), "the last checkpoint must be written first"
    folder.save_last(learner, progress)
    assert read_checkpoint_metadata(folder.best_checkpoint)["epoch"] == 1
    orphan = RunProgress(best_epoch=1, best_score=0.8, history=[{"epoch": 1}, {"epoch": 2}])
    folder.save_best(learner, orphan)  # then killed before the last checkpoint is saved
    found = RunFolder(tmp_path).load_progress(learner)
    assert found.best_epoch == 0
    assert read_checkpoint_metadata(folder.best_checkpoint)["epoch"] == 1
    assert not folder.pending_best_checkpoint.exists()


def test_weights_of_an_epoch_that_is_repeated_are_deleted(tmp_path):
    from training_slides import make_learner

    from tapfm.runs.run_progress import RunProgress

    learner, folder = make_learner(), make_run_folder(tmp_path)
    folder.save_last(learner, RunProgress(position=2))  # within epoch 1
    folder.save_best(learner, RunProgress(best_epoch=0, best_score=0.7, history=[{"epoch": 1}]))  # then killed
    assert folder.load_progress(learner).best_epoch is None
    assert not folder.best_checkpoint.exists()
    assert not folder.pending_best_checkpoint.exists()


def test_resume_does_not_keep_the_old_checkpoint_open(tmp_path):
    from training_slides import label_slides, make_learner, run_fit, write_slides

    slides = write_slides(tmp_path / "slides", 2)
    learner, folder = make_learner(), make_run_folder(tmp_path)
    progress = run_fit(learner, slides, training=label_slides(slides), recorder=record_into(folder))
    again = make_learner(seed=1)
    assert folder.load_progress(again).step == progress.step
    assert (
        str(folder.last_checkpoint) not in Path("/proc/self/maps").read_text()
    )  # other files may be mapped until garbage collection


def make_run_folder(folder):
    (folder / "config.toml").write_text("seed = 0\n")
    (folder / "split.csv").write_text("slide_id\n")
    return RunFolder(folder)


def record_into(folder):
    """Return a recorder that saves checkpoints in a run folder."""
    from training_slides import TrainingRecorder

    recorder = TrainingRecorder()
    recorder.save_last, recorder.save_best = folder.save_last, folder.save_best
    return recorder


def test_resume_continues_final_predictions(workspace_copy, monkeypatch):
    added = []
    add = FinishedSlides.add

    def add_and_stop(self, slide, finished):
        add(self, slide, finished)
        added.append(slide)
        if len(added) == 4:
            raise Interrupted(15)

    monkeypatch.setattr(FinishedSlides, "add", add_and_stop)
    assert run_train(workspace_copy).returncode == 143
    assert run_train(workspace_copy, "--resume").returncode == 0
    assert added == [case_id(i) for i in range(4, 10)], "no slide is predicted twice"
    assert run_train(workspace_copy, "--resume").returncode == 0
    assert len(added) == 6, "finished slides are not predicted again"
