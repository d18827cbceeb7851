"""`tapfm evaluate` on a run's own cohort."""

import csv
import json
import re
import shutil
import signal

import pytest
from cohort_files import rows_of
from command_line import tapfm
from PIL import Image
from training_lab import edit, slide_id, train_in

import tapfm as tapfm_package
from tapfm.baselines import slide_colours
from tapfm.evaluation.metric_values import choose_thresholds
from tapfm.evaluation.predictions import compute_scores, read_predictions
from tapfm.runs.folder import RunFolder
from tapfm.runtime.files import file_sha256
from tapfm.tasks.catalog import target_kinds
from tapfm.workflows import evaluation_run as evaluate_model

FEW = ("--resamples", 50, "--workers", 0, "--device", "cpu")


def evaluate(run, out, *options):
    return tapfm("evaluate", run, "--out", out, *FEW, *options)


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def run(train):
    return train("evaluated")


@pytest.fixture(scope="module")
def evaluated(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "test"
    result = evaluate(run, folder, "--by", "split")
    assert result.returncode == 0, result.said
    return folder


def without_its_predictions(run, folder):
    """Copy a run, and make it forget what it predicted."""
    shutil.copytree(run, folder)
    for path in folder.glob(".predictions-*"):
        path.unlink()
    return folder


def test_the_folder_explains_itself(run, evaluated):
    assert files_of(evaluated).keys() == {
        *("predictions.csv", "predictions-baseline.csv", "metrics.json", "metrics.csv", "metrics.md"),
        *("failures.csv", "colours.csv", "roc.png", "pr.png", "reliability.png", "scores.png", "evaluation.json"),
    }
    about = json.loads((evaluated / "evaluation.json").read_text())
    best = RunFolder(run).best
    assert about["members"] == [{"run": RunFolder(run).identity(), "weights_sha256": file_sha256(best)}]
    assert (about["cohort"], about["split"], about["unit"]) == ("own", "test", "slide")
    for name in ("roc", "pr", "reliability", "scores"):
        with Image.open(evaluated / f"{name}.png") as picture:
            assert picture.width > 500


def test_figures_are_those_of_the_predictions(run, evaluated):
    predictions = read_predictions(evaluated / "predictions.csv")
    assert predictions == read_predictions(run / "predictions-test.csv")
    found = metrics_of(evaluated)["models"]["model"]["all"]["FGFR3"]["auc"]
    assert found["value"] == compute_scores(predictions, target_kinds(["FGFR3"]), "slide").auc["FGFR3"]
    assert (found["units"], found["positives"]) == (4, 2)
    assert f"{found['value']:.3f}" in (evaluated / "metrics.md").read_text()


def test_the_table_is_tidy(evaluated):
    rows = rows_of(evaluated / "metrics.csv")
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


def test_thresholds_are_those_of_validation(run, evaluated):
    chosen = choose_thresholds(read_predictions(run / "predictions-val.csv"), target_kinds(["FGFR3"]), "slide", 0.9)
    written = metrics_of(evaluated)["thresholds"]
    assert written["youden"] == chosen.youden
    assert written["at_sensitivity"] == chosen.at_sensitivity
    assert "2 validation slides of the run" in written["chosen_on"]


def test_slides_that_training_predicted_come_out_the_same_when_read_again(run, evaluated, tmp_path):
    again = without_its_predictions(run, tmp_path / "run")
    assert evaluate(again, tmp_path / "evaluation").returncode == 0
    assert (tmp_path / "evaluation" / "predictions.csv").read_bytes() == (evaluated / "predictions.csv").read_bytes()


def test_predictions_of_other_weights_are_not_taken(run, tmp_path):
    other = without_its_predictions(run, tmp_path / "run")
    text = (run / ".predictions-test.jsonl").read_text().replace('["', '["0')
    (other / ".predictions-test.jsonl").write_text(text)
    (other / "predictions-test.csv").unlink()
    assert evaluate(other, tmp_path / "evaluation").returncode == 0
    assert read_predictions(tmp_path / "evaluation" / "predictions.csv") == read_predictions(
        run / "predictions-test.csv"
    )


def test_the_same_evaluation_gives_the_same_files(run, evaluated, tmp_path):
    assert evaluate(run, tmp_path / "again", "--by", "split").returncode == 0
    assert files_of(tmp_path / "again") == files_of(evaluated)


def test_patients_are_counted_once_when_asked(run, tmp_path):
    assert evaluate(run, tmp_path / "patients", "--unit", "patient").returncode == 0
    assert metrics_of(tmp_path / "patients")["models"]["model"]["all"]["FGFR3"]["auc"]["units"] == 3


@pytest.mark.parametrize(("split", "slides"), [("val", 2), ("train", 4), ("all", 10)])
def test_slides_that_are_not_held_out_are_said_to_be_so(run, tmp_path, split, slides):
    result = evaluate(run, tmp_path / split, "--split", split)
    assert result.returncode == 0, result.said
    assert "NOT HELD OUT" in result.said
    assert "**NOT HELD OUT" in (tmp_path / split / "metrics.md").read_text()
    assert metrics_of(tmp_path / split)["slides"] == slides


def test_the_page_says_where_thresholds_come_from(evaluated):
    page = (evaluated / "metrics.md").read_text()
    assert re.search(r"^Thresholds were chosen on \d+ validation slides of the run", page, re.MULTILINE)


def test_held_out_slides_are_not(evaluated):
    assert "HELD OUT" not in (evaluated / "metrics.md").read_text()


def test_one_class_gives_empty_figures_that_say_why(own_lab):
    edit(own_lab / "cohort.csv", lambda rows: [row.update(FGFR3="0") for row in rows if row["split"] == "test"])
    assert train_in(own_lab).returncode == 0
    result = evaluate(own_lab / "run", own_lab / "evaluation")
    assert result.returncode == 0, result.said
    assert "no positive slide among 4" in result.said
    rows = rows_of(own_lab / "evaluation" / "metrics.csv")
    (auc,) = [row for row in rows if (row["model"], row["metric"]) == ("model", "auc")]
    assert (auc["value"], auc["reason"].startswith("no positive slide among 4")) == ("", True)
    assert "no positive slide among 4" in (own_lab / "evaluation" / "metrics.md").read_text()


@pytest.fixture
def own_run(run, lab, own_lab):
    """A run in a lab of its own, that forgets what it predicted."""
    copied = without_its_predictions(run, own_lab / "run")
    text = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(text.replace(str(lab), str(own_lab)))
    return own_lab


def test_a_changed_cohort_is_refused_with_the_difference(own_run):
    edit(own_run / "cohort.csv", lambda rows: rows[6].update(FGFR3="1"))
    result = evaluate(own_run / "run", own_run / "evaluation")
    assert result.returncode == 2
    assert "case-06: FGFR3 was '0', is '1'" in result.said


def test_a_training_slide_moved_to_test_is_refused(own_run):
    edit(own_run / "cohort.csv", lambda rows: rows[0].update(split="test"))
    result = evaluate(own_run / "run", own_run / "evaluation")
    assert result.returncode == 2
    assert "case-00: was in train, is in test" in result.said


def test_a_new_test_slide_of_a_training_patient_is_refused(own_run):
    def add(rows):
        rows[0]["split"] = ""  # or the table itself would be refused
        rows.append(rows[9] | {"slide_id": "case-10", "patient_id": "Doe0"})

    edit(own_run / "cohort.csv", add)
    shutil.copy(own_run / "tiles/patches/case-09_patches.h5", own_run / "tiles/patches/case-10_patches.h5")
    result = evaluate(own_run / "run", own_run / "evaluation")
    assert result.returncode == 2
    assert "Doe0 (train)" in result.said


def test_a_slide_that_cannot_be_read_is_left_out_told_and_evaluated_when_mended(own_run):
    out = own_run / "evaluation"
    whole = (own_run / "9.svs").read_bytes()
    (own_run / "9.svs").write_bytes(b"no slide")
    result = evaluate(own_run / "run", out)
    assert result.returncode == 3
    (row,) = rows_of(out / "failures.csv")
    assert (row["slide_id"], row["problem"]) == ("case-09", "failed")
    assert [each.slide_id for each in read_predictions(out / "predictions.csv")] == [slide_id(i) for i in (6, 7, 8)]
    assert "case-09" in (out / "metrics.md").read_text()
    assert evaluate(own_run / "run", out, "--resume", "--allow-failures", 1).returncode == 0
    (own_run / "9.svs").write_bytes(whole)
    assert evaluate(own_run / "run", out, "--resume").returncode == 0
    assert read_predictions(out / "predictions.csv") == read_predictions(own_run / "run" / "predictions-test.csv")


def test_a_slide_without_tiles_costs_that_slide(own_run):
    (own_run / "tiles" / "patches" / "case-08_patches.h5").unlink()
    result = evaluate(own_run / "run", own_run / "evaluation")
    assert result.returncode == 3
    assert "There is no file of its tiles" in (own_run / "evaluation" / "failures.csv").read_text()


def test_no_slide_at_all_is_an_error(own_run):
    for number in range(10):
        (own_run / f"{number}.svs").unlink()
    result = evaluate(own_run / "run", own_run / "evaluation")
    assert result.returncode == 2
    assert "--slides FOLDER" in result.said
    assert not (own_run / "evaluation").exists()


def test_an_evaluation_that_was_stopped_goes_on(own_run, monkeypatch):
    out, asked = own_run / "evaluation", iter([None, signal.SIGINT])
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_model.StopSignalHandler, "signal_number", lambda _: next(asked))
        assert evaluate(own_run / "run", out).returncode == 130
    assert not (out / "metrics.json").exists()
    assert not (out / "predictions.csv").exists()
    assert len((out / ".predictions-1.jsonl").read_text().split()) > 0
    result = evaluate(own_run / "run", out)
    assert result.returncode == 2
    assert "unfinished evaluation" in result.said
    assert evaluate(own_run / "run", out, "--resume").returncode == 0
    assert read_predictions(out / "predictions.csv") == read_predictions(own_run / "run" / "predictions-test.csv")


