"""`tapfm train` as a lab types it: what it leaves behind, and what it refuses."""

import errno
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from cohort_files import rows_of
from command_line import tapfm
from PIL import Image
from rich.console import Console
from slide_files import damage
from training_lab import SPLITS, edit, history_of, same_weights, slide_id, tile_set, train_in, untimed

from tapfm.adaptation.display import _TensorBoardWriter as TensorBoardWriter
from tapfm.config.loading import load_config
from tapfm.evaluation.predictions import compute_scores, read_predictions
from tapfm.runs.checkpoint import read_description
from tapfm.tasks.catalog import target_kinds
from tapfm.tiles.store import write_tiles


@pytest.fixture(scope="module")
def first(train):
    return train("first", "schedule.epochs=3")


def test_the_folder_of_a_run_explains_itself(first, lab):
    assert {path.name for path in first.iterdir() if not path.name.startswith(".")} == {
        *("config.toml", "environment.json", "split.csv", "history.jsonl", "checkpoints", "tensorboard"),
        *("predictions-val.csv", "predictions-test.csv", "failures.csv", "curves.png", "summary.md"),
    }
    assert load_config(first / "config.toml") == load_config(lab / "run.toml", ["schedule.epochs=3"])
    environment = json.loads((first / "environment.json").read_text())
    assert environment[0]["packages"]["torch"]
    assert len(environment[0]["weights_sha256"]) == 64
    assert [row["split"] for row in rows_of(first / "split.csv")] == SPLITS
    assert rows_of(first / "failures.csv") == []
    with Image.open(first / "curves.png") as picture:
        assert picture.width > 1000


def test_history_has_a_line_for_each_epoch_with_losses_aucs_rates_speed_and_memory(first):
    history = history_of(first)
    assert [row["epoch"] for row in history] == [1, 2, 3]
    for row in history:
        assert {"loss_agg", "loss_feature", "loss_attention", "train_auc", "val_auc", "val_loss"} <= row.keys()
        assert {"encoder_lr", "aggregator_lr", "seconds", "tiles_per_second", "peak_memory_gib"} <= row.keys()
        assert row["tiles"] == 16
        assert row["seconds"] > 0
    assert history[0]["encoder_lr"] == 1e-3 > history[1]["encoder_lr"]


def test_the_best_epoch_is_kept_and_its_figures_are_on_all_tiles(first):
    history = history_of(first)
    scored = [row["val_macro_auc"] for row in history]
    best = read_description(first / "checkpoints" / "best.safetensors")
    assert best["epoch"] == scored.index(max(scored)) + 1
    predictions = read_predictions(first / "predictions-test.csv")
    assert [each.tiles for each in predictions] == [4] * 4
    auc = compute_scores(predictions, target_kinds(["FGFR3"]), "slide").auc["FGFR3"]
    summary = (first / "summary.md").read_text()
    assert f"| test | 4 | {auc:.3f} |" in summary
    assert f"Epoch {best['epoch']} of 3 was kept" in summary


