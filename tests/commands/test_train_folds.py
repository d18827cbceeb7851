"""`tapfm train --folds`: cross-validation in one command."""

import gc
import json
import os
import re
import shlex
import shutil
import signal
import tomllib
from pathlib import Path
from statistics import fmean

import pytest
from cohort_files import read_rows
from command_line import tapfm
from training_workspace import case_id, edit_csv, have_same_weights

import tapfm as tapfm_package
from tapfm.adaptation.display import TrainingDisplay
from tapfm.adaptation.learner import Learner
from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import fold_names
from tapfm.config.loading import load_config
from tapfm.evaluation.predictions import compute_scores, read_predictions
from tapfm.runs.model_folder import open_model_folder
from tapfm.tasks.catalog import target_kinds
from tapfm.workflows import cross_validation

FIXED = ("--set", "adaptation.method=fixed", "--set", "schedule.epochs=1")
FOLDS = ("fold_0", "fold_1", "fold_2")


def cross_validate(folder, *options, out="runs/cv", folds=3):
    return tapfm("train", folder / "run.toml", "--folds", folds, "--out", folder / out, *FIXED, *options)


def read_metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def read_auc(folder, target="FGFR3", model="model"):
    return read_metrics(folder)["models"][model]["all"][target]["auc"]


def write_fold_columns(table, parts, test_parts=(0, 1, 2)):
    """Write fold columns: fold i tests the slides of part test_parts[i], and validates on the next part."""

    def change(rows):
        for row, part in zip(rows, parts, strict=True):
            for fold, test_part in enumerate(test_parts):
                split = {test_part: "test", (test_part + 1) % 3: "val"}.get(part, "train") if part is not None else ""
                row[f"fold_{fold}"] = split if part != "train" else "train"
            del row["split"]

    edit_csv(table, change)


@pytest.fixture(scope="module")
def finished(workspace):
    """A cross-validation whose folds tapfm created, and its output."""
    result = cross_validate(workspace)
    assert result.returncode == 0, result.output
    return workspace / "runs" / "cv", result


@pytest.fixture
def finished_copy(finished, workspace_copy):
    """A copy of the workspace and of the cross-validation, whose files a test may change."""
    shutil.copytree(finished[0], workspace_copy / "runs" / "cv")
    return workspace_copy


def test_folds_are_created_by_patient_and_each_is_an_ordinary_run(finished, workspace):
    folder, result = finished
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        *("cross-validation.json", "run.toml", "folds.csv", "fold-0", "fold-1", "fold-2", "ensemble.json"),
        *("predictions.csv", "predictions-baseline.csv", "metrics.json", "metrics.csv", "metrics.md", "colours.csv"),
        *("failures.csv", "roc.png", "pr.png", "reliability.png", "scores.png", "evaluation.json"),
    }
    rows = read_rows(folder / "folds.csv")
    assert [name for name in rows[0] if name.startswith("fold_") or name == "split"] == list(FOLDS)
    by_patient = {row["patient_id"]: [row[fold] for fold in FOLDS] for row in rows}
    assert all(by_patient[row["patient_id"]] == [row[fold] for fold in FOLDS] for row in rows)
    assert all(splits.count("test") == splits.count("val") == 1 for splits in by_patient.values())
    assert "The column split of " in result.stderr
    assert f"Created 3 folds by patient with seed 0, stratified by FGFR3: {folder / 'folds.csv'}" in result.stderr
    for number in range(3):
        config = load_config(folder / f"fold-{number}" / "config.toml")
        assert (config.cohort.fold, config.seed) == (number, 0)
        assert f"Fold {number + 1} of 3: {folder / f'fold-{number}'}" in result.stderr
        assert f"fold {number + 1} of 3, epoch 1/1: " in result.stderr
    exported = tapfm("export", folder / "fold-1", "--out", workspace / "exported-fold")
    assert exported.returncode == 0, exported.output


def test_each_patient_is_predicted_once_by_the_model_that_has_not_seen_the_patient(finished):
    folder, _ = finished
    pooled = {each.slide_id: each for each in read_predictions(folder / "predictions.csv")}
    assert sorted(pooled) == [case_id(number) for number in range(10)]
    found = []
    for number in range(3):
        run = folder / f"fold-{number}"
        seen = {row["patient_id"] for row in read_rows(run / "split.csv") if row["split"] != "test"}
        for each in read_predictions(run / "predictions-test.csv"):
            assert pooled[each.slide_id] == each
            assert each.patient_id not in seen
            found.append(each.slide_id)
    assert sorted(found) == sorted(pooled)