def test_an_evaluation_is_not_written_over(run, evaluated, train):
    result = evaluate(run, evaluated)
    assert result.returncode == 2
    assert "holds an evaluation of" in result.said
    result = evaluate(train("other", "seed=1"), evaluated, "--resume")
    assert result.returncode == 2
    assert f"model was {run} (weights" in result.said


def test_other_files_are_not_mixed_with_it(run, tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = evaluate(run, tmp_path)
    assert result.returncode == 2
    assert "thesis.tex" in result.said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--unit", "tile"), "--unit must be slide or patient"),
        (("--sensitivity", 0), "--sensitivity must be above 0"),
        (("--resamples", 0), "--resamples"),
        (("--split", "tset"), "'tset' is no split"),
        (("--by", "scaner"), "no column named 'scaner'"),
        (("--features", "features"), "adapted encoder"),
        (("--device", "abacus"), "not a device"),
    ],
)
def test_what_cannot_be_is_refused(run, tmp_path, options, said):
    copied = without_its_predictions(run, tmp_path / "run")
    result = evaluate(copied, tmp_path / "evaluation", *options)
    assert result.returncode == 2, result.said
    assert said in result.said
    assert "Traceback" not in result.said


def test_a_folder_that_is_no_model_says_what_one_is(tmp_path):
    result = evaluate(tmp_path, tmp_path / "evaluation")
    assert result.returncode == 2
    assert "no config.toml, no tapfm.json, no ensemble.json" in result.said