def test_events_that_cannot_be_written_do_not_cost_the_run(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", full)
    board = TensorBoardWriter(tmp_path, Console(width=200))
    board.add({"epoch": 1, "loss_agg": 0.5})
    board.add({"epoch": 2, "loss_agg": 0.4})
    board.close()
    assert capsys.readouterr().out.count("events cannot be written") == 1


def test_tensorboard_reads_the_events(first):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(first / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"loss/loss_agg", "val_auc/FGFR3", "encoder/encoder_lr"} <= set(tags)
    assert [event.step for event in events.Scalars("loss/loss_agg")] == [1, 2, 3]
    assert events.Scalars("loss/loss_agg")[2].value == pytest.approx(history_of(first)[2]["loss_agg"])


def test_the_same_cohort_trained_twice_gives_the_same_history_and_weights(first, train):
    again = train("again", "schedule.epochs=3")
    assert untimed(again) == untimed(first)
    assert same_weights(again, first)
    assert (again / "predictions-test.csv").read_bytes() == (first / "predictions-test.csv").read_bytes()


def test_a_final_figure_is_on_all_tiles_however_few_are_drawn(train):
    few = train("few", "adaptation.tiles_per_slide=2", "selection.validation_tiles=1")
    assert history_of(few)[0]["tiles"] == 8
    assert {each.tiles for each in read_predictions(few / "predictions-val.csv")} == {4}


def test_other_files_are_not_mixed_with_a_run(lab, tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = tapfm("train", lab / "run.toml", "--out", tmp_path)
    assert result.returncode == 2
    assert "thesis.tex" in result.said


def test_a_slide_that_cannot_be_read_stops_the_run_or_is_left_out(own_lab):
    (own_lab / "2.svs").write_bytes(b"no slide")
    result = train_in(own_lab)
    assert result.returncode == 3
    assert "case-02" in result.said
    (go_on,) = re.findall(r"resume without them: tapfm (.*)", result.said)
    assert go_on.endswith("--resume --allow-failures 1")
    (row,) = rows_of(own_lab / "run" / "failures.csv")
    assert (row["slide_id"], row["problem"]) == ("case-02", "failed")
    result = tapfm(*shlex.split(go_on))
    assert result.returncode == 0, result.said
    assert "1 slide failed" in result.said
    assert train_in(own_lab, "--resume", "--allow-failures", 1).returncode == 0
    assert "case-02" in (own_lab / "run" / "failures.csv").read_text(), "also when it is only looked at again"
    assert history_of(own_lab / "run")[0]["slides"] == 3
    assert "case-02 failed" in (own_lab / "run" / "summary.md").read_text()


def test_a_test_slide_that_cannot_be_read_counts_too(own_lab):
    (own_lab / "9.svs").write_bytes(b"no slide")
    assert train_in(own_lab).returncode == 3
    assert [row["slide_id"] for row in rows_of(own_lab / "run" / "failures.csv")] == ["case-09"]
    assert len(read_predictions(own_lab / "run" / "predictions-test.csv")) == 3


def test_tiles_that_were_skipped_in_the_final_look_are_listed(own_lab):
    for i in range(len(SPLITS)):  # more tiles, so that one is no twentieth
        tiles = tile_set(i)
        write_tiles(own_lab / "tiles", replace(tiles, positions=np.tile(tiles.positions, (6, 1))), "trident")
    block = 0  # tiles and blocks are the same; six of 24 would be too many, so one position of its own
    positions = np.array([[224, 0], [0, 224], [224, 224]] * 8 + [[0, 0]])
    write_tiles(own_lab / "tiles", replace(tile_set(7), positions=positions), "trident")
    damage(own_lab / "7.svs", [block])
    result = train_in(own_lab)
    assert result.returncode == 0, result.said
    (row,) = rows_of(own_lab / "run" / "failures.csv")
    assert (row["slide_id"], row["problem"], row["tiles_skipped"]) == ("case-07", "tiles skipped", "1")
    assert "skipped: 1 tile of 1 slide" in (own_lab / "run" / "summary.md").read_text()


def test_what_is_suggested_can_be_pasted_whatever_is_in_a_path(lab, tmp_path):
    folder = tmp_path / "a b [é]"
    result = tapfm("train", lab / "run.toml", "--out", folder / "run (1)")
    assert result.returncode == 0, result.said
    (evaluate,) = re.findall(r"Next: (tapfm evaluate .*)", result.said)
    assert shlex.split(evaluate)[2:] == [str(folder / "run (1)"), "--out", "evaluations/run (1)"]
    (export,) = re.findall(r"To use it elsewhere: (tapfm export .*)", result.said)
    assert shlex.split(export)[2:] == [str(folder / "run (1)"), "--out", "exported/run (1)"]
    assert export in (folder / "run (1)" / "summary.md").read_text()
    result = tapfm("config", "--encoder", "tapfm-pocket", "--out", folder / "r.toml")
    assert shlex.split(re.findall(r"Next: (.*)", result.said)[0])[2] == str(folder / "r.toml")


def test_folders_of_other_commands_are_left_alone(own_lab):
    result = tapfm(*("embed", own_lab / "cohort.csv", "--encoder", "tapfm-pocket"), "--out", own_lab / "run")
    assert result.returncode == 2  # no tiles where it looks for them
    assert train_in(own_lab).returncode == 0
    tiles = ("--tiles", own_lab / "tiles", "--workers", 0)
    embed = ("embed", own_lab / "cohort.csv", "--encoder", "tapfm-pocket", *tiles, "--out", own_lab / "run")
    result = tapfm(*embed)
    assert result.returncode == 2
    assert "is what tapfm train wrote" in result.said
    assert not list((own_lab / "run").glob("*.h5"))


def test_a_validation_split_with_one_class_is_told_before_it_begins(own_lab):
    edit(own_lab / "cohort.csv", lambda rows: rows[5].update(FGFR3="0"))
    result = train_in(own_lab)
    assert result.returncode == 0, result.said
    assert "only one class of FGFR3" in result.said
    assert "lowest validation loss" in result.said
    assert "by validation loss" in (own_lab / "run" / "summary.md").read_text()
    assert "</sup> no positive slide among 2" in (own_lab / "run" / "summary.md").read_text()


def test_a_folder_without_any_tiles_of_the_cohort_is_told_as_such(own_lab):
    result = train_in(own_lab, "--set", f"tiles.folder={own_lab / 'features'}")
    assert result.returncode == 2
    assert "features is no folder of tiles of this cohort" in result.said
    assert "--allow-failures" not in result.said


def test_slides_without_tiles_are_told_before_anything_begins(own_lab):
    (own_lab / "tiles" / "patches" / "case-01_patches.h5").unlink()
    result = train_in(own_lab)
    assert result.returncode == 2
    assert "1 of 10 slides have no tiles" in result.said
    assert "tapfm tile" in result.said
    assert not (own_lab / "run").exists()
    result = train_in(own_lab, "--allow-failures", 1)
    assert result.returncode == 0, result.said
    assert "case-01" in (own_lab / "run" / "failures.csv").read_text()
    shutil.rmtree(own_lab / "tiles")
    result = train_in(own_lab, out="other")
    assert result.returncode == 2
    assert f"tapfm tile {own_lab / 'cohort.csv'} --out {own_lab / 'tiles'}" in result.said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[9].update(split="train"), "Doe8: train has case-09; test has case-08"),
        (lambda rows: [row.update(FGFR3="0") for row in rows[:4]], "FGFR3: 0 positive and 4 negative slides"),
        (lambda rows: rows[1].update(FGFR3="mutated"), "FGFR3 has 'mutated' (case-01)"),
        (lambda rows: [row.update(split="") for row in rows], "tapfm split"),
        (lambda rows: rows[1].update(path="absent.svs"), "absent.svs"),
    ],
    ids=["leak", "one class", "words", "no split", "no file"],
)
def test_a_cohort_that_cannot_be_trained_on_is_refused(own_lab, change, said):
    edit(own_lab / "cohort.csv", change)
    result = train_in(own_lab)
    assert result.returncode == 2
    assert said in result.said
    assert not (own_lab / "run").exists()