def test_metrics_of_each_fold_and_of_the_pooled_predictions_are_shown(finished):
    folder, result = finished
    pooled, kinds = read_predictions(folder / "predictions.csv"), target_kinds(["FGFR3"])
    found = read_auc(folder)
    assert found["value"] == compute_scores(pooled, kinds, "slide").auc["FGFR3"]
    assert (found["units"], found["positives"]) == (10, 6)
    assert found["low"] < found["value"] < found["high"]
    by_fold = {}
    for line in result.stdout.splitlines():
        name, *values = re.split(r"  +", line.strip())
        by_fold[name] = values
    aucs = [read_auc(folder / f"fold-{number}" / "evaluation")["value"] for number in range(3)]
    for number, auc in enumerate(aucs):
        run = folder / f"fold-{number}"
        assert auc == compute_scores(read_predictions(run / "predictions-test.csv"), kinds, "slide").auc["FGFR3"]
        assert by_fold[run.name][2].startswith(f"{auc:.3f}")
    assert by_fold["mean of the folds"][0] == f"{fmean(aucs):.3f}"
    assert by_fold["out-of-fold, pooled"][:2] == ["10", "6"]
    assert by_fold["out-of-fold, pooled"][2] == f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    text = (folder / "metrics.md").read_text()
    for note in ("scores of different models", "used this patient neither for training nor for validation"):
        assert note in text
    assert "scores of different models" in result.stderr
    about = read_metrics(folder)["evaluation"]
    assert (about["kind"], about["split"], about["cohort"]) == ("ensemble of folds", "out-of-fold", "own")
    assert len(about["members"]) == 3


def test_baseline_is_that_of_the_folds(finished):
    folder, _ = finished
    pooled = {each.slide_id: each for each in read_predictions(folder / "predictions-baseline.csv")}
    for number in range(3):
        for each in read_predictions(folder / f"fold-{number}" / "evaluation" / "predictions-baseline.csv"):
            assert pooled.pop(each.slide_id) == each
    assert not pooled
    baseline = read_auc(folder, model="colour baseline")["value"]
    difference = read_metrics(folder)["model_minus_baseline"]["FGFR3"]["value"]
    assert difference == pytest.approx(read_auc(folder)["value"] - baseline)


def test_folder_is_an_ensemble_for_other_cohorts(finished, workspace, tmp_path):
    folder, _ = finished
    assert [member.folder.name for member in open_model_folder(folder).members] == ["fold-0", "fold-1", "fold-2"]
    external = shutil.copy(workspace / "cohort.csv", workspace / "external.csv")
    edit_csv(external, lambda rows: [row.update(patient_id=f"other-{row['patient_id']}") for row in rows])
    options = ("--features", workspace / "features", "--resamples", 50)
    result = tapfm("evaluate", folder, "--cohort", external, *options, "--out", tmp_path / "external")
    assert result.returncode == 0, result.output
    assert read_metrics(tmp_path / "external")["evaluation"]["kind"] == "ensemble of folds"
    edit_csv(external, lambda rows: rows.__delitem__(slice(1, None)))
    predict = ("predict", "--model", folder, external, "--tiles", workspace / "tiles", "--out", tmp_path / "predicted")
    predicted = tapfm(*predict, "--device", "cpu", "--workers", 0)
    assert predicted.returncode == 0, predicted.output
    assert "ensemble of folds" in predicted.stderr
    own = tapfm("evaluate", folder, "--out", tmp_path / "own")
    assert own.returncode == 2
    assert str(folder / "metrics.md") in own.stderr


def test_report_and_comparison_use_the_out_of_fold_results(finished, tmp_path):
    folder, _ = finished
    result = tapfm("report", folder, "--out", tmp_path / "report.html")
    assert result.returncode == 0, result.output
    html = (tmp_path / "report.html").read_text()
    assert re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', html)[0] == "Cross-validation"
    assert "not of a reported run" not in html
    headline = re.search(r"<table.*?</table>", html, re.DOTALL)[0]
    assert "out-of-fold" in headline
    assert f"{read_auc(folder)['value']:.3f}" in headline
    assert "fold-0" not in headline
    assert all(f">{name}<" in html for name in ("fold-0", "fold-1", "fold-2", "mean of the folds"))
    compared = tapfm("compare", folder, f"again={folder}", "--out", tmp_path / "comparison", "--resamples", 50)
    assert compared.returncode == 0, compared.output
    assert "NOT HELD OUT" not in compared.output
    assert "Compared on 9 patients" in compared.stderr
    refused = tapfm("report", folder, folder / "fold-0", "--out", tmp_path / "both.html")
    assert (refused.returncode, "cannot be combined" in refused.stderr) == (2, True)
    assert tapfm("export", folder, "--out", tmp_path / "exported").returncode == 2


