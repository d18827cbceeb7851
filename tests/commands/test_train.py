"""`tapfm train`: output files, failures and invalid input."""

import errno
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from cohort_files import read_rows
from command_line import tapfm
from PIL import Image
from rich.console import Console
from slide_files import damage
from training_workspace import (
    SPLITS,
    case_id,
    edit_csv,
    have_same_weights,
    history_without_times,
    make_tile_set,
    read_history,
    run_train,
)

from tapfm.adaptation.display import _TensorBoardWriter as TensorBoardWriter
from tapfm.config.loading import load_config
from tapfm.evaluation.predictions import compute_scores, read_predictions
from tapfm.runs.checkpoint import read_checkpoint_metadata
from tapfm.tasks.catalog import target_kinds
from tapfm.tiles.store import write_tiles


@pytest.fixture(scope="module")
def first(train):
    return train("first", "schedule.epochs=3")


def test_run_folder_contains_all_files(first, workspace):
    assert {path.name for path in first.iterdir() if not path.name.startswith(".")} == {
        *("config.toml", "environment.json", "split.csv", "history.jsonl", "checkpoints", "tensorboard"),
        *("predictions-val.csv", "predictions-test.csv", "failures.csv", "curves.png", "summary.md"),
    }
    assert load_config(first / "config.toml") == load_config(workspace / "run.toml", ["schedule.epochs=3"])
    environment = json.loads((first / "environment.json").read_text())
    assert environment[0]["packages"]["torch"]
    assert len(environment[0]["weights_sha256"]) == 64
    assert [row["split"] for row in read_rows(first / "split.csv")] == SPLITS
    assert read_rows(first / "failures.csv") == []
    with Image.open(first / "curves.png") as image:
        assert image.width > 1000


def test_history_has_one_line_per_epoch_with_all_values(first):
    history = read_history(first)
    assert [row["epoch"] for row in history] == [1, 2, 3]
    for row in history:
        assert {"loss_agg", "loss_feature", "loss_attention", "train_auc", "val_auc", "val_loss"} <= row.keys()
        assert {"encoder_lr", "aggregator_lr", "seconds", "tiles_per_second", "peak_memory_gib"} <= row.keys()
        assert row["tiles"] == 16
        assert row["seconds"] > 0
    assert history[0]["encoder_lr"] == 1e-3 > history[1]["encoder_lr"]


def test_best_epoch_is_kept_and_evaluated_on_all_tiles(first):
    history = read_history(first)
    scored = [row["val_macro_auc"] for row in history]
    best = read_checkpoint_metadata(first / "checkpoints" / "best.safetensors")
    assert best["epoch"] == scored.index(max(scored)) + 1
    predictions = read_predictions(first / "predictions-test.csv")
    assert [each.tiles for each in predictions] == [4] * 4
    auc = compute_scores(predictions, target_kinds(["FGFR3"]), "slide").auc["FGFR3"]
    summary = (first / "summary.md").read_text()
    assert f"| test | 4 | {auc:.3f} |" in summary
    assert f"Epoch {best['epoch']} of 3" in summary


