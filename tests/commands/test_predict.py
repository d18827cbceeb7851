"""`tapfm predict`: predictions of whole slides."""

import errno
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from cohort_files import read_rows
from command_line import start_tapfm, tapfm, wait_for
from openslide import OpenSlide
from rich.console import Console
from slide_files import REAL, copy_slide, needs_real_slides, section, write_slide
from training_workspace import SPLITS, case_id, edit_csv, make_tile_set

import tapfm as tapfm_package
from tapfm.encoders import float8
from tapfm.encoders.inference import InferenceEncoder
from tapfm.errors import WeightsError
from tapfm.evaluation.predictions import average_predictions, read_predictions
from tapfm.inference import float8_check
from tapfm.inference import loading as load_models
from tapfm.inference.predictor import Predictor
from tapfm.prediction import cohort_prediction, validity
from tapfm.prediction.folder import PredictionFolder
from tapfm.runs.ensemble import write_ensemble
from tapfm.runtime.interrupts import StopSignalHandler
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import find_slides
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds
from tapfm.tiles.store import read_tiles, write_tiles

CPU_OPTIONS = ("--workers", 0, "--device", "cpu")
TEST = [case_id(number) for number, split in enumerate(SPLITS) if split == "test"]


def predict(model, out, *sources_and_options):
    return tapfm("predict", "--model", model, "--out", out, *CPU_OPTIONS, *sources_and_options)


def predict_ok(model, out, *sources_and_options):
    result = predict(model, out, *sources_and_options)
    assert result.returncode == 0, result.output
    return PredictionFolder(out)