def test_predictions_and_evaluations_of_the_ensemble_are_in_its_report(finished_copy, tmp_path):
    folder = finished_copy / "runs" / "cv"
    edit_csv(finished_copy / "cohort.csv", lambda rows: [row.update(patient_id=row["slide_id"]) for row in rows])
    evaluated = tapfm(
        *("evaluate", folder, "--cohort", finished_copy / "cohort.csv", "--features", finished_copy / "features"),
        *("--resamples", 50, "--out", finished_copy / "evaluations" / "external"),
    )
    assert evaluated.returncode == 0, evaluated.output
    result = tapfm("report", folder, "--out", tmp_path / "report.html")
    assert result.returncode == 0, result.output
    assert f"evaluation {finished_copy / 'evaluations' / 'external'}" in result.stdout
    html = (tmp_path / "report.html").read_text()
    assert "not of a reported run" not in html
    headline = re.search(r"<table.*?</table>", html, re.DOTALL)[0]
    assert [name in headline for name in ("out-of-fold", "cohort.csv")] == [True, True]


@pytest.fixture(scope="module")
def from_python(workspace):
    """The result of the Python function, and the number of learners in memory before the training of each fold."""
    learners, run_training = [], cross_validation.run_training

    def count_learners(*arguments, **options):
        learners.append(sum(type(each) is Learner for each in gc.get_objects()))
        return run_training(*arguments, **options)

    changes = {"adaptation": {"method": "fixed"}, "selection": {"unit": "patient"}, "seed": 5}
    config = tapfm_package.configure(workspace / "run.toml", **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_validation, "run_training", count_learners)
        return tapfm_package.train(config, folds=3, out=workspace / "runs" / "python"), learners


def test_python_function_returns_folds_and_pooled_metrics(from_python):
    result, _ = from_python
    assert [each.folder.name for each in result.folds] == ["fold-0", "fold-1", "fold-2"]
    pooled = read_predictions(result.folder / "predictions.csv")
    assert result.auc["FGFR3"].value == compute_scores(pooled, target_kinds(["FGFR3"]), "patient").auc["FGFR3"]
    assert sum(each.evaluation.results.patient_count for each in result.folds) == 9
    assert (result.failed, result.allowed_failures) == ({}, 0)
    assert result.evaluation.results.about["unit"] == "patient"


def test_all_folds_use_the_seed_of_the_configuration(from_python, finished):
    result, _ = from_python
    configs = [tomllib.loads((each.folder / "config.toml").read_text()) for each in result.folds]
    assert {config["seed"] for config in configs} == {5}
    assert read_rows(result.folder / "folds.csv") != read_rows(finished[0] / "folds.csv")


def test_models_are_freed_between_folds(from_python):
    _, learners = from_python
    assert learners == [learners[0]] * 3


def test_several_targets_have_one_group_of_rows_each(workspace):
    result = cross_validate(workspace, "--resume", "--set", 'task.targets=["FGFR3", "TP53"]', out="runs/two")
    assert result.returncode == 0, result.output
    names = [re.split(r"  +", line.strip())[0] for line in result.stdout.splitlines()[1:]]
    rows = ["fold-0", "fold-1", "fold-2", "mean of the folds", "out-of-fold, pooled"]
    assert names == ["FGFR3", *rows, "TP53", *rows, "mean of targets", *rows]
    assert read_auc(workspace / "runs" / "two", "TP53")["units"] == 8


# Folds of the cohort table


def test_folds_of_the_table_are_used(workspace_copy):
    write_fold_columns(workspace_copy / "cohort.csv", ["train", "train", 0, 0, 1, 1, 2, 2, 0, 0])
    text = (workspace_copy / "run.toml").read_text()
    (workspace_copy / "run.toml").write_text(text.replace("[cohort]", "[cohort]\nfold = 1"))
    result = cross_validate(workspace_copy)
    assert result.returncode == 0, result.output
    folder = workspace_copy / "runs" / "cv"
    assert f"Folds: the columns fold_0, fold_1, fold_2 of {workspace_copy / 'cohort.csv'}" in result.stderr
    assert "cohort.fold = 1 is not used" in result.stderr
    assert not (folder / "folds.csv").exists()
    tested = {row["slide_id"] for row in read_rows(folder / "fold-0" / "split.csv") if row["split"] == "test"}
    assert tested == {case_id(number) for number in (2, 3, 8, 9)}
    assert "2 patients in no test split" in result.stderr
    assert len(read_predictions(folder / "predictions.csv")) == 8


