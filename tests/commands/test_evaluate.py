"""`tapfm evaluate` on a run's own cohort."""

import json
import re
import shutil
import signal

import h5py
import pytest
from cohort_files import read_rows
from command_line import tapfm
from PIL import Image
from slide_files import section, write_slide
from training_workspace import case_id, edit_csv, run_train

import tapfm as tapfm_package
from tapfm.baselines import slide_colours
from tapfm.baselines.slide_colours import load_or_create_colour_table
from tapfm.evaluation.metric_values import choose_thresholds
from tapfm.evaluation.predictions import compute_scores, read_predictions
from tapfm.runs.folder import RunFolder
from tapfm.runtime.files import file_sha256
from tapfm.tasks.catalog import target_kinds
from tapfm.workflows import evaluation_run as evaluate_model

FAST_OPTIONS = ("--resamples", 50, "--workers", 0, "--device", "cpu")


def evaluate(run, out, *options):
    return tapfm("evaluate", run, "--out", out, *FAST_OPTIONS, *options)


def read_metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def run(train):
    return train("evaluated")


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "test"
    result = evaluate(run, folder, "--by", "split")
    assert result.returncode == 0, result.output
    return folder


def copy_without_predictions(run, folder):
    """Copy a run without its stored predictions."""
    shutil.copytree(run, folder)
    for path in folder.glob(".predictions-*"):
        path.unlink()
    return folder


def test_evaluation_folder_contents(run, evaluated):
    assert read_files(evaluated).keys() == {
        *("predictions.csv", "predictions-baseline.csv", "metrics.json", "metrics.csv", "metrics.md"),
        *("failures.csv", "colours.csv", "roc.png", "pr.png", "reliability.png", "scores.png", "evaluation.json"),
    }
    about = json.loads((evaluated / "evaluation.json").read_text())
    best = RunFolder(run).best_checkpoint
    assert about["members"] == [{"run": RunFolder(run).compute_run_id(), "weights_sha256": file_sha256(best)}]
    assert (about["cohort"], about["split"], about["unit"]) == ("own", "test", "slide")
    for name in ("roc", "pr", "reliability", "scores"):
        with Image.open(evaluated / f"{name}.png") as image:
            assert image.width > 500


def test_metrics_match_the_predictions(run, evaluated):
    predictions = read_predictions(evaluated / "predictions.csv")
    assert predictions == read_predictions(run / "predictions-test.csv")
    found = read_metrics(evaluated)["models"]["model"]["all"]["FGFR3"]["auc"]
    assert found["value"] == compute_scores(predictions, target_kinds(["FGFR3"]), "slide").auc["FGFR3"]
    assert (found["units"], found["positives"]) == (4, 3)
    assert f"{found['value']:.3f}" in (evaluated / "metrics.md").read_text()


def test_metrics_csv_columns_and_rows(evaluated):
    rows = read_rows(evaluated / "metrics.csv")
    assert list(rows[0]) == [
        *("model", "subgroup", "target", "metric", "value", "ci_low", "ci_high"),
        *("delong_low", "delong_high", "units", "positives", "reason"),
    ]
    assert {row["model"] for row in rows} == {"model", "colour baseline", "model - colour baseline"}
    assert {row["subgroup"] for row in rows} == {"", "split = test"}
    for row in rows:
        assert row["value"] or row["reason"], row
        assert "nan" not in row.values()
    for model in ("model", "colour baseline"):
        assert sum(row["model"] == model and not row["subgroup"] for row in rows) == 14
    assert {row["metric"] for row in rows if row["subgroup"]} == {"auc", "average_precision", "brier"}


def test_thresholds_are_chosen_on_validation_slides(run, evaluated):
    chosen = choose_thresholds(read_predictions(run / "predictions-val.csv"), target_kinds(["FGFR3"]), "slide", 0.9)
    written = read_metrics(evaluated)["thresholds"]
    assert written["youden"] == chosen.youden
    assert written["at_sensitivity"] == chosen.at_sensitivity
    assert "2 validation slides of the run" in written["chosen_on"]