def test_slides_without_a_label_are_not_used_and_that_is_said(lab):
    result = tapfm("train", lab / "run.toml", "--out", lab / "runs" / "tp53", "--set", 'task.targets=["TP53"]')
    assert result.returncode == 0, result.said
    assert "no label of these targets: 2 slides." in result.said
    assert len(rows_of(lab / "runs" / "tp53" / "split.csv")) == 8


def test_several_targets_with_missing_labels(lab):
    out = lab / "runs" / "both"
    result = tapfm("train", lab / "run.toml", "--out", out, "--set", 'task.targets=["FGFR3", "TP53"]')
    assert result.returncode == 0, result.said
    (row,) = history_of(out)
    assert row["val_undefined"] == {"TP53": "no positive slide among 2"}
    assert row["val_macro_auc"] == row["val_auc"]["FGFR3"]
    assert "mean AUC" in (out / "summary.md").read_text()


def test_patients_are_the_unit_when_asked_for(lab):
    out = lab / "runs" / "patients"
    assert tapfm("train", lab / "run.toml", "--out", out, "--unit", "patient").returncode == 0
    assert "| test | 3 |" in (out / "summary.md").read_text()
    assert len(read_predictions(out / "predictions-test.csv")) == 4


def test_the_reference_recipe_and_every_way_of_the_step_train(lab, train):
    run = train("reference", 'recipe="reference"', "adaptation.beta=0.1", "adaptation.bag_gradient=after")
    tables = tomllib.loads((run / "config.toml").read_text())
    assert tables["adaptation"]["tau"] == 0.1
    assert tables["head"]["layer_norm"]
    assert np.isfinite(history_of(run)[0]["loss_agg"])
    assert (lab / "runs" / "reference" / "checkpoints" / "best.safetensors").exists()