def read_files_below(folder):
    """Return the content of every file, without run times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name.startswith("."):
            continue
        name = str(path.relative_to(folder))
        if path.name == "slide.json":
            found[name] = json.loads(path.read_text()) | {"seconds": None}
        elif path.name in ("predictions.csv", "summary.csv"):
            found[name] = [row | {"seconds": None} for row in read_rows(path)]
        elif path.suffix != ".html":  # index.html contains run times
            found[name] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def run(train):
    return train("predicting")


@pytest.fixture(scope="module")
def gated(train):
    return train("gated", 'task.targets=["FGFR3","TP53"]', 'aggregator.name="cls-gated"', "head.layer_norm=true")


@pytest.fixture(scope="module")
def cohort_predictions(run, workspace, tmp_path_factory):
    out = tmp_path_factory.mktemp("predicted") / "cohort"
    return predict_ok(run, out, workspace / "cohort.csv", "--tiles", workspace / "tiles")


# --- same results as training, evaluation, export and ensemble


@pytest.mark.parametrize("changes", [(), ('adaptation.method="fixed"', 'aggregator.name="abmil"')])
def test_predictions_equal_those_of_training_and_evaluation(train, workspace, tmp_path, changes):
    run = train(f"same-{len(changes)}", *changes)
    evaluated = tapfm(
        *(
            "evaluate",
            run,
            "--out",
            tmp_path / "evaluation",
            "--resamples",
            50,
            "--tiles",
            workspace / "tiles",
            *CPU_OPTIONS,
        )
    )
    assert evaluated.returncode == 0, evaluated.output
    folder = predict_ok(run, tmp_path / "predicted", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    ours = {each.slide_id: each for each in read_predictions(folder.path / "predictions.csv")}
    theirs = read_predictions(tmp_path / "evaluation" / "predictions.csv")
    assert [each.slide_id for each in theirs] == TEST
    for each in theirs:
        assert ours[each.slide_id] == each  # to the last bit
    if not changes:
        assert theirs == read_predictions(run / "predictions-test.csv")


def test_export_gives_the_same_predictions(run, workspace, cohort_predictions, tmp_path):
    tapfm_package.export(run, out=tmp_path / "exported")
    folder = predict_ok(
        tmp_path / "exported", tmp_path / "predicted", workspace / "cohort.csv", "--tiles", workspace / "tiles"
    )
    for ours, theirs in zip(folder.slides(), cohort_predictions.slides(), strict=True):
        assert ours.targets["FGFR3"].logit == pytest.approx(theirs.targets["FGFR3"].logit, abs=1e-6)
        assert ours.targets["FGFR3"].threshold == theirs.targets["FGFR3"].threshold


def test_ensemble_averages_its_members(run, train, workspace, cohort_predictions, tmp_path):
    other = train("predicting-too", "seed=1")
    write_ensemble(tmp_path / "both", [run, other], "seeds")
    folder = predict_ok(
        tmp_path / "both", tmp_path / "predicted", workspace / "cohort.csv", "--tiles", workspace / "tiles"
    )
    alone = predict_ok(other, tmp_path / "alone", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    tables = [read_predictions(each.path / "predictions.csv") for each in (cohort_predictions, alone)]
    assert read_predictions(folder.path / "predictions.csv") == average_predictions(tables, target_kinds(["FGFR3"]))
    first, second, both = (each.tiles(TEST[0]).values["weight"] for each in (cohort_predictions, alone, folder))
    np.testing.assert_array_equal(both, (first + second) / 2)


# --- output files


def test_predictions_csv_has_calls_tiles_and_seconds(run, cohort_predictions):
    rows = read_rows(cohort_predictions.path / "predictions.csv")
    assert [row["slide_id"] for row in rows] == [case_id(number) for number in range(len(SPLITS))]
    thresholds = {row["threshold"] for row in rows}
    assert len(thresholds) == 1
    threshold = float(thresholds.pop())
    validation = read_predictions(run / "predictions-val.csv")
    assert threshold in [sigmoid(each.logits["FGFR3"]) for each in validation]
    for row in rows:
        assert float(row["probability"]) == pytest.approx(sigmoid(float(row["logit"])), abs=1e-15)
        assert row["call"] == str(int(float(row["probability"]) >= threshold))
        assert (row["tiles"], row["tiles_failed"]) == ("4", "0")
        assert float(row["seconds"]) >= 0


def test_predictions_from_few_tiles_have_a_warning(run, cohort_predictions, tmp_path):
    assert {row["warning"] for row in read_rows(cohort_predictions.path / "predictions.csv")} == {"only 4 tiles"}
    write_slide(tmp_path / "few.svs", section(900, 900))
    write_slide(tmp_path / "many.svs", section(1400, 1400))
    result = predict(run, tmp_path / "p", tmp_path / "few.svs", tmp_path / "many.svs")
    assert result.returncode == 0, result.output
    few, many = PredictionFolder(tmp_path / "p").slides()
    assert few.tiles < 20 <= many.tiles
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert f"(only {few.tiles} tiles)" in lines["few"]
    assert "only" not in lines["many"]
    assert "1 slide has fewer than 20 tiles" in result.output
    rows = read_rows(tmp_path / "p" / "predictions.csv")
    assert [row["warning"] for row in rows] == [f"only {few.tiles} tiles", ""]


def test_contributions_sum_to_the_logit_with_layer_norm_and_several_targets(gated, workspace, tmp_path):
    folder = predict_ok(gated, tmp_path / "predicted", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    for slide in folder.slides():
        table = folder.tiles(slide.slide_id)
        stored = read_tiles(workspace / "tiles" / "patches" / f"{slide.slide_id}_patches.h5")
        np.testing.assert_array_equal(table.positions, stored.positions)
        assert slide.columns == tuple(table.values)
        for target in ("FGFR3", "TP53"):
            prediction = slide.targets[target]
            total = prediction.constant + table.values[f"contribution.{target}"].sum()
            assert total == pytest.approx(prediction.logit, abs=1e-5)
            assert table.values[f"weight.{target}"].sum() == pytest.approx(1, abs=1e-6)


def test_slide_json_has_the_origin_of_the_slide(cohort_predictions, workspace):
    slide = cohort_predictions.slides()[0]
    assert (slide.path, slide.mpp, slide.side_px0, slide.tile_px) == (workspace / "0.svs", 0.5, 224, 224)
    assert (slide.width_px0, slide.height_px0) == (448, 448)
    assert (slide.patient_id, slide.split, slide.targets["FGFR3"].label) == ("Doe0", "train", 0)


def test_split_names_of_other_tools_are_understood(run, workspace, tmp_path):
    text = (workspace / "cohort.csv").read_text()
    table = tmp_path / "other-names.csv"
    table.write_text(re.sub(r"\btest\b", "Testing", text))
    folder = predict_ok(
        run, tmp_path / "p", table, "--slides", workspace, "--tiles", workspace / "tiles", "--split", "test"
    )
    assert sorted(slide.slide_id for slide in folder.slides()) == TEST
    wrong = predict(run, tmp_path / "q", table, "--split", "tset")
    assert wrong.returncode == 2
    assert "'tset'" in wrong.output


def test_sensitivity_changes_the_threshold(run, workspace, tmp_path):
    folder = predict_ok(
        run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles", "--sensitivity", 1
    )
    validation = read_predictions(run / "predictions-val.csv")
    positive = min(sigmoid(each.logits["FGFR3"]) for each in validation if each.labels["FGFR3"])
    assert {slide.targets["FGFR3"].threshold for slide in folder.slides()} == {positive}
    again = predict(run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles", "--resume")
    assert again.returncode == 2
    assert "calls" in again.output


# --- sources of slides


def test_slide_without_table_is_tiled_as_in_training(run, tmp_path):
    write_slide(tmp_path / "new.svs", section(1400, 900), mpp=0.25)
    folder = predict_ok(run, tmp_path / "predicted", tmp_path / "new.svs")
    (slide,) = folder.slides()
    assert (slide.slide_id, slide.side_px0, slide.mpp) == ("new", 448, 0.25)
    assert slide.targets["FGFR3"].label is None
    assert slide.tiles == len(read_tiles(folder.path / "tiles" / "patches" / "new_patches.h5")) > 0
    assert (folder.path / "tiles" / "overlays" / "new.png").exists()
    assert folder.tiles("new").padded is None  # models of older versions record no edge tiles, which were skipped


def test_tile_settings_are_stored_in_run_and_export(workspace_copy, tmp_path):
    tiled = tapfm(
        "tile", workspace_copy / "cohort.csv", "--out", workspace_copy / "coarse", "--mpp", 1, "--min-tissue", 0.1
    )
    assert tiled.returncode == 0, tiled.output
    trained = tapfm(
        *(
            "train",
            workspace_copy / "run.toml",
            "--out",
            workspace_copy / "run",
            "--set",
            f'tiles.folder="{workspace_copy / "coarse"}"',
        )
    )
    assert trained.returncode == 0, trained.output
    tapfm_package.export(workspace_copy / "run", out=workspace_copy / "exported")
    shutil.rmtree(workspace_copy / "coarse")
    write_slide(tmp_path / "new.svs", section(1400, 900), mpp=0.5)
    for model in ("run", "exported"):
        folder = predict_ok(workspace_copy / model, workspace_copy / f"predicted-{model}", tmp_path / "new.svs")
        assert folder.slides()[0].side_px0 == 448
        spec = read_tiles(folder.path / "tiles" / "patches" / "new_patches.h5").tiling_settings
        assert (spec["mpp"], spec["min_tissue"]) == (1, 0.1)


def test_model_trained_on_padded_tiles_pads_the_tiles_of_new_slides(workspace_copy, tmp_path):
    tiles, run = workspace_copy / "padded", workspace_copy / "run"
    settings = ("--mpp", 0.6, "--edge-tiles", "pad")  # slides of 448 px: one complete tile of 269 px, three padded ones
    tiled = tapfm("tile", workspace_copy / "cohort.csv", "--out", tiles, *settings)
    assert tiled.returncode == 0, tiled.output
    assert read_tiles(tiles / "patches" / f"{case_id(0)}_patches.h5").padded.tolist() == [False, True, True, True]
    trained = tapfm("train", workspace_copy / "run.toml", "--out", run, "--set", f'tiles.folder="{tiles}"')
    assert trained.returncode == 0, trained.output
    tapfm_package.export(run, out=workspace_copy / "exported")
    shutil.rmtree(tiles)
    write_slide(tmp_path / "new.svs", section(1000, 700, tissue=(0, 0, 1, 1)))
    for model in ("run", "exported"):
        out = workspace_copy / f"predicted-{model}"
        result = predict(workspace_copy / model, out, tmp_path / "new.svs", "--heatmaps", "--geojson")
        assert result.returncode == 0, result.output
        assert "edge are padded with white (as in training)" in result.output
        table = PredictionFolder(out).tiles("new")
        outside = (table.positions + 269 > (1000, 700)).any(axis=1)
        assert table.padded.tolist() == outside.tolist()
        assert (outside.sum(), len(table)) == (6, 12)
        features = json.loads((out / "per-slide" / "new" / "tiles.geojson").read_text())["features"]
        assert [each["properties"]["measurements"]["padded"] for each in features] == outside.tolist()


def test_folders_tables_and_slides_can_be_combined(run, workspace, tmp_path):
    (tmp_path / "more").mkdir()
    write_slide(tmp_path / "more" / "new.svs", section(900, 900))
    write_slide(tmp_path / "alone.svs", section(900, 900))
    (tmp_path / "table.csv").write_text(f"slide_id,path,FGFR3\nX,{workspace / '0.svs'},1\n")
    folder = predict_ok(run, tmp_path / "p", tmp_path / "more", tmp_path / "table.csv", tmp_path / "alone.svs")
    assert [row["slide_id"] for row in read_rows(folder.path / "predictions.csv")] == ["new", "X", "alone"]
    assert folder.slides()[0].slide_id == "X"
    assert folder.slides()[0].targets["FGFR3"].label == 1


def test_hint_of_a_failed_slide_names_tapfm_tile_only_for_options_of_tapfm_tile(run, tmp_path):
    write_slide(tmp_path / "unscaled.tif", section(900, 900), mpp=None, aperio=False)
    write_slide(tmp_path / "white.svs", np.full((900, 900, 3), 255, np.uint8), mpp=0.5)
    predict(run, tmp_path / "p", tmp_path / "unscaled.tif", tmp_path / "white.svs")
    hints = {row["slide_id"]: row["hint"] for row in read_rows(tmp_path / "p" / "failures.csv")}
    assert "then predict with --tiles" in hints["white"], "it names --min-tissue, an option of tapfm tile"
    assert "then predict with --tiles" not in hints["unscaled"]


@pytest.mark.parametrize("table_first", [True, False])
def test_table_takes_precedence_if_a_slide_is_given_twice(run, tmp_path, table_first):
    slide, table = tmp_path / "X.tif", tmp_path / "table.csv"
    write_slide(slide, section(900, 900), mpp=None, aperio=False)
    table.write_text("slide_id,path,mpp,patient_id\nX,X.tif,0.25,Doe\n")
    folder = predict_ok(run, tmp_path / "p", *([table, slide] if table_first else [slide, table]))
    assert [(each.mpp, each.patient_id) for each in folder.slides()] == [(0.25, "Doe")]


def test_tiles_of_another_scale_than_in_training_give_a_warning(run, workspace_copy):
    arguments = (workspace_copy / "0.svs", "--tiles", workspace_copy / "coarse")
    coarse = replace(make_tile_set(0), slide_id="0", positions=np.zeros((1, 2), int), side_px0=448, target_mpp=1.0)
    write_tiles(workspace_copy / "coarse", coarse, "trident")
    result = predict(run, workspace_copy / "p", *arguments)
    assert result.returncode == 0, result.output
    assert "224 µm" in result.output
    assert "112 µm" in result.output
    assert (
        "µm wide"
        not in predict(
            run, workspace_copy / "q", workspace_copy / "cohort.csv", "--tiles", workspace_copy / "tiles"
        ).output
    )


def test_invalid_labels_are_ignored_with_a_warning(run, workspace, tmp_path):
    (tmp_path / "table.csv").write_text(f"slide_id,path,FGFR3\nX,{workspace / '0.svs'},mutant\n")
    result = predict(run, tmp_path / "p", tmp_path / "table.csv")
    assert result.returncode == 0, result.output
    assert "Labels are ignored" in result.output
    assert read_rows(tmp_path / "p" / "predictions.csv")[0]["label"] == ""


# --- failures


def truncate(path):
    """Truncate a slide so that it opens but most of its pixels are missing."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3])