def test_predictions_match_those_of_training(run, evaluated, tmp_path):
    again = copy_without_predictions(run, tmp_path / "run")
    assert evaluate(again, tmp_path / "evaluation").returncode == 0
    assert (tmp_path / "evaluation" / "predictions.csv").read_bytes() == (evaluated / "predictions.csv").read_bytes()


def test_predictions_of_other_weights_are_not_reused(run, tmp_path):
    other = copy_without_predictions(run, tmp_path / "run")
    text = (run / ".predictions-test.jsonl").read_text().replace('["', '["0')
    (other / ".predictions-test.jsonl").write_text(text)
    (other / "predictions-test.csv").unlink()
    assert evaluate(other, tmp_path / "evaluation").returncode == 0
    assert read_predictions(tmp_path / "evaluation" / "predictions.csv") == read_predictions(
        run / "predictions-test.csv"
    )


def test_evaluation_is_reproducible(run, evaluated, tmp_path):
    assert evaluate(run, tmp_path / "again", "--by", "split").returncode == 0
    assert read_files(tmp_path / "again") == read_files(evaluated)


def test_unit_patient(run, tmp_path):
    assert evaluate(run, tmp_path / "patients", "--unit", "patient").returncode == 0
    assert read_metrics(tmp_path / "patients")["models"]["model"]["all"]["FGFR3"]["auc"]["units"] == 3


@pytest.mark.parametrize(("split", "slides"), [("val", 2), ("train", 4), ("all", 10)])
def test_warning_if_slides_are_not_held_out(run, tmp_path, split, slides):
    result = evaluate(run, tmp_path / split, "--split", split)
    assert result.returncode == 0, result.output
    assert "NOT HELD OUT" in result.output
    assert ("all splits of its own cohort" in result.output) == (split == "all")
    assert "**NOT HELD OUT" in (tmp_path / split / "metrics.md").read_text()
    assert read_metrics(tmp_path / split)["slides"] == slides


def test_page_states_the_source_of_thresholds(evaluated):
    page = (evaluated / "metrics.md").read_text()
    assert re.search(r"^Thresholds were chosen on \d+ validation slides of the run", page, re.MULTILINE)


def test_no_warning_for_held_out_slides(evaluated):
    assert "HELD OUT" not in (evaluated / "metrics.md").read_text()


def test_missing_class_is_explained(workspace_copy):
    edit_csv(
        workspace_copy / "cohort.csv", lambda rows: [row.update(FGFR3="0") for row in rows if row["split"] == "test"]
    )
    assert run_train(workspace_copy).returncode == 0
    result = evaluate(workspace_copy / "run", workspace_copy / "evaluation")
    assert result.returncode == 0, result.output
    assert "no positive slide among 4" in result.output
    rows = read_rows(workspace_copy / "evaluation" / "metrics.csv")
    (auc,) = [row for row in rows if (row["model"], row["metric"]) == ("model", "auc")]
    assert (auc["value"], auc["reason"].startswith("no positive slide among 4")) == ("", True)
    assert "no positive slide among 4" in (workspace_copy / "evaluation" / "metrics.md").read_text()


@pytest.fixture
def run_in_copy(run, workspace, workspace_copy):
    """A copy of the workspace with a run that has no stored predictions."""
    copied = copy_without_predictions(run, workspace_copy / "run")
    text = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(text.replace(str(workspace), str(workspace_copy)))
    return workspace_copy


def test_changed_label_is_rejected(run_in_copy):
    edit_csv(run_in_copy / "cohort.csv", lambda rows: rows[6].update(FGFR3="1"))
    result = evaluate(run_in_copy / "run", run_in_copy / "evaluation")
    assert result.returncode == 2
    assert "case-06: FGFR3 was '0', is now '1'" in result.output


def test_training_slide_moved_to_test_is_rejected(run_in_copy):
    edit_csv(run_in_copy / "cohort.csv", lambda rows: rows[0].update(split="test"))
    result = evaluate(run_in_copy / "run", run_in_copy / "evaluation")
    assert result.returncode == 2
    assert "case-00: split was 'train', is now 'test'" in result.output