def test_a_run_that_has_not_finished_an_epoch_is_sent_back(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "best.safetensors").unlink()
    result = evaluate(tmp_path / "run", tmp_path / "evaluation")
    assert result.returncode == 2
    assert "--resume" in result.said


def test_a_run_that_is_not_finished_is_said_to_be_so(run, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_model, "is_finished", lambda _: False)
    result = evaluate(run, tmp_path / "evaluation")
    assert result.returncode == 0, result.said
    assert "is not finished: this is the best of its epochs so far" in result.said
    assert "is not finished" in (tmp_path / "evaluation" / "metrics.md").read_text()


def test_a_fold_is_evaluated_on_its_own_test_slides(own_lab):
    def folds(rows):
        for row in rows:
            row["fold_0"] = {"train": "test", "test": "train"}.get(row["split"], row["split"])

    edit(own_lab / "cohort.csv", folds)
    assert train_in(own_lab, "--set", "cohort.fold=0").returncode == 0
    assert evaluate(own_lab / "run", own_lab / "evaluation").returncode == 0
    predictions = read_predictions(own_lab / "evaluation" / "predictions.csv")
    assert [each.slide_id for each in predictions] == [slide_id(i) for i in range(4)]


def test_without_validation_slides_no_threshold_is_made_up(own_lab):
    edit(own_lab / "cohort.csv", lambda rows: [row.update(split="") for row in rows if row["split"] == "val"])
    assert train_in(own_lab).returncode == 0
    assert evaluate(own_lab / "run", own_lab / "evaluation").returncode == 0
    rows = rows_of(own_lab / "evaluation" / "metrics.csv")
    (f1,) = [row for row in rows if (row["model"], row["metric"]) == ("model", "f1")]
    assert (f1["value"], "no threshold" in f1["reason"]) == ("", True)
    assert "No threshold was chosen" in (own_lab / "evaluation" / "metrics.md").read_text()


