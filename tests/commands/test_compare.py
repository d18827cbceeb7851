"""`tapfm compare`: models beside each other, on the same patients."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from cohort_files import rows_of
from command_line import tapfm
from PIL import Image

import tapfm as tapfm_package
from tapfm.evaluation.predictions import Prediction, compute_scores, write_predictions
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds

FEW = ("--resamples", 100)


def predictions(seed, *, skill=1.0, patients=range(40), targets=("FGFR3",), flip=()):
    """One slide of each patient; the same patients have the same labels whoever predicts them."""
    noise = np.random.default_rng(seed)
    found = []
    for number in patients:
        labels = {target: (number + place) % 2 for place, target in enumerate(targets)}
        logits = {target: skill * (2 * labels[target] - 1) + float(noise.normal()) for target in targets}
        labels = {target: 1 - label if number in flip else label for target, label in labels.items()}
        found.append(Prediction(f"s{number}", f"p{number}", "test", None, labels, logits, 10))
    return found


@pytest.fixture
def tables(tmp_path):
    """A good model, a poor one, and a folder for what comes of them."""
    write_predictions(tmp_path / "good.csv", predictions(0, skill=2.0))
    write_predictions(tmp_path / "poor.csv", predictions(1, skill=0.0))
    return tmp_path


def compare(folder, *arguments):
    return tapfm("compare", *arguments, "--out", folder / "comparison", *FEW)


def found_in(folder):
    return json.loads((folder / "comparison" / "comparison.json").read_text())


def test_the_folder_has_tables_and_a_picture(tables):
    result = compare(tables, tables / "good.csv", tables / "poor.csv")
    assert result.returncode == 0, result.said
    assert {path.name for path in (tables / "comparison").iterdir() if path.name[0] != "."} == {
        *("comparison.json", "comparison.csv", "comparison.md", "differences.png", "excluded.csv"),
    }
    found = found_in(tables)
    good = compute_scores(predictions(0, skill=2.0), target_kinds(["FGFR3"]), "slide").auc["FGFR3"]
    assert found["auc"]["good"]["FGFR3"]["value"] == good
    (pair,) = found["pairs"]
    assert pair["difference"]["value"] == pytest.approx(good - found["auc"]["poor"]["FGFR3"]["value"])
    assert pair["p_delong"] == pair["p_holm"] < 0.01
    (row,) = rows_of(tables / "comparison" / "comparison.csv")
    assert float(row["difference"]) == pair["difference"]["value"]
    assert "good - poor" in result.said
    assert f"{good:.3f}" in (tables / "comparison" / "comparison.md").read_text()
    with Image.open(tables / "comparison" / "differences.png") as picture:
        assert picture.width > 300


def test_the_same_comparison_gives_the_same_files(tables):
    arguments = (tables / "good.csv", tables / "poor.csv")
    compare(tables, *arguments)
    first = {path.name: path.read_bytes() for path in (tables / "comparison").iterdir()}
    assert compare(tables, *arguments).returncode == 0
    assert {path.name: path.read_bytes() for path in (tables / "comparison").iterdir()} == first


def test_names_can_be_given_and_one_be_compared_against(tables):
    write_predictions(tables / "third.csv", predictions(2))
    sources = (f"ours={tables / 'good.csv'}", f"theirs={tables / 'poor.csv'}", tables / "third.csv")
    assert compare(tables, *sources).returncode == 0
    assert len(found_in(tables)["pairs"]) == 3
    assert compare(tables, *sources, "--against", "ours").returncode == 0
    found = found_in(tables)
    assert list(found["auc"]) == ["ours", "theirs", "third"]
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]] == [("theirs", "ours"), ("third", "ours")]
    for pair in found["pairs"]:
        assert pair["p_holm"] >= pair["p_delong"]


def test_only_patients_that_all_have_count_and_the_others_are_listed(tables):
    write_predictions(tables / "more.csv", predictions(3, patients=range(20, 60)))
    result = compare(tables, tables / "good.csv", tables / "more.csv")
    assert result.returncode == 0, result.said
    assert found_in(tables)["patients"] == 20
    listed = rows_of(tables / "comparison" / "excluded.csv")
    assert sum(row["method"] == "good" for row in listed) == 20
    assert sum(row["method"] == "more" for row in listed) == 20
    page = (tables / "comparison" / "comparison.md").read_text()
    assert "good: 20 patients that other methods lack" in page
    assert "and 10 more (`excluded.csv`)" in page
    assert "Left out: 40 patients" in result.said


def test_several_targets_have_a_mean(tables):
    for number, name in enumerate(("a", "b")):
        write_predictions(tables / f"{name}.csv", predictions(number, targets=("EGFR", "KRAS")))
    assert compare(tables, tables / "a.csv", tables / "b.csv").returncode == 0
    assert [pair["target"] for pair in found_in(tables)["pairs"]] == ["EGFR", "KRAS", "macro"]


def test_targets_that_not_all_have_are_left_out(tables):
    write_predictions(tables / "both.csv", predictions(0, targets=("FGFR3", "TP53")))
    assert compare(tables, tables / "both.csv", tables / "poor.csv").returncode == 0
    assert [pair["target"] for pair in found_in(tables)["pairs"]] == ["FGFR3"]
    write_predictions(tables / "other.csv", predictions(0, targets=("TP53",)))
    result = compare(tables, tables / "good.csv", tables / "other.csv")
    assert result.returncode == 2
    assert "no target in common" in result.said


def test_different_labels_are_refused(tables):
    write_predictions(tables / "flipped.csv", predictions(0, flip={7}))
    result = compare(tables, tables / "good.csv", tables / "flipped.csv")
    assert result.returncode == 2
    assert "s7" in result.said
    assert not (tables / "comparison").exists()


@pytest.mark.parametrize("cohort", [None, "here"])
def test_a_table_of_another_tool_needs_five_columns(tables, cohort):
    write_predictions(tables / "good.csv", [replace(each, cohort=cohort) for each in predictions(0)])
    with (tables / "theirs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["patient_id", "slide_id", "target", "label", "probability"])
        for each in predictions(5):
            probability = round(sigmoid(each.logits["FGFR3"]), 3)
            writer.writerow([each.patient_id, each.slide_id, "FGFR3", each.labels["FGFR3"], probability])
    result = compare(tables, tables / "good.csv", tables / "theirs.csv")
    assert result.returncode == 0, result.said
    assert found_in(tables)["patients"] == 40


def test_where_one_names_no_cohorts_a_patient_may_not_be_in_several(tables):
    both = [replace(each, cohort=cohort) for cohort in ("here", "there") for each in predictions(0)]
    write_predictions(tables / "both.csv", both)
    result = compare(tables, tables / "both.csv", tables / "poor.csv")
    assert result.returncode == 2
    assert "poor names no cohorts, and in both patient 'p0' is in several" in result.said


def test_patients_whom_a_model_has_seen_are_told(tables):
    seen = [replace(each, split="val" if place < 3 else "test") for place, each in enumerate(predictions(0))]
    for name, cohort in (("own", "own"), ("elsewhere", "external")):
        write_predictions(tables / name / "predictions.csv", seen)
        (tables / name / "evaluation.json").write_text(json.dumps({"cohort": cohort}))
    result = compare(tables, tables / "own", tables / "elsewhere")
    assert result.returncode == 0, result.said
    (note,) = found_in(tables)["notes"]
    assert note == "NOT HELD OUT: own was trained on, or selected by, 3 patients of these."
    assert note in result.said
    assert note in (tables / "comparison" / "comparison.md").read_text()


def test_folders_of_evaluations_and_runs_are_looked_into(tables):
    write_predictions(tables / "evaluation" / "predictions.csv", predictions(0))
    write_predictions(tables / "run" / "predictions-test.csv", predictions(1))
    write_predictions(tables / "run" / "predictions-val.csv", predictions(2))
    assert compare(tables, tables / "evaluation", tables / "run").returncode == 0
    assert found_in(tables)["files"]["run"].endswith("predictions-test.csv")
    assert compare(tables, tables / "evaluation", tables / "run", "--split", "val").returncode == 0
    assert found_in(tables)["files"]["run"].endswith("predictions-val.csv")
    result = compare(tables, tables / "evaluation", tables / "run", "--split", "train")
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["good.csv"], "only one model"),
        (["good.csv", "absent.csv"], "absent.csv does not exist"),
        (["good.csv", "good.csv"], "Several are called good"),
        (["good.csv", "."], "neither predictions.csv nor predictions-test.csv"),
        (["good.csv", "poor.csv", "--against", "god"], "Did you mean: good"),
        (["good.csv", "poor.csv", "--unit", "tile"], "--unit must be slide or patient"),
        (["good.csv", "poor.csv", "--resamples", "0"], "--resamples"),
    ],
)
def test_what_cannot_be_compared_is_refused(tables, monkeypatch, arguments, said):
    monkeypatch.chdir(tables)
    result = tapfm("compare", *arguments, "--out", "comparison")
    assert result.returncode == 2
    assert said in result.said
    assert not (tables / "comparison").exists()


def test_other_files_are_not_mixed_with_it(tables):
    (tables / "comparison").mkdir()
    (tables / "comparison" / "thesis.tex").touch()
    result = compare(tables, tables / "good.csv", tables / "poor.csv")
    assert result.returncode == 2
    assert "thesis.tex" in result.said


def test_markup_in_a_name_is_shown_as_it_is(tables):
    result = compare(tables, f"[red]ours|x={tables / 'good.csv'}", tables / "poor.csv")
    assert result.returncode == 0, result.said
    assert "[red]ours|x - poor" in result.said
    assert "[red]ours\\|x - poor" in (tables / "comparison" / "comparison.md").read_text()


def test_the_same_from_python(tables):
    models = [tables / "good.csv", f"other={tables / 'poor.csv'}"]
    compared = tapfm_package.compare(models, out=tables / "python", resamples=100)
    assert compared.methods == ("good", "other")
    assert (tables / "python" / "comparison.md").exists()