def test_another_number_of_folds_in_the_table_is_an_error_with_a_command_that_works(workspace_copy):
    write_fold_columns(workspace_copy / "cohort.csv", [0, 0, 1, 1, 2, 2, 0, 1, 2, 2])
    result = cross_validate(workspace_copy, folds=4)
    assert result.returncode == 2
    assert "has 3 folds (fold_0, fold_1, fold_2), but --folds is 4" in result.stderr
    assert "--folds 3" in result.stderr
    table, command = re.search(
        r"new folds \(--set cohort.table=(.*?)\), created by: tapfm (.*)", result.stderr
    ).groups()
    assert tapfm(*shlex.split(command)).returncode == 0
    assert fold_names(read_cohort(Path(table))) == [*FOLDS, "fold_3"]


def test_patient_in_two_test_splits_is_an_error(workspace_copy):
    write_fold_columns(workspace_copy / "cohort.csv", [0, 0, 1, 1, 2, 2, 0, 1, 2, 2], test_parts=(0, 1, 0))
    result = cross_validate(workspace_copy)
    assert result.returncode == 2
    assert "3 patients" in result.stderr
    assert "Doe0 (fold_0 and fold_2)" in result.stderr
    assert not list((workspace_copy / "runs" / "cv").glob("fold-*"))


def test_fold_without_test_slides_is_an_error_before_training(workspace_copy):
    def change(rows):
        write = {"train": ["train"] * 3, "val": ["val", "val", "val"], "test": ["test", "train", "train"]}
        for row in rows:
            row.update(zip(FOLDS, write[row["split"]], strict=True))

    edit_csv(workspace_copy / "cohort.csv", change)
    result = cross_validate(workspace_copy)
    assert result.returncode == 2
    assert "no labelled test slide in the column fold_1" in result.stderr
    assert not (workspace_copy / "runs" / "cv" / "fold-0").exists()


@pytest.mark.parametrize(
    ("options", "folds", "message"),
    [
        (("--set", "cohort.fold=1"), 3, "--folds and --set cohort.fold cannot be combined"),
        ((), 1, "--folds must be at least 2"),
        ((), 2, "must be from 3 to 20"),
        ((), 15, "9 patients are too few for 15 folds"),
    ],
)
def test_invalid_folds_are_an_error(workspace_copy, options, folds, message):
    result = cross_validate(workspace_copy, *options, folds=folds)
    assert result.returncode == 2
    assert message in result.stderr


# Resume


def test_interrupted_cross_validation_is_resumed_by_the_printed_command(finished, workspace_copy, monkeypatch):
    stopped = []
    on_slide_end = TrainingDisplay.on_slide_end

    def stop_in_second_fold(self, progress):
        on_slide_end(self, progress)
        if self._prefix.startswith("fold 2 of 3") and progress.step == 2 and not stopped:
            stopped.append(progress.step)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainingDisplay, "on_slide_end", stop_in_second_fold)
    result = cross_validate(workspace_copy)
    assert (result.returncode, stopped) == (130, [2])
    folder = workspace_copy / "runs" / "cv"
    (command,) = re.findall(r"To resume: tapfm (.*)", result.stderr)
    assert shlex.split(command) == ["train", str(folder / "run.toml"), "--folds", "3", "--out", str(folder), "--resume"]
    unfinished = tapfm("report", folder, "--out", workspace_copy / "report.html")
    assert (unfinished.returncode, "is not finished" in unfinished.stderr) == (2, True)
    assert not (folder / "fold-2").exists()
    first = (folder / "fold-0" / "checkpoints" / "last.safetensors").stat()
    resumed = tapfm(*shlex.split(command))
    assert resumed.returncode == 0, resumed.output
    assert "Fold 1 of 3 is already trained" in resumed.stderr
    assert "Resuming in epoch 1, after 2 of" in resumed.stderr
    assert (folder / "fold-0" / "checkpoints" / "last.safetensors").stat() == first
    for number in range(3):
        assert have_same_weights(folder / f"fold-{number}", finished[0] / f"fold-{number}")
    assert read_metrics(folder)["models"] == read_metrics(finished[0])["models"]