# a fixed encoder


@pytest.fixture(scope="module")
def fixed(train):
    return train("fixed", "adaptation.method=fixed")


def test_tiles_encoded_on_the_fly_give_what_stored_features_give(fixed, lab, tmp_path):
    assert evaluate(fixed, tmp_path / "features").returncode == 0
    result = evaluate(fixed, tmp_path / "tiles", "--tiles", lab / "tiles")
    assert result.returncode == 0, result.said
    stored, encoded = (read_predictions(tmp_path / name / "predictions.csv") for name in ("features", "tiles"))
    assert [each.slide_id for each in stored] == [each.slide_id for each in encoded]
    for a, b in zip(stored, encoded, strict=True):
        assert b.logits["FGFR3"] == pytest.approx(a.logits["FGFR3"], abs=1e-5)
    assert json.loads((tmp_path / "tiles" / "evaluation.json").read_text())["from"] == "tiles"


def test_features_of_other_weights_are_refused(fixed, tmp_path):
    copied = without_its_predictions(fixed, tmp_path / "run")
    environment = json.loads((copied / "environment.json").read_text())
    environment[0]["weights_sha256"] = "0" * 64
    (copied / "environment.json").write_text(json.dumps(environment))
    result = evaluate(copied, tmp_path / "features")
    assert result.returncode == 2
    assert "other weights" in result.said
    result = evaluate(copied, tmp_path / "tiles", "--tiles", tmp_path)
    assert result.returncode == 2
    tiles = RunFolder(copied).settings()["tiles"]["folder"]
    result = evaluate(copied, tmp_path / "encoded", "--tiles", tiles)
    assert result.returncode == 2
    assert "features of other weights" in result.said


def test_without_pixels_the_baseline_knows_the_number_of_tiles_alone(own_lab):
    text = (own_lab / "run.toml").read_text().replace('folder = "tiles"\n', "")
    (own_lab / "run.toml").write_text(text)
    assert train_in(own_lab, "--set", "adaptation.method=fixed").returncode == 0
    assert evaluate(own_lab / "run", own_lab / "evaluation").returncode == 0
    assert "the number of tiles alone" in metrics_of(own_lab / "evaluation")["baseline"]
    assert not (own_lab / "evaluation" / "colours.csv").exists()


# colours


def test_colours_are_read_once_and_shared(run, tmp_path, monkeypatch):
    shared = tmp_path / "colours.csv"
    assert evaluate(run, tmp_path / "a", "--colours", shared).returncode == 0
    assert len(rows_of(shared)) == 10
    with monkeypatch.context() as patch:
        patch.setattr(slide_colours, "TileStream", None)
        assert evaluate(run, tmp_path / "b", "--colours", shared).returncode == 0
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


def test_a_table_of_colours_that_was_cut_off_is_mended(run, tmp_path):
    shared = tmp_path / "colours.csv"
    assert evaluate(run, tmp_path / "a", "--colours", shared).returncode == 0
    before = {row["slide_id"]: row for row in rows_of(shared)}
    shared.write_text(shared.read_text()[:-30])
    assert evaluate(run, tmp_path / "b", "--colours", shared).returncode == 0
    with shared.open(newline="") as file:
        whole = {row["slide_id"]: row for row in csv.DictReader(file) if row["blue_percentile_95"]}
    assert whole == before


def test_another_file_is_not_taken_for_colours(run, tmp_path):
    result = evaluate(run, tmp_path / "a", "--colours", run / "split.csv")
    assert result.returncode == 2
    assert "no table of colours" in result.said
    result = evaluate(run, tmp_path / "b", "--colours", run / "split.csv" / "colours.csv")
    assert result.returncode == 2
    assert "cannot be written" in result.said
    assert not (tmp_path / "b" / ".predictions-1.jsonl").exists(), "before slides are read"


# from Python


def test_the_same_from_python(run, evaluated, tmp_path):
    evaluation = tapfm_package.evaluate(
        run, out=tmp_path / "python", by=["split"], resamples=50, workers=0, device="cpu"
    )
    assert files_of(evaluation.folder) == files_of(evaluated)
    assert evaluation.auc["FGFR3"].value == metrics_of(evaluated)["models"]["model"]["all"]["FGFR3"]["auc"]["value"]
    assert evaluation.failed == {}