def test_unwritable_tensorboard_events_do_not_stop_the_run(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", full)
    board = TensorBoardWriter(tmp_path, Console(width=200))
    board.add({"epoch": 1, "loss_agg": 0.5})
    board.add({"epoch": 2, "loss_agg": 0.4})
    board.close()
    assert capsys.readouterr().out.count("TensorBoard") == 1


def test_tensorboard_can_read_the_events(first):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(first / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"loss/loss_agg", "val_auc/FGFR3", "encoder/encoder_lr"} <= set(tags)
    assert [event.step for event in events.Scalars("loss/loss_agg")] == [1, 2, 3]
    assert events.Scalars("loss/loss_agg")[2].value == pytest.approx(read_history(first)[2]["loss_agg"])


def test_training_is_deterministic(first, train):
    again = train("again", "schedule.epochs=3")
    assert history_without_times(again) == history_without_times(first)
    assert have_same_weights(again, first)
    assert (again / "predictions-test.csv").read_bytes() == (first / "predictions-test.csv").read_bytes()


def test_final_predictions_use_all_tiles(train):
    few = train("few", "adaptation.tiles_per_slide=2", "selection.validation_tiles=1")
    assert read_history(few)[0]["tiles"] == 8
    assert {each.tiles for each in read_predictions(few / "predictions-val.csv")} == {4}


def test_folder_with_other_files_is_rejected(workspace, tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = tapfm("train", workspace / "run.toml", "--out", tmp_path)
    assert result.returncode == 2
    assert "thesis.tex" in result.output


def test_unreadable_slide_stops_the_run_unless_failures_are_allowed(workspace_copy):
    (workspace_copy / "2.svs").write_bytes(b"not a slide")
    result = run_train(workspace_copy)
    assert result.returncode == 3
    assert "case-02" in result.output
    (resume_command,) = re.findall(r"resume without them: tapfm (.*)", result.output)
    assert resume_command.endswith("--resume --allow-failures 1")
    (row,) = read_rows(workspace_copy / "run" / "failures.csv")
    assert (row["slide_id"], row["problem"]) == ("case-02", "failed")
    result = tapfm(*shlex.split(resume_command))
    assert result.returncode == 0, result.output
    assert "1 slide failed" in result.output
    assert run_train(workspace_copy, "--resume", "--allow-failures", 1).returncode == 0
    assert "case-02" in (workspace_copy / "run" / "failures.csv").read_text(), "failures of a finished run must be kept"
    assert read_history(workspace_copy / "run")[0]["slides"] == 3
    assert "case-02 failed" in (workspace_copy / "run" / "summary.md").read_text()


def test_unreadable_test_slide_counts_as_a_failure(workspace_copy):
    (workspace_copy / "9.svs").write_bytes(b"no slide")
    assert run_train(workspace_copy).returncode == 3
    assert [row["slide_id"] for row in read_rows(workspace_copy / "run" / "failures.csv")] == ["case-09"]
    assert len(read_predictions(workspace_copy / "run" / "predictions-test.csv")) == 3


def test_tiles_skipped_in_final_predictions_are_listed(workspace_copy):
    for i in range(len(SPLITS)):  # more tiles, so that one tile is less than 5%
        tiles = make_tile_set(i)
        write_tiles(workspace_copy / "tiles", replace(tiles, positions=np.tile(tiles.positions, (6, 1))), "trident")
    block = 0  # the only block of the tile at (0, 0), which occurs once
    positions = np.array([[224, 0], [0, 224], [224, 224]] * 8 + [[0, 0]])
    write_tiles(workspace_copy / "tiles", replace(make_tile_set(7), positions=positions), "trident")
    damage(workspace_copy / "7.svs", [block])
    result = run_train(workspace_copy)
    assert result.returncode == 0, result.output
    (row,) = read_rows(workspace_copy / "run" / "failures.csv")
    assert (row["slide_id"], row["problem"], row["tiles_skipped"]) == ("case-07", "tiles skipped", "1")
    assert "skipped: 1 tile of 1 slide" in (workspace_copy / "run" / "summary.md").read_text()


def test_suggested_commands_are_quoted_for_the_shell(workspace, tmp_path):
    folder = tmp_path / "a b [é]"
    result = tapfm("train", workspace / "run.toml", "--out", folder / "run (1)")
    assert result.returncode == 0, result.output
    (evaluate,) = re.findall(r"Next: (tapfm evaluate .*)", result.output)
    assert shlex.split(evaluate)[2:] == [str(folder / "run (1)"), "--out", "evaluations/run (1)"]
    (export,) = re.findall(r"To use the model in other programs: (tapfm export .*)", result.output)
    assert shlex.split(export)[2:] == [str(folder / "run (1)"), "--out", "exported/run (1)"]
    assert export in (folder / "run (1)" / "summary.md").read_text()
    result = tapfm("config", "--encoder", "tapfm-pocket", "--out", folder / "r.toml")
    (train,) = re.findall(r"^  (tapfm train .*)$", result.output, re.MULTILINE)
    assert shlex.split(train)[2] == str(folder / "r.toml")


def test_output_folders_of_other_commands_are_rejected(workspace_copy):
    result = tapfm(
        *("embed", workspace_copy / "cohort.csv", "--encoder", "tapfm-pocket"), "--out", workspace_copy / "run"
    )
    assert result.returncode == 2  # there are no tiles in the default folder
    assert run_train(workspace_copy).returncode == 0
    tiles = ("--tiles", workspace_copy / "tiles", "--workers", 0)
    embed = (
        "embed",
        workspace_copy / "cohort.csv",
        "--encoder",
        "tapfm-pocket",
        *tiles,
        "--out",
        workspace_copy / "run",
    )
    result = tapfm(*embed)
    assert result.returncode == 2
    assert "contains the output of tapfm train" in result.output
    assert not list((workspace_copy / "run").glob("*.h5"))


def test_validation_split_with_one_class_selects_by_loss(workspace_copy):
    edit_csv(workspace_copy / "cohort.csv", lambda rows: rows[5].update(FGFR3="0"))
    result = run_train(workspace_copy)
    assert result.returncode == 0, result.output
    assert "FGFR3: the validation slides do not have both classes" in result.output
    assert "lowest validation loss" in result.output
    assert "by validation loss" in (workspace_copy / "run" / "summary.md").read_text()
    assert "</sup> no positive slide among 2" in (workspace_copy / "run" / "summary.md").read_text()


def test_folder_without_tiles_of_the_cohort_is_reported(workspace_copy):
    result = run_train(workspace_copy, "--set", f"tiles.folder={workspace_copy / 'features'}")
    assert result.returncode == 2
    assert "features has no usable tiles" in result.output
    assert "contains no tile file" in result.output
    assert "--allow-failures" not in result.output


def test_slides_without_tiles_are_reported_before_training(workspace_copy):
    (workspace_copy / "tiles" / "patches" / "case-01_patches.h5").unlink()
    result = run_train(workspace_copy)
    assert result.returncode == 2
    assert "1 of 10 slides have no tiles" in result.output
    assert "tapfm tile" in result.output
    assert not (workspace_copy / "run").exists()
    result = run_train(workspace_copy, "--allow-failures", 1)
    assert result.returncode == 0, result.output
    assert "case-01" in (workspace_copy / "run" / "failures.csv").read_text()
    shutil.rmtree(workspace_copy / "tiles")
    result = run_train(workspace_copy, out="other")
    assert result.returncode == 2
    assert f"tapfm tile {workspace_copy / 'cohort.csv'} --out {workspace_copy / 'tiles'}" in result.output


def test_command_for_missing_features_names_tiles_and_slides(workspace_copy):
    slides, tiles = workspace_copy / "slides", workspace_copy / "tiles"
    slides.mkdir()
    shutil.rmtree(workspace_copy / "features")
    settings = ["adaptation.method=fixed", f"cohort.slides={slides}", f"tiles.folder={tiles}"]
    result = run_train(workspace_copy, *(each for setting in settings for each in ("--set", setting)))
    assert result.returncode == 2
    assert f"--slides {slides} --encoder" in result.output
    assert f"--tiles {tiles} --out" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda rows: rows[9].update(split="train"),
            "(column split): train has case-09; test has case-08",
        ),
        (lambda rows: [row.update(FGFR3="0") for row in rows[:4]], "FGFR3: 0 positive and 4 negative slides"),
        (lambda rows: rows[1].update(FGFR3="mutated"), "row 3: FGFR3 is 'mutated'"),
        (lambda rows: [row.update(split="") for row in rows], "tapfm split"),
        (lambda rows: rows[1].update(path="absent.svs"), "absent.svs"),
    ],
    ids=["leak", "one class", "invalid label", "no split", "no file"],
)
def test_unusable_cohort_is_an_error(workspace_copy, change, message):
    edit_csv(workspace_copy / "cohort.csv", change)
    result = run_train(workspace_copy)
    assert result.returncode == 2
    assert message in result.output
    assert not (workspace_copy / "run").exists()


