"""`tapfm evaluate` on an external cohort, with exports and with ensembles."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from cohort_files import read_rows
from command_line import tapfm
from slide_files import copy_slide, section, write_slide
from training_workspace import case_id, edit_csv, make_tile_set

from tapfm.errors import RunError
from tapfm.evaluation.predictions import read_predictions
from tapfm.runs.ensemble import find_member_folders, write_ensemble
from tapfm.runs.export import _predict_logits as predict_logits
from tapfm.runs.saved_model import load_member
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tiles.store import write_tiles

FAST_OPTIONS = ("--resamples", 50, "--workers", 0, "--device", "cpu")
SLIDES = 6


def evaluate(model, out, *options):
    return tapfm("evaluate", model, "--out", out, *FAST_OPTIONS, *options)


def read_metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def read_auc(folder, target="FGFR3", model="model", subgroup="all"):
    return read_metrics(folder)["models"][model][subgroup][target]["auc"]


@pytest.fixture(scope="module")
def run(train):
    return train("evaluated-external")


@pytest.fixture(scope="module")
def external(workspace, tmp_path_factory):
    """An external cohort: slides of the workspace with other ids and patients."""
    folder = tmp_path_factory.mktemp("external")
    lines = ["slide_id,path,patient_id,FGFR3,scanner,age"]
    for i in range(SLIDES):
        write_tiles(folder / "tiles", replace(make_tile_set(i), slide_id=f"x-{i}"), "trident")
        lines.append(f"x-{i},{workspace / f'{i}.svs'},Roe{i},{i % 2},{'AB'[i // 4]},{50 + i}")
    (folder / "external.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def external_copy(external, tmp_path):
    """A copy of the external cohort whose files a test may change."""
    return shutil.copytree(external, tmp_path / "external")


def cohort_options(folder):
    return ("--cohort", folder / "external.csv", "--tiles", folder / "tiles")


def test_all_labelled_slides_are_evaluated(run, workspace, external, tmp_path):
    result = evaluate(run, tmp_path / "out", *cohort_options(external), "--by", "scanner")
    assert result.returncode == 0, result.output
    predictions = read_predictions(tmp_path / "out" / "predictions.csv")
    assert [each.slide_id for each in predictions] == [f"x-{i}" for i in range(SLIDES)]
    validation = read_predictions(run / "predictions-val.csv")  # of the slides 4 and 5
    assert [each.logits for each in predictions[4:]] == [each.logits for each in validation]
    about = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (about["cohort"], about["table"], about["split"]) == ("external", "external.csv", None)
    assert "fitted to 4 training slides" in read_metrics(tmp_path / "out")["baseline"]
    assert read_auc(tmp_path / "out", subgroup="scanner = A")["units"] == 4
    few = read_auc(tmp_path / "out", subgroup="scanner = B")
    assert (few["value"], few["reason"]) == (
        None,
        ("1 positive and 1 negative slides, but at least 2 of each class are required"),
    )
    assert str(workspace) not in (tmp_path / "out" / "metrics.md").read_text().replace(str(run), "")


def test_numeric_column_is_grouped_by_quartile(run, external_copy, tmp_path):
    def add(rows):
        for i in range(6, 10):
            copy_slide(external_copy / rows[i % 2]["path"], external_copy / f"x-{i}.svs")
            new = {"slide_id": f"x-{i}", "path": f"x-{i}.svs", "patient_id": f"Roe{i}", "age": str(50 + i)}
            rows.append(rows[i % 2] | new)
            write_tiles(external_copy / "tiles", replace(make_tile_set(i % 2), slide_id=f"x-{i}"), "trident")

    edit_csv(external_copy / "external.csv", add)
    result = evaluate(run, tmp_path / "out", *cohort_options(external_copy), "--by", "age", "--by", "mpp")
    assert result.returncode == 0, result.output
    groups = list(read_metrics(tmp_path / "out")["models"]["model"])
    ages = ["50 to 52.25", "52.25 to 54.5", "54.5 to 56.75", "56.75 to 59"]
    assert groups == ["all", *(f"age = {age}" for age in ages), "mpp = 0.50"]
    sizes = [read_auc(tmp_path / "out", subgroup=group)["units"] for group in groups]
    assert sizes == [10, 3, 2, 2, 3, 10]
    assert "age has 10 distinct values; slides are grouped by quartile" in (tmp_path / "out" / "metrics.md").read_text()


def test_missing_tiles_error_contains_the_tile_command(run, external, tmp_path):
    table = external / "external.csv"
    result = evaluate(run, tmp_path / "out", "--cohort", table)
    assert result.returncode == 2
    assert f"tapfm tile {table} --out tiles-external" in result.output
    result = evaluate(run, tmp_path / "out", "--cohort", table, "--tiles", tmp_path)
    assert result.returncode == 2
    assert f"tapfm tile {table} --out {tmp_path}" in result.output


def test_training_patients_are_rejected_without_allow_overlap(run, external_copy, tmp_path):
    edit_csv(
        external_copy / "external.csv",
        lambda rows: [rows[0].update(patient_id="Doe1"), rows[1].update(patient_id="Doe4")],
    )
    result = evaluate(run, tmp_path / "out", *cohort_options(external_copy))
    assert result.returncode == 2
    assert "Doe1 (train), Doe4 (val)" in result.output
    result = evaluate(run, tmp_path / "out", *cohort_options(external_copy), "--allow-overlap")
    assert result.returncode == 0, result.output
    assert "OVERLAP allowed: 2 patients" in (tmp_path / "out" / "metrics.md").read_text()


def test_split_of_an_external_cohort(run, external_copy, tmp_path):
    result = evaluate(run, tmp_path / "out", *cohort_options(external_copy), "--split", "test")
    assert result.returncode == 2
    assert "has no column 'split'" in result.output
    edit_csv(
        external_copy / "external.csv",
        lambda rows: [row.update(split="test" if i < 4 else "") for i, row in enumerate(rows)],
    )
    assert evaluate(run, tmp_path / "out", *cohort_options(external_copy), "--split", "test").returncode == 0
    assert read_metrics(tmp_path / "out")["slides"] == 4


def test_slide_ids_may_equal_those_of_training_slides(run, external_copy, tmp_path):
    assert evaluate(run, tmp_path / "before", *cohort_options(external_copy)).returncode == 0

    def rename(rows):
        for i, row in enumerate(rows):
            row["slide_id"] = case_id((i + 1) % SLIDES)
            write_tiles(external_copy / "tiles", replace(make_tile_set(i), slide_id=row["slide_id"]), "trident")

    edit_csv(external_copy / "external.csv", rename)
    assert evaluate(run, tmp_path / "after", *cohort_options(external_copy)).returncode == 0
    for name in ("predictions.csv", "predictions-baseline.csv"):
        before, after = (read_predictions(tmp_path / folder / name) for folder in ("before", "after"))
        assert [each.logits for each in before] == [each.logits for each in after]


def test_table_without_labels_is_rejected(run, external_copy, tmp_path):
    edit_csv(external_copy / "external.csv", lambda rows: [row.update(FGFR3="") for row in rows])
    result = evaluate(run, tmp_path / "out", *cohort_options(external_copy))
    assert result.returncode == 2
    assert "has no labelled slide.\nWrite 1, 0" in result.output


def test_slides_without_a_label_are_excluded_and_counted(run, external_copy, tmp_path):
    edit_csv(external_copy / "external.csv", lambda rows: rows[5].update(FGFR3=""))
    assert evaluate(run, tmp_path / "out", *cohort_options(external_copy)).returncode == 0
    assert read_metrics(tmp_path / "out")["without_label"] == ["x-5"]
    assert "1 slide without a label" in (tmp_path / "out" / "metrics.md").read_text()


@pytest.fixture(scope="module")
def two_target_run(train):
    return train("both", 'task.targets=["FGFR3","TP53"]')


def test_target_without_a_column_has_a_reason(two_target_run, external, tmp_path):
    result = evaluate(two_target_run, tmp_path / "out", *cohort_options(external))
    assert result.returncode == 0, result.output
    missing = read_auc(tmp_path / "out", "TP53")
    assert (missing["value"], missing["reason"]) == (None, "external.csv has no column TP53")
    assert read_auc(tmp_path / "out", "FGFR3")["value"] is not None
    assert "external.csv has no column TP53" in result.output
    assert read_auc(tmp_path / "out", "macro")["value"] == read_auc(tmp_path / "out", "FGFR3")["value"]


def test_mean_of_a_subgroup_needs_all_targets(two_target_run, external_copy, tmp_path):
    edit_csv(
        external_copy / "external.csv", lambda rows: [row.update(TP53=str(i // 2 % 2)) for i, row in enumerate(rows)]
    )
    result = evaluate(two_target_run, tmp_path / "out", *cohort_options(external_copy), "--by", "scanner")
    assert result.returncode == 0, result.output
    assert read_auc(tmp_path / "out", "macro", subgroup="scanner = A")["value"] is not None
    few = read_auc(tmp_path / "out", "macro", subgroup="scanner = B")
    assert (few["value"], few["reason"].count("at least 2 of each class are required")) == (None, 2)


def test_table_without_any_target_is_rejected(run, external_copy, tmp_path):
    text = (external_copy / "external.csv").read_text().replace("FGFR3", "fgfr-3")
    (external_copy / "external.csv").write_text(text)
    result = evaluate(run, tmp_path / "out", *cohort_options(external_copy))
    assert result.returncode == 2
    assert "Did you mean: fgfr-3" in result.output


# exports


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert tapfm("export", run, "--out", folder).returncode == 0
    return folder


def test_export_and_run_give_the_same_predictions_and_thresholds(run, exported, external, tmp_path):
    for model, name in ((run, "run"), (exported, "export")):
        result = evaluate(model, tmp_path / name, *cohort_options(external))
        assert result.returncode == 0, result.output
    ours, theirs = (read_predictions(tmp_path / name / "predictions.csv") for name in ("run", "export"))
    for a, b in zip(ours, theirs, strict=True):
        assert b.logits["FGFR3"] == pytest.approx(a.logits["FGFR3"], abs=1e-5)
    thresholds = [read_metrics(tmp_path / name)["thresholds"] for name in ("run", "export")]
    assert thresholds[0]["youden"] == thresholds[1]["youden"]
    assert thresholds[0]["at_sensitivity"] == thresholds[1]["at_sensitivity"]
    assert "an export does not contain its training slides" in read_metrics(tmp_path / "export")["baseline"]
    assert "an export contains no patient ids" in (tmp_path / "export" / "metrics.md").read_text()
    rows = read_rows(tmp_path / "export" / "metrics.csv")
    assert {row["model"] for row in rows} == {"model"}


def test_export_has_no_threshold_for_another_sensitivity(exported, external, tmp_path):
    result = evaluate(exported, tmp_path / "out", *cohort_options(external), "--sensitivity", 0.8)
    assert result.returncode == 0, result.output
    found = read_metrics(tmp_path / "out")["models"]["model"]["all"]["FGFR3"]
    assert found["sensitivity"]["value"] is not None
    reason = "no threshold: the export has a threshold for sensitivity 0.9 only; use the run instead"
    assert found["sensitivity_at_chosen"]["reason"] == reason
    assert f"FGFR3: {reason}" in result.output


def test_export_needs_a_cohort(exported, tmp_path):
    result = evaluate(exported, tmp_path / "out")
    assert result.returncode == 2
    assert "--cohort COHORT.csv" in result.output


def test_export_without_thresholds(exported, external, tmp_path):
    shutil.copytree(exported, tmp_path / "model")
    description = json.loads((tmp_path / "model" / "tapfm.json").read_text())
    del description["thresholds"]
    (tmp_path / "model" / "tapfm.json").write_text(json.dumps(description))
    assert evaluate(tmp_path / "model", tmp_path / "out", *cohort_options(external)).returncode == 0
    (f1,) = [row for row in read_rows(tmp_path / "out" / "metrics.csv") if row["metric"] == "f1"]
    assert (f1["value"], "exported without thresholds" in f1["reason"]) == ("", True)


def test_features_of_an_external_cohort(train, external_copy, tmp_path):
    fixed = train("fixed-external", "adaptation.method=fixed")
    result = tapfm(
        *("embed", external_copy / "external.csv", "--encoder", "tapfm-pocket", "--tiles", external_copy / "tiles"),
        *("--out", external_copy / "features", "--device", "cpu", "--workers", 0),
    )
    assert result.returncode == 0, result.output
    table = ("--cohort", external_copy / "external.csv")
    assert evaluate(fixed, tmp_path / "a", *table, "--features", external_copy / "features").returncode == 0
    assert evaluate(fixed, tmp_path / "b", *table, "--tiles", external_copy / "tiles").returncode == 0
    stored, encoded = (read_predictions(tmp_path / name / "predictions.csv") for name in "ab")
    for a, b in zip(stored, encoded, strict=True):
        assert b.logits["FGFR3"] == pytest.approx(a.logits["FGFR3"], abs=1e-5)
    assert "only the number of tiles" in read_metrics(tmp_path / "a")["baseline"]
    assert "colours and tile count" in read_metrics(tmp_path / "b")["baseline"]


# ensembles


@pytest.fixture(scope="module")
def members(run, train):
    return [run, train("second", "seed=1")]


def test_ensemble_averages_its_members(members, external, tmp_path):
    write_ensemble(tmp_path / "ensemble", members, "folds")
    for name, model in (("first", members[0]), ("second", members[1]), ("both", tmp_path / "ensemble")):
        result = evaluate(model, tmp_path / name, *cohort_options(external))
        assert result.returncode == 0, result.output
    first, second, both = (
        read_predictions(tmp_path / name / "predictions.csv") for name in ("first", "second", "both")
    )
    for a, b, mean in zip(first, second, both, strict=True):
        expected = (sigmoid(a.logits["FGFR3"]) + sigmoid(b.logits["FGFR3"])) / 2
        assert sigmoid(mean.logits["FGFR3"]) == pytest.approx(expected)
        assert a.logits != b.logits
    assert "of the members" in read_metrics(tmp_path / "both")["thresholds"]["chosen_on"]
    about = json.loads((tmp_path / "both" / "evaluation.json").read_text())
    assert (about["kind"], len(about["members"])) == ("ensemble of folds", 2)


def test_own_cohort_with_ensemble_of_seeds_or_folds(members, workspace, tmp_path):
    write_ensemble(tmp_path / "seeds", members, "seeds")
    assert evaluate(tmp_path / "seeds", tmp_path / "a").returncode == 0
    assert read_metrics(tmp_path / "a")["slides"] == 4
    write_ensemble(tmp_path / "folds", members, "folds")
    result = evaluate(tmp_path / "folds", tmp_path / "b")
    assert result.returncode == 2
    assert "--cohort EXTERNAL.csv" in " ".join(result.output.split())
    result = evaluate(
        tmp_path / "folds", tmp_path / "b", "--cohort", workspace / "cohort.csv", "--tiles", workspace / "tiles"
    )
    assert result.returncode == 2, "also if the cohort is given with --cohort"
    assert "6 patients" in result.output
    assert "--allow-overlap" in result.output


@pytest.mark.parametrize("order", [1, -1])
def test_note_if_a_member_is_an_export(run, exported, tmp_path, order):
    write_ensemble(tmp_path / "mixed", [run, exported][::order], "seeds")
    result = evaluate(tmp_path / "mixed", tmp_path / "out")
    assert result.returncode == 0, result.output
    assert read_metrics(tmp_path / "out")["slides"] == 4
    assert "an export contains no patient ids" in (tmp_path / "out" / "metrics.md").read_text()


def test_ensemble_can_be_moved_with_its_members(members, tmp_path):
    for number, member in enumerate(members):
        shutil.copytree(member, tmp_path / "here" / str(number))
    write_ensemble(tmp_path / "here" / "ensemble", [tmp_path / "here" / "0", tmp_path / "here" / "1"], "seeds")
    shutil.move(tmp_path / "here", tmp_path / "there")
    found, _ = find_member_folders(tmp_path / "there" / "ensemble")
    assert [path.resolve() for path in found] == [tmp_path / "there" / "0", tmp_path / "there" / "1"]


def test_replaced_slide_file_is_predicted_again(run, external_copy, tmp_path):
    write_slide(external_copy / "slide.svs", section(448, 448, seed=21, tissue=(0, 0, 1, 1)), tile_px=224)
    edit_csv(external_copy / "external.csv", lambda rows: rows[0].update(path="slide.svs"))
    assert evaluate(run, tmp_path / "out", *cohort_options(external_copy)).returncode == 0
    before = read_predictions(tmp_path / "out" / "predictions.csv")
    write_slide(external_copy / "slide.svs", section(448, 448, seed=20, tissue=(0, 0, 1, 1)), tile_px=224)
    os.utime(external_copy / "slide.svs", ns=(1, 1))
    result = evaluate(run, tmp_path / "out", *cohort_options(external_copy), "--resume")
    assert result.returncode == 0, result.output
    after = read_predictions(tmp_path / "out" / "predictions.csv")
    assert after[0].logits != before[0].logits
    assert after[1:] == before[1:]


def test_load_members_of_run_export_and_ensemble(members, exported, tmp_path):
    write_ensemble(tmp_path / "ensemble", [*members, exported], "seeds")
    folders, _ = find_member_folders(tmp_path / "ensemble")
    models = [load_member(folder) for folder in folders]
    assert len(models) == 3
    tiles = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 224, 224), "uint8"))
    logits = [predict_logits(each.model, tiles, None) for each in models]
    torch.testing.assert_close(logits[0], logits[2], atol=1e-5, rtol=0)  # the export of the first member
    assert not torch.allclose(logits[0], logits[1])
    assert [len(find_member_folders(path)[0]) for path in (members[0], exported)] == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"kind": "bagging", "members": ["a"]}', "invalid kind: 'bagging'"),
        ('{"kind": "seeds", "members": []}', "lists no members"),
        ('{"kind": "seeds", "members": ["absent"]}', "neither runs nor exports"),
        ('["a"]', "cannot be read"),
    ],
)
def test_invalid_ensemble_json_is_rejected(tmp_path, text, message):
    (tmp_path / "ensemble.json").write_text(text)
    with pytest.raises(RunError, match=message):
        find_member_folders(tmp_path)


def test_empty_ensemble_is_rejected(tmp_path):
    with pytest.raises(RunError):
        write_ensemble(tmp_path, [], "seeds")
    assert not (tmp_path / "ensemble.json").exists()


def test_members_with_different_targets_are_rejected(run, train, tmp_path):
    other = train("tp53", 'task.targets=["TP53"]')
    write_ensemble(tmp_path, [run, other], "seeds")
    result = evaluate(tmp_path, tmp_path / "out")
    assert result.returncode == 2
    assert "different targets" in result.output


def test_training_slides_in_a_table_without_patients_are_reported(run, workspace, external_copy, tmp_path):
    row = next(row for row in read_rows(workspace / "cohort.csv") if row["split"] == "train")
    table = external_copy / "own.csv"
    table.write_text(f"slide_id,path,FGFR3\n{row['slide_id']},{workspace / row['path']},1\n")
    options = ("--cohort", table, "--tiles", workspace / "tiles", "--slides-are-patients")
    result = evaluate(run, tmp_path / "out", *options)
    assert result.returncode == 0, result.output
    assert f"{row['slide_id']} (train)" in result.output
    assert "POSSIBLE OVERLAP" in (tmp_path / "out" / "metrics.md").read_text()