def test_new_test_slide_of_a_training_patient_is_rejected(run_in_copy):
    def add(rows):
        rows[0]["split"] = ""  # otherwise the table itself would be rejected
        rows.append(rows[9] | {"slide_id": "case-10", "patient_id": "Doe0", "path": "10.svs"})

    write_slide(run_in_copy / "10.svs", section(448, 448, seed=10, tissue=(0, 0, 1, 1)), tile_px=224, downsamples=(1,))
    edit_csv(run_in_copy / "cohort.csv", add)
    shutil.copy(run_in_copy / "tiles/patches/case-09_patches.h5", run_in_copy / "tiles/patches/case-10_patches.h5")
    result = evaluate(run_in_copy / "run", run_in_copy / "evaluation")
    assert result.returncode == 2
    assert "Doe0 (train)" in result.output


def test_unreadable_slide_fails_and_is_evaluated_after_repair(run_in_copy):
    out = run_in_copy / "evaluation"
    whole = (run_in_copy / "9.svs").read_bytes()
    (run_in_copy / "9.svs").write_bytes(b"no slide")
    result = evaluate(run_in_copy / "run", out)
    assert result.returncode == 3
    (row,) = read_rows(out / "failures.csv")
    assert (row["slide_id"], row["problem"]) == ("case-09", "failed")
    assert [each.slide_id for each in read_predictions(out / "predictions.csv")] == [case_id(i) for i in (6, 7, 8)]
    assert "case-09" in (out / "metrics.md").read_text()
    assert evaluate(run_in_copy / "run", out, "--resume", "--allow-failures", 1).returncode == 0
    (run_in_copy / "9.svs").write_bytes(whole)
    assert evaluate(run_in_copy / "run", out, "--resume").returncode == 0
    assert read_predictions(out / "predictions.csv") == read_predictions(run_in_copy / "run" / "predictions-test.csv")


def test_slide_without_tiles_fails(run_in_copy):
    (run_in_copy / "tiles" / "patches" / "case-08_patches.h5").unlink()
    result = evaluate(run_in_copy / "run", run_in_copy / "evaluation")
    assert result.returncode == 3
    assert "no tile file" in (run_in_copy / "evaluation" / "failures.csv").read_text()


def test_no_slide_files_is_an_error(run_in_copy):
    for number in range(10):
        (run_in_copy / f"{number}.svs").unlink()
    result = evaluate(run_in_copy / "run", run_in_copy / "evaluation")
    assert result.returncode == 2
    assert "--slides FOLDER" in result.output
    assert not (run_in_copy / "evaluation").exists()


def test_resume_after_interrupt(run_in_copy, monkeypatch):
    out, signals = run_in_copy / "evaluation", iter([None, signal.SIGINT])
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_model.StopSignalHandler, "signal_number", lambda _: next(signals))
        assert evaluate(run_in_copy / "run", out).returncode == 130
    assert not (out / "metrics.json").exists()
    assert not (out / "predictions.csv").exists()
    assert len((out / ".predictions-1.jsonl").read_text().split()) > 0
    result = evaluate(run_in_copy / "run", out)
    assert result.returncode == 2
    assert "unfinished evaluation" in result.output
    assert evaluate(run_in_copy / "run", out, "--resume").returncode == 0
    assert read_predictions(out / "predictions.csv") == read_predictions(run_in_copy / "run" / "predictions-test.csv")


def test_existing_evaluation_is_not_overwritten(run, evaluated, train):
    result = evaluate(run, evaluated)
    assert result.returncode == 2
    assert "already contains an evaluation of" in result.output
    result = evaluate(train("other", "seed=1"), evaluated, "--resume")
    assert result.returncode == 2
    assert f"model was {run} (weights" in result.output


def test_folder_with_other_files_is_rejected(run, tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = evaluate(run, tmp_path)
    assert result.returncode == 2
    assert "thesis.tex" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--unit", "tile"), "--unit must be slide or patient"),
        (("--sensitivity", 0), "--sensitivity must be above 0"),
        (("--resamples", 0), "--resamples"),
        (("--split", "tset"), "train, val, test, all"),
        (("--by", "scaner"), "no column 'scaner' (--by)"),
        (("--features", "features"), "adapted encoder"),
        (("--device", "abacus"), "not a device"),
    ],
)
def test_invalid_options_are_rejected(run, tmp_path, options, message):
    copied = copy_without_predictions(run, tmp_path / "run")
    result = evaluate(copied, tmp_path / "evaluation", *options)
    assert result.returncode == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_folder_without_a_model_is_rejected(tmp_path):
    result = evaluate(tmp_path, tmp_path / "evaluation")
    assert result.returncode == 2
    assert "no config.toml, tapfm.json or ensemble.json" in result.output