def test_truncated_slide_fails_alone(run, workspace_copy, cohort_predictions):
    truncate(workspace_copy / "4.svs")
    (workspace_copy / "6.svs").unlink()
    result = predict(run, workspace_copy / "p", workspace_copy / "cohort.csv", "--tiles", workspace_copy / "tiles")
    assert result.returncode == 3
    failed = {row["slide_id"]: row for row in read_rows(workspace_copy / "p" / "failures.csv")}
    assert list(failed) == [case_id(4), case_id(6)]
    assert all(row["problem"] == "read" and row["reason"] for row in failed.values())
    ours = read_predictions(workspace_copy / "p" / "predictions.csv")
    theirs = read_predictions(cohort_predictions.path / "predictions.csv")
    assert ours == [each for each in theirs if each.slide_id not in failed]
    allowed = predict(
        *(
            run,
            workspace_copy / "p",
            workspace_copy / "cohort.csv",
            "--tiles",
            workspace_copy / "tiles",
            "--resume",
            "--allow-failures",
            2,
        )
    )
    assert allowed.returncode == 0, allowed.output


def test_slide_without_tissue_fails_with_the_hint_of_tiling(run, tmp_path):
    (tmp_path / "slides").mkdir()
    write_slide(tmp_path / "slides" / "empty.svs", np.full((900, 900, 3), 243, np.uint8))
    write_slide(tmp_path / "slides" / "fine.svs", section(900, 900))
    result = predict(run, tmp_path / "p", tmp_path / "slides")
    assert result.returncode == 3
    (row,) = read_rows(tmp_path / "p" / "failures.csv")
    assert (row["slide_id"], row["problem"]) == ("empty", "tiles")
    assert "tapfm tile" in row["hint"]
    assert "--tiles" in row["hint"]
    assert [each.slide_id for each in PredictionFolder(tmp_path / "p").slides()] == ["fine"]