def test_slides_without_a_label_are_skipped_with_a_message(workspace):
    result = tapfm(
        "train", workspace / "run.toml", "--out", workspace / "runs" / "tp53", "--set", 'task.targets=["TP53"]'
    )
    assert result.returncode == 0, result.output
    assert "2 slides without a label" in result.output
    assert len(read_rows(workspace / "runs" / "tp53" / "split.csv")) == 8


def test_several_targets_with_missing_labels(workspace):
    out = workspace / "runs" / "both"
    result = tapfm("train", workspace / "run.toml", "--out", out, "--set", 'task.targets=["FGFR3", "TP53"]')
    assert result.returncode == 0, result.output
    (row,) = read_history(out)
    assert row["val_undefined"] == {"TP53": "no positive slide among 2"}
    assert row["val_macro_auc"] == row["val_auc"]["FGFR3"]
    assert "mean AUC" in (out / "summary.md").read_text()


def test_unit_patient_averages_over_slides(workspace):
    out = workspace / "runs" / "patients"
    assert tapfm("train", workspace / "run.toml", "--out", out, "--unit", "patient").returncode == 0
    assert "| test | 3 |" in (out / "summary.md").read_text()
    assert len(read_predictions(out / "predictions-test.csv")) == 4


def test_reference_recipe_and_all_step_strategies_train(workspace, train):
    run = train("reference", 'recipe="reference"', "adaptation.beta=0.1", "adaptation.bag_gradient=after")
    tables = tomllib.loads((run / "config.toml").read_text())
    assert tables["adaptation"]["tau"] == 0.1
    assert tables["head"]["layer_norm"]
    assert np.isfinite(read_history(run)[0]["loss_agg"])
    assert (workspace / "runs" / "reference" / "checkpoints" / "best.safetensors").exists()