def test_run_without_the_best_checkpoint_is_rejected(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "best.safetensors").unlink()
    result = evaluate(tmp_path / "run", tmp_path / "evaluation")
    assert result.returncode == 2
    assert "best.safetensors is missing" in result.output
    (tmp_path / "run" / "history.jsonl").unlink()  # as in a run that has not finished an epoch
    result = evaluate(tmp_path / "run", tmp_path / "evaluation")
    assert result.returncode == 2
    assert "--resume" in result.output


def test_warning_if_the_run_is_not_finished(run, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_model, "is_finished", lambda _: False)
    result = evaluate(run, tmp_path / "evaluation")
    assert result.returncode == 0, result.output
    assert "is not finished; the best epoch so far is evaluated" in result.output
    assert "is not finished" in (tmp_path / "evaluation" / "metrics.md").read_text()


def test_fold_is_evaluated_on_its_test_slides(workspace_copy):
    def folds(rows):
        for row in rows:
            row["fold_0"] = {"train": "test", "test": "train"}.get(row["split"], row["split"])

    edit_csv(workspace_copy / "cohort.csv", folds)
    assert run_train(workspace_copy, "--set", "cohort.fold=0").returncode == 0
    assert evaluate(workspace_copy / "run", workspace_copy / "evaluation").returncode == 0
    predictions = read_predictions(workspace_copy / "evaluation" / "predictions.csv")
    assert [each.slide_id for each in predictions] == [case_id(i) for i in range(4)]


def test_no_thresholds_without_validation_slides(workspace_copy):
    edit_csv(
        workspace_copy / "cohort.csv", lambda rows: [row.update(split="") for row in rows if row["split"] == "val"]
    )
    assert run_train(workspace_copy).returncode == 0
    assert evaluate(workspace_copy / "run", workspace_copy / "evaluation").returncode == 0
    rows = read_rows(workspace_copy / "evaluation" / "metrics.csv")
    (f1,) = [row for row in rows if (row["model"], row["metric"]) == ("model", "f1")]
    assert (f1["value"], "no threshold" in f1["reason"]) == ("", True)
    assert "no threshold was chosen" in (workspace_copy / "evaluation" / "metrics.md").read_text()


# a fixed encoder


@pytest.fixture(scope="module")
def fixed(train):
    return train("fixed", "adaptation.method=fixed")


def test_tiles_and_stored_features_give_the_same_predictions(fixed, workspace, tmp_path):
    assert evaluate(fixed, tmp_path / "features").returncode == 0
    result = evaluate(fixed, tmp_path / "tiles", "--tiles", workspace / "tiles")
    assert result.returncode == 0, result.output
    stored, encoded = (read_predictions(tmp_path / name / "predictions.csv") for name in ("features", "tiles"))
    assert [each.slide_id for each in stored] == [each.slide_id for each in encoded]
    for a, b in zip(stored, encoded, strict=True):
        assert b.logits["FGFR3"] == pytest.approx(a.logits["FGFR3"], abs=1e-5)
    assert json.loads((tmp_path / "tiles" / "evaluation.json").read_text())["from"] == "tiles"


def test_features_of_other_weights_are_rejected(fixed, tmp_path):
    copied = copy_without_predictions(fixed, tmp_path / "run")
    environment = json.loads((copied / "environment.json").read_text())
    environment[0]["weights_sha256"] = "0" * 64
    (copied / "environment.json").write_text(json.dumps(environment))
    result = evaluate(copied, tmp_path / "features")
    assert result.returncode == 2
    assert "different weights" in result.output
    result = evaluate(copied, tmp_path / "tiles", "--tiles", tmp_path)
    assert result.returncode == 2
    tiles = RunFolder(copied).read_settings()["tiles"]["folder"]
    result = evaluate(copied, tmp_path / "encoded", "--tiles", tiles)
    assert result.returncode == 2
    assert "0" * 64 in result.output, "the SHA-256 of the weights in training"