@pytest.mark.parametrize("known", [True, False])
def test_tiles_of_another_slide_are_an_error(run, workspace_copy, known):
    changes = {"size_px0": (9000, 9000)} if known else {"positions": np.array([[0, 0], [5000, 224]])}
    write_tiles(workspace_copy / "tiles", replace(make_tile_set(3), **changes), "trident")
    result = predict(run, workspace_copy / "p", workspace_copy / "cohort.csv", "--tiles", workspace_copy / "tiles")
    assert result.returncode == 3
    (row,) = read_rows(workspace_copy / "p" / "failures.csv")
    assert row["slide_id"] == case_id(3)
    assert "448 x 448 pixels" in row["reason"]
    assert ("9,000 x 9,000 pixels" in row["reason"]) == known


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("a defect"), "unexpected RuntimeError: a defect"),
        (torch.OutOfMemoryError("CUDA"), "out of memory in the aggregator"),
    ],
)
def test_unexpected_error_fails_one_slide(run, workspace, tmp_path, monkeypatch, error, reason):
    predict_slide = Predictor.predict

    def fail_for_one_slide(self, name, slide):
        if name == case_id(4):
            raise error
        return predict_slide(self, name, slide)

    monkeypatch.setattr(Predictor, "predict", fail_for_one_slide)
    assert predict(run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles").returncode == 3
    (row,) = read_rows(tmp_path / "p" / "failures.csv")
    assert (row["slide_id"], row["problem"]) == (case_id(4), "predict")
    assert row["reason"].startswith(reason)
    assert len(read_rows(tmp_path / "p" / "predictions.csv")) == len(SPLITS) - 1


def test_out_of_memory_with_one_tile_stops_the_command(run, workspace, tmp_path, monkeypatch):
    def raise_out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr(InferenceEncoder, "encode", raise_out_of_memory)
    result = predict(run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles", "--batch", 4)
    assert result.returncode == 1
    assert "Out of memory at 4 tiles per batch; retrying with 2." in result.output
    assert "cpu is out of memory with one tile at a time." in result.output


@pytest.mark.parametrize(
    ("number", "code", "message"), [(errno.ENOSPC, 1, "The disk is full"), (errno.EACCES, 2, "--resume")]
)
def test_write_error_stops_the_command(run, workspace, tmp_path, monkeypatch, number, code, message):
    tried = []
    write = cohort_prediction.write_tile_table

    def fail_to_write(path, table):
        tried.append(path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
            write(path, table)

    monkeypatch.setattr(cohort_prediction, "write_tile_table", fail_to_write)
    result = predict(run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    assert result.returncode == code
    assert message in result.output
    assert len(tried) == 1


def test_progress_bar_never_goes_backwards():
    shown = []
    with SlideProgress(Console(file=io.StringIO()), "predicting", slides=2, tiles=200) as bar:
        bar.add_tiles(40)
        shown.append(bar._bars.tasks[0].completed)
        bar.finish_slide("first", tiles=100)  # 60 of it cannot be read
        shown.append(bar._bars.tasks[0].completed)
        bar.add_tiles(64)
        shown.append(bar._bars.tasks[0].completed)
    assert shown == [40, 100, 164]


def test_no_predicted_slide_is_an_error(run, tmp_path):
    (tmp_path / "broken.svs").write_bytes(b"II*\0 and nothing else")
    result = predict(run, tmp_path / "p", tmp_path / "broken.svs")
    assert result.returncode == 3
    assert "1 slide" in result.output
    assert "broken" in result.output
    write_slide(tmp_path / "broken.svs", section(900, 900))
    predict_ok(run, tmp_path / "p", tmp_path / "broken.svs")  # the folder has no predictions: no --resume needed


# --- stop and resume


def test_resume_after_kill_gives_the_same_files(run, workspace, cohort_predictions, tmp_path):
    out = tmp_path / "killed"
    arguments = ("--model", run, "--out", out, *CPU_OPTIONS, workspace / "cohort.csv", "--tiles", workspace / "tiles")
    process = start_tapfm("predict", *arguments)
    wait_for(lambda: len(list(out.glob("per-slide/*/slide.json"))) >= 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "predictions.csv").exists()
    result = tapfm("predict", *arguments, "--resume")
    assert result.returncode == 0, result.output
    assert "slides are already predicted." in result.output
    about = read_files_below(cohort_predictions.path)
    assert read_files_below(out) == about
    assert not [path for path in out.rglob("*") if path.name.endswith(".unfinished")]


def test_ctrl_c_keeps_finished_slides_and_names_the_resume_option(
    run, workspace, cohort_predictions, tmp_path, monkeypatch
):
    signals = iter([None, None, signal.SIGINT])
    arguments = (run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    with monkeypatch.context() as patch:
        patch.setattr(StopSignalHandler, "signal_number", lambda _: next(signals))
        stopped = predict(*arguments)
    assert stopped.returncode == 130
    assert "--resume" in stopped.output
    assert len(read_rows(tmp_path / "p" / "predictions.csv")) == 3
    assert predict(*arguments).returncode == 2
    assert predict(*arguments, "--resume").returncode == 0
    assert read_files_below(tmp_path / "p") == read_files_below(cohort_predictions.path)


def test_failures_before_a_stop_are_written(run, workspace_copy, monkeypatch):
    (workspace_copy / "0.svs").unlink()
    signals = iter([None, signal.SIGINT])
    monkeypatch.setattr(StopSignalHandler, "signal_number", lambda _: next(signals))
    assert (
        predict(
            run, workspace_copy / "p", workspace_copy / "cohort.csv", "--tiles", workspace_copy / "tiles"
        ).returncode
        == 130
    )
    assert [row["slide_id"] for row in read_rows(workspace_copy / "p" / "failures.csv")] == [case_id(0)]


def test_resume_predicts_replaced_slides_and_keeps_missing_ones(run, workspace_copy):
    arguments = (run, workspace_copy / "p", workspace_copy / "cohort.csv", "--tiles", workspace_copy / "tiles")
    assert predict(*arguments).returncode == 0
    before = read_predictions(workspace_copy / "p" / "predictions.csv")
    copy_slide(workspace_copy / "1.svs", workspace_copy / "0.svs")
    (workspace_copy / "2.svs").unlink()
    again = predict(*arguments, "--resume")
    assert again.returncode == 0, again.output
    assert "9 of 10 slides are already predicted." in again.output
    after = read_predictions(workspace_copy / "p" / "predictions.csv")
    assert after[1:] == before[1:]
    assert after[0].logits == before[1].logits != before[0].logits


def test_resume_encodes_only_slides_whose_tiles_or_version_changed(run, workspace_copy, monkeypatch):
    arguments = (run, workspace_copy / "p", workspace_copy / "cohort.csv", "--tiles", workspace_copy / "tiles")
    assert predict(*arguments).returncode == 0
    edit_csv(workspace_copy / "cohort.csv", lambda rows: rows[0].update(patient_id="Roe"))
    encoded = []
    encode = InferenceEncoder.encode
    monkeypatch.setattr(
        InferenceEncoder, "encode", lambda self, tiles, batch: encoded.append(1) or encode(self, tiles, batch)
    )
    assert predict(*arguments, "--resume").returncode == 0
    assert not encoded
    assert read_rows(workspace_copy / "p" / "predictions.csv")[0]["patient_id"] == "Roe"  # updated from the table
    write_tiles(workspace_copy / "tiles", replace(make_tile_set(0), fingerprint="of other code"), "trident")
    assert predict(*arguments, "--resume").returncode == 0
    assert not encoded, "same tiles, other fingerprint"
    with monkeypatch.context() as patch:
        patch.setattr(validity, "FEATURES_VERSION", 10**6)
        assert predict(*arguments, "--resume").returncode == 0
    assert len(encoded) == len(SPLITS), "another version of readers or encoders"
    assert predict(*arguments, "--resume").returncode == 0
    encoded.clear()
    write_tiles(
        workspace_copy / "tiles", replace(make_tile_set(0), positions=make_tile_set(0).positions[1:]), "trident"
    )
    assert predict(*arguments, "--resume").returncode == 0
    assert len(encoded) == 1


def test_added_slides_come_before_earlier_ones_in_the_table(run, workspace, tmp_path):
    out = tmp_path / "p"
    predict_ok(run, out, workspace / "0.svs", "--tiles", copy_tiles_by_file_name(workspace, tmp_path))
    predict_ok(run, out, workspace / "1.svs", "--tiles", copy_tiles_by_file_name(workspace, tmp_path), "--resume")
    assert [row["slide_id"] for row in read_rows(out / "predictions.csv")] == ["1", "0"]


def copy_tiles_by_file_name(workspace, tmp_path):
    """Copy tiles under the ids of slides without a cohort table: their file names."""
    for number in range(2):
        target = tmp_path / "tiles" / "patches" / f"{number}_patches.h5"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(workspace / "tiles" / "patches" / f"{case_id(number)}_patches.h5", target)
    return tmp_path / "tiles"


# --- heatmaps and GeoJSON


def test_heatmaps_can_be_added_later_without_encoding_again(run, workspace, tmp_path, monkeypatch):
    tables = (workspace / "0.svs", workspace / "1.svs", "--tiles", copy_tiles_by_file_name(workspace, tmp_path))
    at_once = predict_ok(run, tmp_path / "at-once", *tables, "--heatmaps", "--geojson")
    later = tmp_path / "later"
    predict_ok(run, later, *tables)
    assert not list(later.glob("per-slide/*/*.png"))
    monkeypatch.setattr(InferenceEncoder, "encode", lambda *_: pytest.fail("encoded again"))
    predict_ok(run, later, *tables, "--heatmaps", "--resume")
    assert not list(later.glob("per-slide/*/*.geojson"))
    predict_ok(run, later, *tables, "--geojson", "--resume")
    assert read_files_below(later) == read_files_below(at_once.path)
    names = {path.name for path in at_once.slide_folder("0").iterdir()}
    assert {"heatmap-contribution-FGFR3.png", "heatmap-contribution-FGFR3.tif", "tiles.geojson"} <= names
    assert "gallery-contribution-FGFR3.png" in names
    (at_once.slide_folder("0") / "gallery-attention.png").unlink()  # deleted files are drawn again
    (at_once.slide_folder("1") / "tiles.geojson").unlink()
    (at_once.slide_folder("1") / ".drawn.json").write_text("trunca")
    predict_ok(run, at_once.path, *tables, "--heatmaps", "--geojson", "--resume")
    assert read_files_below(later) == read_files_below(at_once.path)


def test_heatmaps_are_not_found_as_slides(run, workspace, tmp_path):
    shutil.copy(workspace / "0.svs", tmp_path / "0.svs")
    predict_ok(run, tmp_path / "p", tmp_path / "0.svs", "--heatmaps")
    assert list(tmp_path.glob("p/per-slide/*/*.tif"))
    assert find_slides(tmp_path) == [tmp_path / "0.svs"]


def test_failed_heatmap_keeps_the_prediction(run, workspace_copy):
    arguments = (run, workspace_copy / "p", workspace_copy / "cohort.csv", "--tiles", workspace_copy / "tiles")
    assert predict(*arguments).returncode == 0
    before = (workspace_copy / "p" / "predictions.csv").read_bytes()
    (workspace_copy / "3.svs").unlink()
    result = predict(*arguments, "--heatmaps", "--resume")
    assert result.returncode == 3
    (row,) = read_rows(workspace_copy / "p" / "failures.csv")
    assert (row["slide_id"], row["problem"]) == (case_id(3), "draw")
    assert f"failed {case_id(3)}: {row['reason']}" in result.output
    assert (workspace_copy / "p" / "predictions.csv").read_bytes() == before


# --- invalid input


def test_existing_predictions_are_not_overwritten(run, train, workspace, cohort_predictions):
    arguments = (workspace / "cohort.csv", "--tiles", workspace / "tiles")
    again = predict(run, cohort_predictions.path, *arguments)
    assert again.returncode == 2
    assert "--resume" in again.output
    other = predict(train("another", "seed=2"), cohort_predictions.path, *arguments, "--resume")
    assert other.returncode == 2
    assert "another model" in other.output
    assert "--out" in other.output


def test_resume_works_after_the_run_has_moved(run, workspace, tmp_path):
    shutil.copytree(run, tmp_path / "here")
    (tmp_path / "here" / "predictions-val.csv").unlink()  # no calls, and the reason names the run's path
    arguments = (tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    predict_ok(tmp_path / "here", *arguments)
    (tmp_path / "here").rename(tmp_path / "there")
    result = predict(tmp_path / "there", *arguments, "--resume")
    assert result.returncode == 0, result.output
    assert "10 of 10 slides are already predicted." in result.output


def test_invalid_input_is_an_error_before_any_work(run, workspace, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    twin = tmp_path / "twin" / "0.svs"
    twin.parent.mkdir()
    shutil.copy(workspace / "0.svs", twin)
    slide = workspace / "0.svs"
    cases = [
        ((tmp_path / "no-run", tmp_path / "p", slide), "no-run"),
        ((run, tmp_path / "p", tmp_path / "missing.svs"), "missing.svs"),
        ((run, tmp_path / "p", slide, "--batch", "many"), "got 'many'"),
        ((run, tmp_path / "p", slide, "--batch", "0"), "got '0'"),
        ((run, tmp_path / "p", slide, "--sensitivity", "2"), "--sensitivity"),
        ((run, tmp_path / "p", slide, "--precision", "half"), "auto, float32, bfloat16"),
        ((run, tmp_path / "p", slide, "--precision", "float8"), "float8"),
        ((run, tmp_path / "p", slide, twin), str(twin)),
        ((run, tmp_path / "p", tmp_path / "empty"), str(tmp_path / "empty")),
        ((run, tmp_path / "p", slide, "--tiles", tmp_path / "empty"), "omit --tiles"),
        ((run, tmp_path / "other", slide), "notes.txt"),
        ((run, tmp_path / "file", slide), str(tmp_path / "file")),
    ]
    for arguments, problem in cases:
        result = predict(*arguments)
        assert result.returncode == 2, (arguments, result.output)
        assert problem in " ".join(result.output.split()), result.output
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_batch_size_does_not_change_predictions(run, workspace, cohort_predictions, tmp_path):
    folder = predict_ok(run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles", "--batch", 1)
    for ours, theirs in zip(folder.slides(), cohort_predictions.slides(), strict=True):
        assert ours.targets["FGFR3"].logit == pytest.approx(theirs.targets["FGFR3"].logit, abs=1e-5)


# --- precision


@pytest.fixture
def float8_on_cpu(monkeypatch):
    """Allow float8 on a CPU, which emulates it."""
    monkeypatch.setattr(float8, "check_float8_support", lambda _: None)


@pytest.mark.usefixtures("float8_on_cpu")
def test_float8_reports_its_error_and_is_not_mixed_with_other_precisions(
    run, workspace, cohort_predictions, tmp_path, monkeypatch
):
    monkeypatch.setattr(float8_check, "COMPARED_TILES", 3)
    arguments = (run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles", "--precision", "float8")
    result = predict(*arguments)
    assert result.returncode == 0, result.output
    assert f"float8 changes the probabilities of slide {case_id(0)} by at most 0.0" in result.output
    assert "(on 3 of its " in result.output
    folder = PredictionFolder(tmp_path / "p")
    assert folder.read_metadata()["precision"] == "float8"
    for ours, theirs in zip(folder.slides(), cohort_predictions.slides(), strict=True):
        assert ours.targets["FGFR3"].logit != theirs.targets["FGFR3"].logit
        assert ours.targets["FGFR3"].probability == pytest.approx(theirs.targets["FGFR3"].probability, abs=0.01)
    again = predict(*arguments, "--resume")
    assert again.returncode == 0, again.output
    assert "float8 changes" not in again.output  # nothing was left to predict
    mixed = predict(*arguments[:-2], "--resume")
    assert mixed.returncode == 2
    assert "precision" in mixed.output


@pytest.mark.usefixtures("float8_on_cpu")
def test_float8_with_large_error_is_an_error(run, workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(float8_check, "_MAX_CHANGE", 0.0)
    arguments = (run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    result = predict(*arguments, "--precision", "float8")
    assert result.returncode == 2
    assert "the limit is 0" in result.output
    assert "--precision bfloat16" in result.output
    assert not PredictionFolder(tmp_path / "p").slides()
    assert predict(*arguments, "--precision", "bfloat16").returncode == 0


@pytest.mark.usefixtures("float8_on_cpu")
def test_float8_without_finite_logits_is_an_error(run, workspace, tmp_path, monkeypatch):
    prepare = float8_check.prepare_encoder

    def prepare_broken(encoder, *args, **settings):
        prepared = prepare(encoder, *args, **settings)
        with torch.no_grad():
            encoder.vit.norm.bias.fill_(torch.nan)
        return prepared

    monkeypatch.setattr(float8_check, "prepare_encoder", prepare_broken)
    arguments = (run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles", "--precision", "float8")
    result = predict(*arguments)
    assert result.returncode == 2
    assert "float8 cannot be checked" in result.output
    assert "--precision bfloat16" in result.output


@pytest.mark.usefixtures("float8_on_cpu")
def test_float8_is_checked_on_a_readable_slide(run, workspace_copy):
    truncate(workspace_copy / "0.svs")
    result = predict(
        run,
        workspace_copy / "p",
        workspace_copy / "cohort.csv",
        "--tiles",
        workspace_copy / "tiles",
        "--precision",
        "float8",
    )
    assert result.returncode == 3, result.output
    assert f"float8 changes the probabilities of slide {case_id(1)} " in result.output


def test_bfloat16_gives_similar_predictions(run, workspace, cohort_predictions, tmp_path):
    folder = predict_ok(
        run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles", "--precision", "bfloat16"
    )
    for ours, theirs in zip(folder.slides(), cohort_predictions.slides(), strict=True):
        assert ours.targets["FGFR3"].logit != theirs.targets["FGFR3"].logit
        assert ours.targets["FGFR3"].probability == pytest.approx(theirs.targets["FGFR3"].probability, abs=0.01)


def test_python_function_gives_the_same_files(run, workspace, cohort_predictions, tmp_path):
    predicted = tapfm_package.predict(
        workspace / "cohort.csv", model=run, out=tmp_path / "p", tiles=workspace / "tiles", device="cpu", workers=0
    )
    assert not predicted.failed
    assert read_files_below(predicted.folder.path) == read_files_below(cohort_predictions.path)
    assert len(predicted.slides) == len(SPLITS)


def test_workers_do_not_change_the_files(run, workspace, cohort_predictions, tmp_path):
    result = tapfm(
        *("predict", "--model", run, "--out", tmp_path / "p", "--workers", 2, "--device", "cpu"),
        *(workspace / "cohort.csv", "--tiles", workspace / "tiles"),
    )
    assert result.returncode == 0, result.output
    assert read_files_below(tmp_path / "p") == read_files_below(cohort_predictions.path)


def test_out_of_memory_while_loading_is_an_error_with_a_hint(run, workspace, tmp_path, monkeypatch):
    def raise_out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr(load_models, "prepare_encoder", raise_out_of_memory)
    result = predict(run, tmp_path / "p", workspace / "cohort.csv", "--tiles", workspace / "tiles")
    assert result.returncode == 1
    assert "cpu ran out of memory while loading the model." in result.output
    assert "--device cpu" in result.output


def test_early_workers_are_stopped_after_errors_and_interrupts(run, tmp_path, monkeypatch):
    slide = write_slide(tmp_path / "s.svs", section(900, 900))

    def raise_weights_error(*_):
        raise WeightsError("The weights are missing.", hint="Download them again.")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    arguments = ("predict", "--model", run, "--workers", 1, "--device", "cpu", slide)
    monkeypatch.setattr(cohort_prediction, "load_with_encoder", raise_weights_error)
    # problems of slides are reported first: tiles are found before weights are loaded
    without_tiles = tapfm(*arguments, "--out", tmp_path / "a", "--tiles", tmp_path)
    assert without_tiles.returncode == 2
    assert "omit --tiles" in without_tiles.output
    without_weights = tapfm(*arguments, "--out", tmp_path / "b")
    assert without_weights.returncode == 2
    assert "The weights are missing." in without_weights.output
    assert "Download them again." in without_weights.output
    monkeypatch.setattr(cohort_prediction, "find_or_create_tiles", interrupt)
    stopped = tapfm(*arguments, "--out", tmp_path / "c")
    assert stopped.returncode == 130
    assert set(multiprocessing.active_children()) <= before


def test_resume_does_not_load_weights_if_all_slides_are_predicted(
    run, workspace, cohort_predictions, tmp_path, monkeypatch
):
    shutil.copytree(cohort_predictions.path, tmp_path / "p")
    loaded = []
    monkeypatch.setattr(cohort_prediction, "load_with_encoder", lambda *_: loaded.append(1))
    arguments = ("predict", "--model", run, "--device", "cpu", "--workers", len(SPLITS), workspace / "cohort.csv")
    again = tapfm(*arguments, "--out", tmp_path / "p", "--tiles", workspace / "tiles", "--resume")
    assert again.returncode == 0, again.output
    assert not loaded


@needs_real_slides
def test_real_slides_with_heatmaps_and_geojson(run, tmp_path):
    svs, dicom, broken = (REAL / name for name in ("CMU-1-Small-Region.svs", "CMU-1-Small-Region-DICOM", "broken.svs"))
    result = predict(run, tmp_path / "p", svs, broken, dicom, "--heatmaps", "--geojson")
    assert result.returncode == 3, result.output
    assert [row["slide_id"] for row in read_rows(tmp_path / "p" / "failures.csv")] == ["broken"]
    folder = PredictionFolder(tmp_path / "p")
    from_svs, from_dicom = folder.slides()
    assert from_svs.tiles == from_dicom.tiles > 50
    # the same slide in two files with different compression
    assert from_svs.targets["FGFR3"].logit == pytest.approx(from_dicom.targets["FGFR3"].logit, abs=0.05)
    for slide in (from_svs, from_dicom):
        own = folder.slide_folder(slide.slide_id)
        assert {path.suffix for path in own.iterdir() if path.suffix} == {
            *(".png", ".tif", ".geojson", ".parquet", ".json")
        }
        with OpenSlide(own / "heatmap-contribution-FGFR3.tif") as heatmap:
            assert float(heatmap.properties["openslide.mpp-x"]) == pytest.approx(slide.mpp * 7, rel=1e-4)
        assert len(json.loads((own / "tiles.geojson").read_text())["features"]) == slide.tiles
