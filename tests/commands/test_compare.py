"""Tests of `tapfm compare`."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from cohort_files import read_rows
from command_line import tapfm
from PIL import Image

import tapfm as tapfm_package
from tapfm.evaluation.predictions import Prediction, compute_scores, write_predictions
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds

FAST_OPTIONS = ("--resamples", 100)


def make_predictions(seed, *, skill=1.0, patients=range(40), targets=("FGFR3",), flip=()):
    """Return one prediction per patient. Labels depend only on the patient, logits also on the seed."""
    rng = np.random.default_rng(seed)
    found = []
    for number in patients:
        labels = {target: (number + index) % 2 for index, target in enumerate(targets)}
        logits = {target: skill * (2 * labels[target] - 1) + float(rng.normal()) for target in targets}
        labels = {target: 1 - label if number in flip else label for target, label in labels.items()}
        found.append(Prediction(f"s{number}", f"p{number}", "test", None, labels, logits, 10))
    return found


@pytest.fixture
def tables(tmp_path):
    """A folder with the predictions of a good and of a poor model."""
    write_predictions(tmp_path / "good.csv", make_predictions(0, skill=2.0))
    write_predictions(tmp_path / "poor.csv", make_predictions(1, skill=0.0))
    return tmp_path


def compare(folder, *arguments):
    return tapfm("compare", *arguments, "--out", folder / "comparison", *FAST_OPTIONS)


def read_comparison(folder):
    return json.loads((folder / "comparison" / "comparison.json").read_text())


def test_comparison_folder_contents(tables):
    result = compare(tables, tables / "good.csv", tables / "poor.csv")
    assert result.returncode == 0, result.output
    assert {path.name for path in (tables / "comparison").iterdir() if path.name[0] != "."} == {
        *("comparison.json", "comparison.csv", "comparison.md", "differences.png", "excluded.csv"),
    }
    found = read_comparison(tables)
    good = compute_scores(make_predictions(0, skill=2.0), target_kinds(["FGFR3"]), "slide").auc["FGFR3"]
    assert found["auc"]["good"]["FGFR3"]["value"] == good
    (pair,) = found["pairs"]
    assert pair["difference"]["value"] == pytest.approx(good - found["auc"]["poor"]["FGFR3"]["value"])
    assert pair["p_delong"] == pair["p_holm"] < 0.01
    (row,) = read_rows(tables / "comparison" / "comparison.csv")
    assert float(row["difference"]) == pair["difference"]["value"]
    assert "good - poor" in result.output
    assert f"{good:.3f}" in (tables / "comparison" / "comparison.md").read_text()
    with Image.open(tables / "comparison" / "differences.png") as image:
        assert image.width > 300


def test_comparison_is_reproducible(tables):
    arguments = (tables / "good.csv", tables / "poor.csv")
    compare(tables, *arguments)
    first = {path.name: path.read_bytes() for path in (tables / "comparison").iterdir()}
    assert compare(tables, *arguments).returncode == 0
    assert {path.name: path.read_bytes() for path in (tables / "comparison").iterdir()} == first


def test_names_and_option_against(tables):
    write_predictions(tables / "third.csv", make_predictions(2))
    sources = (f"ours={tables / 'good.csv'}", f"theirs={tables / 'poor.csv'}", tables / "third.csv")
    assert compare(tables, *sources).returncode == 0
    assert len(read_comparison(tables)["pairs"]) == 3
    assert compare(tables, *sources, "--against", "ours").returncode == 0
    found = read_comparison(tables)
    assert list(found["auc"]) == ["ours", "theirs", "third"]
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]] == [("theirs", "ours"), ("third", "ours")]
    for pair in found["pairs"]:
        assert pair["p_holm"] >= pair["p_delong"]


def test_patients_that_a_model_lacks_are_excluded_and_listed(tables):
    write_predictions(tables / "more.csv", make_predictions(3, patients=range(20, 60)))
    result = compare(tables, tables / "good.csv", tables / "more.csv")
    assert result.returncode == 0, result.output
    assert read_comparison(tables)["patients"] == 20
    listed = read_rows(tables / "comparison" / "excluded.csv")
    assert sum(row["model"] == "good" for row in listed) == 20
    assert sum(row["model"] == "more" for row in listed) == 20
    page = (tables / "comparison" / "comparison.md").read_text()
    assert "good: 20 patients or slides are not in all models: p0, p1" in page
    assert "and 10 more (`excluded.csv`)" in page
    assert "Excluded 40 patients" in result.output
    write_predictions(tables / "same.csv", make_predictions(4))
    write_predictions(tables / "fewer.csv", make_predictions(5, patients=range(20, 40)))
    result = compare(tables, tables / "good.csv", tables / "same.csv", tables / "fewer.csv")
    assert len(read_rows(tables / "comparison" / "excluded.csv")) == 40  # 20 patients of two models
    assert "Excluded 20 " in result.output


def test_mean_of_several_targets(tables):
    for number, name in enumerate(("a", "b")):
        write_predictions(tables / f"{name}.csv", make_predictions(number, targets=("EGFR", "KRAS")))
    assert compare(tables, tables / "a.csv", tables / "b.csv").returncode == 0
    assert [pair["target"] for pair in read_comparison(tables)["pairs"]] == ["EGFR", "KRAS", "macro"]


def test_only_common_targets_are_compared(tables):
    write_predictions(tables / "both.csv", make_predictions(0, targets=("FGFR3", "TP53")))
    assert compare(tables, tables / "both.csv", tables / "poor.csv").returncode == 0
    assert [pair["target"] for pair in read_comparison(tables)["pairs"]] == ["FGFR3"]
    write_predictions(tables / "other.csv", make_predictions(0, targets=("TP53",)))
    result = compare(tables, tables / "good.csv", tables / "other.csv")
    assert result.returncode == 2
    assert "no target in common" in result.output


def test_different_labels_are_rejected(tables):
    write_predictions(tables / "flipped.csv", make_predictions(0, flip={7}))
    result = compare(tables, tables / "good.csv", tables / "flipped.csv")
    assert result.returncode == 2
    assert "s7" in result.output
    assert not (tables / "comparison").exists()


@pytest.mark.parametrize("cohort", [None, "here"])
def test_table_of_another_tool_needs_five_columns(tables, cohort):
    write_predictions(tables / "good.csv", [replace(each, cohort=cohort) for each in make_predictions(0)])
    with (tables / "theirs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["patient_id", "slide_id", "target", "label", "probability"])
        for each in make_predictions(5):
            probability = round(sigmoid(each.logits["FGFR3"]), 3)
            writer.writerow([each.patient_id, each.slide_id, "FGFR3", each.labels["FGFR3"], probability])
    result = compare(tables, tables / "good.csv", tables / "theirs.csv")
    assert result.returncode == 0, result.output
    assert read_comparison(tables)["patients"] == 40


def test_patient_in_several_cohorts_needs_the_column_cohort(tables):
    both = [replace(each, cohort=cohort) for cohort in ("here", "there") for each in make_predictions(0)]
    write_predictions(tables / "both.csv", both)
    result = compare(tables, tables / "both.csv", tables / "poor.csv")
    assert result.returncode == 2
    output = " ".join(result.output.split())
    assert "poor have no column 'cohort'" in output
    assert "'p0' occurs in several cohorts" in output


def test_warning_if_patients_are_not_held_out(tables):
    seen = [replace(each, split="val" if index < 3 else "test") for index, each in enumerate(make_predictions(0))]
    for name, cohort in (("own", "own"), ("external", "external")):
        write_predictions(tables / name / "predictions.csv", seen)
        (tables / name / "evaluation.json").write_text(json.dumps({"cohort": cohort}))
    result = compare(tables, tables / "own", tables / "external")
    assert result.returncode == 0, result.output
    (note,) = read_comparison(tables)["notes"]
    assert note.startswith("NOT HELD OUT: own was trained or validated on 3 patients")
    assert note in result.output
    assert note in (tables / "comparison" / "comparison.md").read_text()


def test_compare_folders_of_evaluations_and_runs(tables):
    write_predictions(tables / "evaluation" / "predictions.csv", make_predictions(0))
    write_predictions(tables / "run" / "predictions-test.csv", make_predictions(1))
    write_predictions(tables / "run" / "predictions-val.csv", make_predictions(2))
    assert compare(tables, tables / "evaluation", tables / "run").returncode == 0
    assert read_comparison(tables)["files"]["run"].endswith("predictions-test.csv")
    assert compare(tables, tables / "evaluation", tables / "run", "--split", "val").returncode == 0
    assert read_comparison(tables)["files"]["run"].endswith("predictions-val.csv")
    result = compare(tables, tables / "evaluation", tables / "run", "--split", "train")
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["good.csv"], "good.csv is the only model"),
        (["good.csv", "absent.csv"], "absent.csv does not exist"),
        (["good.csv", "good.csv"], "good-1=PATH good-2=PATH"),
        (["good.csv", "."], "neither predictions.csv nor predictions-test.csv"),
        (["good.csv", "poor.csv", "--against", "god"], "Did you mean: good"),
        (["good.csv", "poor.csv", "--unit", "tile"], "--unit must be slide or patient"),
        (["good.csv", "poor.csv", "--resamples", "0"], "--resamples"),
    ],
)
def test_invalid_arguments_are_rejected(tables, monkeypatch, arguments, message):
    monkeypatch.chdir(tables)
    result = tapfm("compare", *arguments, "--out", "comparison")
    assert result.returncode == 2
    assert message in result.output
    assert not (tables / "comparison").exists()


def test_folder_with_other_files_is_rejected(tables):
    (tables / "comparison").mkdir()
    (tables / "comparison" / "thesis.tex").touch()
    result = compare(tables, tables / "good.csv", tables / "poor.csv")
    assert result.returncode == 2
    assert "thesis.tex" in result.output


def test_markup_in_a_name_is_printed_literally(tables):
    result = compare(tables, f"[red]ours|x={tables / 'good.csv'}", tables / "poor.csv")
    assert result.returncode == 0, result.output
    assert "[red]ours|x - poor" in result.output
    assert "[red]ours\\|x - poor" in (tables / "comparison" / "comparison.md").read_text()


def test_python_api(tables):
    models = [tables / "good.csv", f"other={tables / 'poor.csv'}"]
    compared = tapfm_package.compare(models, out=tables / "python", resamples=100)
    assert compared.models == ("good", "other")
    assert (tables / "python" / "comparison.md").exists()