def test_signal_between_two_folds_stops_before_the_next(workspace_copy, monkeypatch):
    run_evaluation = cross_validation.run_evaluation

    def stop_afterwards(*arguments, **options):
        evaluation = run_evaluation(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluation

    monkeypatch.setattr(cross_validation, "run_evaluation", stop_afterwards)
    result = cross_validate(workspace_copy)
    assert result.returncode == 143
    assert "To resume: tapfm train " in result.stderr
    assert [path.name for path in (workspace_copy / "runs" / "cv").glob("fold-*")] == ["fold-0"]


def test_finished_cross_validation_is_not_overwritten_and_not_trained_again(finished_copy):
    folder = finished_copy / "runs" / "cv"
    before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    result = cross_validate(finished_copy)
    assert result.returncode == 2
    assert "already contains a finished cross-validation" in result.stderr
    (folder / "metrics.json").unlink()
    result = cross_validate(finished_copy, "--resume")
    assert result.returncode == 0, result.output
    assert result.stderr.count("is already trained") == 3
    assert "epoch" not in result.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*.safetensors")} == before
    assert (folder / "metrics.json").exists()


def test_resume_with_different_settings_is_refused(finished_copy):
    for options, folds, difference in (
        (("--set", "seed=3"), 3, "seed was 0 and is now 3"),
        (("--set", "schedule.epochs=5"), 3, "schedule.epochs was 1 and is now 5"),
        ((), 4, "--folds was 3 and is now 4"),
    ):
        result = cross_validate(finished_copy, "--resume", *options, folds=folds)
        assert (result.returncode, difference in result.stderr) == (2, True), result.stderr
    (command,) = re.findall(r"original settings: tapfm (.*)", result.stderr)
    assert tapfm(*shlex.split(command)).returncode == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[5].update(FGFR3="0"),
        lambda rows: rows.pop(5),
        lambda rows: rows[5].update(patient_id="Roe"),
    ],
)
def test_resume_with_a_changed_cohort_table_is_refused(finished_copy, change):
    edit_csv(finished_copy / "cohort.csv", change)
    result = cross_validate(finished_copy, "--resume")
    assert result.returncode == 2
    assert "have changed since the folds" in result.stderr
    assert "case-05" in result.stderr


def test_resume_with_changed_folds_is_refused_before_anything_is_trained(finished_copy):
    folder = finished_copy / "runs" / "cv"
    shutil.rmtree(folder / "fold-0")
    edit_csv(
        folder / "folds.csv", lambda rows: [row.update(fold_2=row["fold_1"], fold_1=row["fold_2"]) for row in rows]
    )
    result = cross_validate(finished_copy, "--resume")
    assert result.returncode == 2
    assert "split was " in result.stderr
    assert not (folder / "fold-0").exists()


def test_other_folders_are_refused(finished, workspace, train):
    run = train("ordinary", "adaptation.method=fixed")
    for out, folds in ((run, ("--folds", 3)), (finished[0], ()), (finished[0] / "fold-0", ("--folds", 3))):
        result = tapfm("train", workspace / "run.toml", "--out", out, *FIXED, *folds, "--resume")
        assert result.returncode == 2
        assert "cannot write to it" in result.stderr


# Failed slides and memory


def test_slides_without_features_are_allowed_across_folds(workspace_copy):
    (workspace_copy / "features" / f"{case_id(5)}.h5").unlink()
    result = cross_validate(workspace_copy)
    assert result.returncode == 2
    assert "--allow-failures 1" in result.stderr
    result = cross_validate(workspace_copy, "--allow-failures", 1)
    assert result.returncode == 0, result.output
    folder = workspace_copy / "runs" / "cv"
    assert [row["slide_id"] for row in read_rows(folder / "failures.csv")] == [case_id(5)]
    assert f"1 slide failed. Reasons: {folder / 'failures.csv'}" in result.stderr
    assert case_id(5) not in {each.slide_id for each in read_predictions(folder / "predictions.csv")}


def test_too_many_failed_slides_stop_the_command_that_resumes_every_fold(workspace_copy):
    (workspace_copy / "5.svs").write_bytes(b"not a slide")
    run = ("train", workspace_copy / "run.toml", "--folds", 3, "--out", workspace_copy / "cv")
    result = tapfm(*run)
    assert result.returncode == 3
    (command,) = re.findall(r"resume without them: tapfm (.*)", result.stderr)
    assert "--folds 3" in command
    assert command.endswith("--resume --allow-failures 1")
    resumed = tapfm(*shlex.split(command))
    assert resumed.returncode == 0, resumed.output
    assert {row["slide_id"] for row in read_rows(workspace_copy / "cv" / "failures.csv")} == {case_id(5)}
    assert len(read_predictions(workspace_copy / "cv" / "predictions.csv")) == 9