def test_finetune_has_no_attention_loss(train):
    (row,) = history_of(train("finetune", 'adaptation.method="finetune"', "schedule.epochs=1"))
    assert row["norm_g_r"] == 0.0
    assert row["norm_encoder"] > 0


def test_a_diverged_run_stops_and_leaves_the_last_good_checkpoint(lab):
    out = lab / "runs" / "diverged"
    changes = ["optimiser.encoder_lr=1e30", "schedule.epochs=9", "machine.checkpoint_minutes=1e-9"]
    options = [part for change in changes for part in ("--set", change)]
    result = tapfm("train", lab / "run.toml", "--out", out, *options)
    assert result.returncode == 1, result.said
    assert "is not finite" in result.said
    assert "Lower the learning rates" in result.said


def test_a_disk_without_room_is_told_before_training(lab, monkeypatch, tmp_path):
    full = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    result = tapfm("train", lab / "run.toml", "--out", tmp_path / "run")
    assert result.returncode == 1
    assert "The checkpoints of this run" in result.said
    assert not (tmp_path / "run" / "config.toml").exists()


def test_features_of_others_do_for_aggregators_without_attention(own_lab):
    import h5py

    rng = np.random.default_rng(0)
    (own_lab / "theirs").mkdir()
    for i in range(len(SPLITS)):
        with h5py.File(own_lab / "theirs" / f"{slide_id(i)}.h5", "w") as file:
            file["features"] = rng.normal(size=(5, 12)).astype(np.float32)
            file["coords"] = rng.integers(0, 9, (5, 2))
    fixed = ["--set", "adaptation.method=fixed", "--set", f"tiles.features={own_lab / 'theirs'}"]
    result = train_in(own_lab, *fixed)
    assert result.returncode == 0, result.said
    assert "(CLAM) do not name an encoder" in result.said
    assert "it was another one" in result.said
    assert tapfm("export", own_lab / "run", "--out", own_lab / "out").returncode == 0
    assert "files of another tool (CLAM, encoder not named)" in (own_lab / "out" / "README.md").read_text()
    result = train_in(own_lab, *fixed, "--set", "aggregator.name=cls-attention", out="other")
    assert result.returncode == 2
    assert "has no attention" in result.said


def test_features_of_two_encoders_are_not_mixed(own_lab):
    import h5py

    with h5py.File(own_lab / "features" / "case-03.h5", "r+") as file:
        file["features"].attrs["weights_sha256"] = "0" * 64
    result = train_in(own_lab, "--set", "adaptation.method=fixed")
    assert result.returncode == 2
    assert "not all made by the same encoder" in result.said
    result = train_in(own_lab, "--set", "adaptation.method=fixed", "--set", "encoder.name=uni")
    assert result.returncode == 2