@pytest.mark.parametrize("other", ["size", "encoder"])
def test_features_of_another_size_or_encoder_are_rejected(fixed, workspace, tmp_path, other):
    shutil.copytree(workspace / "features", tmp_path / "features")
    for path in (tmp_path / "features").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            if other == "size":
                values, attributes = file["features"][:, :64], dict(file["features"].attrs)
                del file["features"]
                file.create_dataset("features", data=values).attrs.update(attributes)
            else:
                file["features"].attrs["encoder"] = "uni"
    arguments = ("--cohort", workspace / "cohort.csv", "--split", "test", "--allow-overlap")
    result = evaluate(fixed, tmp_path / "out", *arguments, "--features", tmp_path / "features")
    assert result.returncode == 2
    output = " ".join(result.output.split())
    assert re.search(r"case-\d\d\.h5 ", output)
    if other == "size":
        assert "features of size 64, but the model needs 128" in output
    else:
        assert "was created with uni, but the model needs features of tapfm-pocket" in output
    assert "tapfm embed COHORT.csv --tiles DIR --encoder tapfm-pocket" in output


def test_baseline_without_slides_uses_the_number_of_tiles(workspace_copy):
    text = (workspace_copy / "run.toml").read_text().replace('folder = "tiles"\n', "")
    (workspace_copy / "run.toml").write_text(text)
    assert run_train(workspace_copy, "--set", "adaptation.method=fixed").returncode == 0
    assert evaluate(workspace_copy / "run", workspace_copy / "evaluation").returncode == 0
    assert "only the number of tiles" in read_metrics(workspace_copy / "evaluation")["baseline"]
    assert not (workspace_copy / "evaluation" / "colours.csv").exists()


# colours


def test_colours_are_read_once_and_reused(run, tmp_path, monkeypatch):
    shared = tmp_path / "colours.csv"
    assert evaluate(run, tmp_path / "a", "--colours", shared).returncode == 0
    assert len(read_rows(shared)) == 10
    with monkeypatch.context() as patch:
        patch.setattr(slide_colours, "TileStream", None)
        assert evaluate(run, tmp_path / "b", "--colours", shared).returncode == 0
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


@pytest.mark.parametrize("kept", ["S", '"S', "slide,1", "all but the last digit", "all but the line break", "header"])
def test_truncated_colour_table_is_completed(run, tmp_path, kept):
    shared = tmp_path / "colours.csv"
    assert evaluate(run, tmp_path / "a", "--colours", shared).returncode == 0
    text = shared.read_text()
    before = load_or_create_colour_table(shared)
    assert len(before) == 10
    *rows, last = text.splitlines()
    last = {"all but the last digit": last[:-1], "all but the line break": last}.get(kept, kept)
    shared.write_text(rows[0] if kept == "header" else "\n".join([*rows, last]))
    for folder in ("b", "c"):  # the second evaluation reads the completed table
        assert evaluate(run, tmp_path / folder, "--colours", shared).returncode == 0
        assert load_or_create_colour_table(shared) == before
        assert (tmp_path / folder / "metrics.csv").read_bytes() == (tmp_path / "a" / "metrics.csv").read_bytes()


def test_other_files_are_rejected_as_colour_table(run, tmp_path):
    result = evaluate(run, tmp_path / "a", "--colours", run / "split.csv")
    assert result.returncode == 2
    assert "is not a table of colour statistics" in result.output
    result = evaluate(run, tmp_path / "b", "--colours", run / "split.csv" / "colours.csv")
    assert result.returncode == 2
    assert "cannot be written" in result.output
    assert not (tmp_path / "b" / ".predictions-1.jsonl").exists(), "rejected before slides are read"


# from Python


def test_python_api(run, evaluated, tmp_path):
    evaluation = tapfm_package.evaluate(
        run, out=tmp_path / "python", by=["split"], resamples=50, workers=0, device="cpu"
    )
    assert read_files(evaluation.folder) == read_files(evaluated)
    assert evaluation.auc["FGFR3"].value == read_metrics(evaluated)["models"]["model"]["all"]["FGFR3"]["auc"]["value"]
    assert evaluation.failed == {}