def test_finetune_has_no_attention_loss(train):
    (row,) = read_history(train("finetune", 'adaptation.method="finetune"', "schedule.epochs=1"))
    assert row["norm_g_r"] == 0.0
    assert row["norm_encoder"] > 0


def test_diverged_run_stops_and_keeps_the_last_good_checkpoint(workspace):
    out = workspace / "runs" / "diverged"
    changes = ["optimiser.encoder_lr=1e30", "schedule.epochs=9", "machine.checkpoint_minutes=1e-9"]
    options = [part for change in changes for part in ("--set", change)]
    result = tapfm("train", workspace / "run.toml", "--out", out, *options)
    assert result.returncode == 1, result.output
    assert "is not finite" in result.output
    assert "Lower the learning rates" in result.output


def test_full_disk_is_reported_before_training(workspace, monkeypatch, tmp_path):
    full = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    result = tapfm("train", workspace / "run.toml", "--out", tmp_path / "run")
    assert result.returncode == 1
    assert "disk space for the checkpoints of this run" in result.output
    assert not (tmp_path / "run" / "config.toml").exists()


def test_features_of_other_tools_work_for_aggregators_without_attention(workspace_copy):
    import h5py

    rng = np.random.default_rng(0)
    (workspace_copy / "theirs").mkdir()
    for i in range(len(SPLITS)):
        with h5py.File(workspace_copy / "theirs" / f"{case_id(i)}.h5", "w") as file:
            file["features"] = rng.normal(size=(5, 128)).astype(np.float32)
            file["coords"] = rng.integers(0, 9, (5, 2))
    fixed = ["--set", "adaptation.method=fixed", "--set", f"tiles.features={workspace_copy / 'theirs'}"]
    result = run_train(workspace_copy, *fixed)
    assert result.returncode == 0, result.output
    assert "(CLAM) do not name their encoder" in result.output
    assert tapfm("export", workspace_copy / "run", "--out", workspace_copy / "out").returncode == 0
    assert "files of another tool (CLAM" in (workspace_copy / "out" / "README.md").read_text()
    result = run_train(workspace_copy, *fixed, "--set", "aggregator.name=cls-attention", out="other")
    assert result.returncode == 2
    assert "has no raw attention" in result.output


@pytest.mark.parametrize(("size", "known"), [(384, "lunit-s16"), (12, "none")])
def test_features_of_another_size_are_an_error(workspace_copy, size, known):
    import h5py

    for i in range(len(SPLITS)):
        with h5py.File(workspace_copy / "features" / f"{case_id(i)}.h5", "w") as file:
            file["features"] = np.zeros((5, size), np.float32)
    result = run_train(workspace_copy, "--set", "adaptation.method=fixed")
    assert result.returncode == 2
    output = " ".join(result.output.split())
    assert f"case-00.h5 has {size} features per tile, but tapfm-pocket (encoder.name) computes 128." in output
    (listed,) = re.findall(r"tapfm knows (.*?)\.", output)
    assert known in listed.split(", ")
    assert "--encoder tapfm-pocket --out NEW_DIR" in output
    assert not (workspace_copy / "run" / "config.toml").exists()


def test_features_of_another_encoder_are_an_error(workspace_copy):
    result = run_train(workspace_copy, "--set", "adaptation.method=fixed", "--set", "encoder.name=uni")
    assert result.returncode == 2
    output = " ".join(result.output.split())
    assert "case-00.h5 was created with tapfm-pocket, but encoder.name is uni." in output
    assert "--set encoder.name=tapfm-pocket" in output


def test_features_of_two_encoders_are_an_error(workspace_copy):
    import h5py

    with h5py.File(workspace_copy / "features" / "case-03.h5", "r+") as file:
        file["features"].attrs["weights_sha256"] = "0" * 64
    result = run_train(workspace_copy, "--set", "adaptation.method=fixed")
    assert result.returncode == 2
    assert "not all created with the same encoder" in result.output
    assert "case-03" in result.output
