"""`tapfm evaluate` on another cohort, of exports, and of ensembles."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from cohort_files import rows_of
from command_line import tapfm
from training_lab import edit, slide_id, tile_set

from tapfm.errors import RunError
from tapfm.evaluation.predictions import read_predictions
from tapfm.runs.ensemble import find_member_folders, load_member, write_ensemble
from tapfm.runs.export import _predict_logits as logits_of_tiles
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tiles.store import write_tiles

FEW = ("--resamples", 50, "--workers", 0, "--device", "cpu")
SLIDES = 6


def evaluate(model, out, *options):
    return tapfm("evaluate", model, "--out", out, *FEW, *options)


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


def auc_of(folder, target="FGFR3", model="model", subgroup="all"):
    return metrics_of(folder)["models"][model][subgroup][target]["auc"]


@pytest.fixture(scope="module")
def run(train):
    return train("evaluated-elsewhere")


@pytest.fixture(scope="module")
def elsewhere(lab, tmp_path_factory):
    """Another cohort: slides of the lab under other names, of other patients."""
    folder = tmp_path_factory.mktemp("external")
    lines = ["slide_id,path,patient_id,FGFR3,scanner,age"]
    for i in range(SLIDES):
        write_tiles(folder / "tiles", replace(tile_set(i), slide_id=f"x-{i}"), "trident")
        lines.append(f"x-{i},{lab / f'{i}.svs'},Roe{i},{i % 2},{'AB'[i // 4]},{50 + i}")
    (folder / "external.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def own_cohort(elsewhere, tmp_path):
    """A copy whose files may be changed."""
    return shutil.copytree(elsewhere, tmp_path / "external")


def where(folder):
    return ("--cohort", folder / "external.csv", "--tiles", folder / "tiles")


def test_every_labelled_row_is_evaluated(run, lab, elsewhere, tmp_path):
    result = evaluate(run, tmp_path / "out", *where(elsewhere), "--by", "scanner")
    assert result.returncode == 0, result.said
    predictions = read_predictions(tmp_path / "out" / "predictions.csv")
    assert [each.slide_id for each in predictions] == [f"x-{i}" for i in range(SLIDES)]
    validation = read_predictions(run / "predictions-val.csv")  # of the slides 4 and 5
    assert [each.logits for each in predictions[4:]] == [each.logits for each in validation]
    about = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (about["cohort"], about["table"], about["split"]) == ("external", "external.csv", None)
    assert "it learnt from 4 training slides" in metrics_of(tmp_path / "out")["baseline"]
    assert auc_of(tmp_path / "out", subgroup="scanner = A")["units"] == 4
    few = auc_of(tmp_path / "out", subgroup="scanner = B")
    assert (few["value"], few["reason"]) == (None, "1 positive and 1 negative slides: fewer than 2 of a class")
    assert str(lab) not in (tmp_path / "out" / "metrics.md").read_text().replace(str(run), "")


def test_a_column_of_many_numbers_is_cut_at_its_quartiles(run, own_cohort, tmp_path):
    def add(rows):
        for i in range(6, 10):
            rows.append(rows[i % 2] | {"slide_id": f"x-{i}", "patient_id": f"Roe{i}", "age": str(50 + i)})
            write_tiles(own_cohort / "tiles", replace(tile_set(i % 2), slide_id=f"x-{i}"), "trident")

    edit(own_cohort / "external.csv", add)
    result = evaluate(run, tmp_path / "out", *where(own_cohort), "--by", "age", "--by", "mpp")
    assert result.returncode == 0, result.said
    groups = list(metrics_of(tmp_path / "out")["models"]["model"])
    ages = ["50 to 52.25", "52.25 to 54.5", "54.5 to 56.75", "56.75 to 59"]
    assert groups == ["all", *(f"age = {age}" for age in ages), "mpp = 0.50"]
    sizes = [auc_of(tmp_path / "out", subgroup=group)["units"] for group in groups]
    assert sizes == [10, 3, 2, 2, 3, 10]
    assert "age has 10 values, so it is cut at its quartiles" in (tmp_path / "out" / "metrics.md").read_text()


def test_tiles_are_asked_for_with_the_command_that_makes_them(run, elsewhere, tmp_path):
    table = elsewhere / "external.csv"
    result = evaluate(run, tmp_path / "out", "--cohort", table)
    assert result.returncode == 2
    assert f"tapfm tile {table} --out tiles-external" in result.said
    result = evaluate(run, tmp_path / "out", "--cohort", table, "--tiles", tmp_path)
    assert result.returncode == 2
    assert f"tapfm tile {table} --out {tmp_path}" in result.said


def test_patients_that_were_learnt_from_are_refused_with_their_names(run, own_cohort, tmp_path):
    edit(
        own_cohort / "external.csv", lambda rows: [rows[0].update(patient_id="Doe1"), rows[1].update(patient_id="Doe4")]
    )
    result = evaluate(run, tmp_path / "out", *where(own_cohort))
    assert result.returncode == 2
    assert "Doe1 (train), Doe4 (val)" in result.said
    result = evaluate(run, tmp_path / "out", *where(own_cohort), "--allow-overlap")
    assert result.returncode == 0, result.said
    assert "OVERLAP allowed: 2 patients" in (tmp_path / "out" / "metrics.md").read_text()


def test_a_split_of_the_other_cohort(run, own_cohort, tmp_path):
    result = evaluate(run, tmp_path / "out", *where(own_cohort), "--split", "test")
    assert result.returncode == 2
    assert "has no column split" in result.said
    edit(
        own_cohort / "external.csv",
        lambda rows: [row.update(split="test" if i < 4 else "") for i, row in enumerate(rows)],
    )
    assert evaluate(run, tmp_path / "out", *where(own_cohort), "--split", "test").returncode == 0
    assert metrics_of(tmp_path / "out")["slides"] == 4


def test_slides_may_be_called_as_others_that_were_learnt_from(run, own_cohort, tmp_path):
    assert evaluate(run, tmp_path / "before", *where(own_cohort)).returncode == 0

    def rename(rows):
        for i, row in enumerate(rows):
            row["slide_id"] = slide_id((i + 1) % SLIDES)
            write_tiles(own_cohort / "tiles", replace(tile_set(i), slide_id=row["slide_id"]), "trident")

    edit(own_cohort / "external.csv", rename)
    assert evaluate(run, tmp_path / "after", *where(own_cohort)).returncode == 0
    for name in ("predictions.csv", "predictions-baseline.csv"):
        before, after = (read_predictions(tmp_path / folder / name) for folder in ("before", "after"))
        assert [each.logits for each in before] == [each.logits for each in after]


def test_a_table_without_labels_says_what_to_write(run, own_cohort, tmp_path):
    edit(own_cohort / "external.csv", lambda rows: [row.update(FGFR3="") for row in rows])
    result = evaluate(run, tmp_path / "out", *where(own_cohort))
    assert result.returncode == 2
    assert "has no labelled slide.\nWrite 1, 0" in result.said


def test_slides_without_a_label_are_left_out_and_counted(run, own_cohort, tmp_path):
    edit(own_cohort / "external.csv", lambda rows: rows[5].update(FGFR3=""))
    assert evaluate(run, tmp_path / "out", *where(own_cohort)).returncode == 0
    assert metrics_of(tmp_path / "out")["without_label"] == ["x-5"]
    assert "without any label, not used: 1 slide" in (tmp_path / "out" / "metrics.md").read_text()


@pytest.fixture(scope="module")
def both(train):
    return train("both", 'task.targets=["FGFR3","TP53"]')


def test_a_target_that_the_table_lacks_is_empty_and_says_so(both, elsewhere, tmp_path):
    result = evaluate(both, tmp_path / "out", *where(elsewhere))
    assert result.returncode == 0, result.said
    lacking = auc_of(tmp_path / "out", "TP53")
    assert (lacking["value"], lacking["reason"]) == (None, "external.csv has no column TP53")
    assert auc_of(tmp_path / "out", "FGFR3")["value"] is not None
    assert "external.csv has no column TP53" in result.said
    assert auc_of(tmp_path / "out", "macro")["value"] == auc_of(tmp_path / "out", "FGFR3")["value"]


def test_a_mean_of_targets_of_a_subgroup_is_empty_where_one_of_them_is(both, own_cohort, tmp_path):
    edit(own_cohort / "external.csv", lambda rows: [row.update(TP53=str(i // 2 % 2)) for i, row in enumerate(rows)])
    result = evaluate(both, tmp_path / "out", *where(own_cohort), "--by", "scanner")
    assert result.returncode == 0, result.said
    assert auc_of(tmp_path / "out", "macro", subgroup="scanner = A")["value"] is not None
    few = auc_of(tmp_path / "out", "macro", subgroup="scanner = B")
    assert (few["value"], few["reason"].count("fewer than 2 of a class")) == (None, 2)


def test_a_table_without_any_of_the_targets_is_refused(run, own_cohort, tmp_path):
    text = (own_cohort / "external.csv").read_text().replace("FGFR3", "fgfr-3")
    (own_cohort / "external.csv").write_text(text)
    result = evaluate(run, tmp_path / "out", *where(own_cohort))
    assert result.returncode == 2
    assert "Did you mean: fgfr-3" in result.said


# exports


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert tapfm("export", run, "--out", folder).returncode == 0
    return folder


def test_an_export_gives_what_its_run_gives_with_the_same_thresholds(run, exported, elsewhere, tmp_path):
    for model, name in ((run, "run"), (exported, "export")):
        result = evaluate(model, tmp_path / name, *where(elsewhere))
        assert result.returncode == 0, result.said
    ours, theirs = (read_predictions(tmp_path / name / "predictions.csv") for name in ("run", "export"))
    for a, b in zip(ours, theirs, strict=True):
        assert b.logits["FGFR3"] == pytest.approx(a.logits["FGFR3"], abs=1e-5)
    thresholds = [metrics_of(tmp_path / name)["thresholds"] for name in ("run", "export")]
    assert thresholds[0]["youden"] == thresholds[1]["youden"]
    assert thresholds[0]["at_sensitivity"] == thresholds[1]["at_sensitivity"]
    assert "an export does not name the slides it learnt from" in metrics_of(tmp_path / "export")["baseline"]
    assert "cannot be checked" in (tmp_path / "export" / "metrics.md").read_text()
    rows = rows_of(tmp_path / "export" / "metrics.csv")
    assert {row["model"] for row in rows} == {"model"}


def test_an_export_has_no_threshold_of_another_sensitivity_and_says_so(exported, elsewhere, tmp_path):
    result = evaluate(exported, tmp_path / "out", *where(elsewhere), "--sensitivity", 0.8)
    assert result.returncode == 0, result.said
    found = metrics_of(tmp_path / "out")["models"]["model"]["all"]["FGFR3"]
    assert found["sensitivity"]["value"] is not None
    why = "no threshold: an export has that of sensitivity 0.9 only; for others evaluate the run"
    assert found["sensitivity_at_chosen"]["reason"] == why
    assert f"empty: FGFR3: {why}" in result.said


def test_an_export_has_no_cohort_of_its_own(exported, tmp_path):
    result = evaluate(exported, tmp_path / "out")
    assert result.returncode == 2
    assert "--cohort COHORT.csv" in result.said


def test_an_older_export_has_no_thresholds_and_says_so(exported, elsewhere, tmp_path):
    shutil.copytree(exported, tmp_path / "model")
    description = json.loads((tmp_path / "model" / "tapfm.json").read_text())
    del description["thresholds"]
    (tmp_path / "model" / "tapfm.json").write_text(json.dumps(description))
    assert evaluate(tmp_path / "model", tmp_path / "out", *where(elsewhere)).returncode == 0
    (f1,) = [row for row in rows_of(tmp_path / "out" / "metrics.csv") if row["metric"] == "f1"]
    assert (f1["value"], "exported without thresholds" in f1["reason"]) == ("", True)


def test_features_of_another_cohort_serve_a_fixed_encoder(train, own_cohort, tmp_path):
    fixed = train("fixed-elsewhere", "adaptation.method=fixed")
    result = tapfm(
        *("embed", own_cohort / "external.csv", "--encoder", "tapfm-pocket", "--tiles", own_cohort / "tiles"),
        *("--out", own_cohort / "features", "--device", "cpu", "--workers", 0),
    )
    assert result.returncode == 0, result.said
    table = ("--cohort", own_cohort / "external.csv")
    assert evaluate(fixed, tmp_path / "a", *table, "--features", own_cohort / "features").returncode == 0
    assert evaluate(fixed, tmp_path / "b", *table, "--tiles", own_cohort / "tiles").returncode == 0
    stored, encoded = (read_predictions(tmp_path / name / "predictions.csv") for name in "ab")
    for a, b in zip(stored, encoded, strict=True):
        assert b.logits["FGFR3"] == pytest.approx(a.logits["FGFR3"], abs=1e-5)
    assert "the number of tiles alone" in metrics_of(tmp_path / "a")["baseline"]
    assert "colours and tile count" in metrics_of(tmp_path / "b")["baseline"]


# ensembles


@pytest.fixture(scope="module")
def members(run, train):
    return [run, train("second", "seed=1")]


def test_an_ensemble_is_the_mean_of_its_members(members, elsewhere, tmp_path):
    write_ensemble(tmp_path / "ensemble", members, "folds")
    for name, model in (("first", members[0]), ("second", members[1]), ("both", tmp_path / "ensemble")):
        result = evaluate(model, tmp_path / name, *where(elsewhere))
        assert result.returncode == 0, result.said
    first, second, both = (
        read_predictions(tmp_path / name / "predictions.csv") for name in ("first", "second", "both")
    )
    for a, b, mean in zip(first, second, both, strict=True):
        expected = (sigmoid(a.logits["FGFR3"]) + sigmoid(b.logits["FGFR3"])) / 2
        assert sigmoid(mean.logits["FGFR3"]) == pytest.approx(expected)
        assert a.logits != b.logits
    assert "of its members" in metrics_of(tmp_path / "both")["thresholds"]["chosen_on"]
    about = json.loads((tmp_path / "both" / "evaluation.json").read_text())
    assert (about["kind"], len(about["members"])) == ("ensemble of folds", 2)


def test_seeds_may_be_evaluated_on_their_test_slides_and_folds_may_not(members, lab, tmp_path):
    write_ensemble(tmp_path / "seeds", members, "seeds")
    assert evaluate(tmp_path / "seeds", tmp_path / "a").returncode == 0
    assert metrics_of(tmp_path / "a")["slides"] == 4
    write_ensemble(tmp_path / "folds", members, "folds")
    result = evaluate(tmp_path / "folds", tmp_path / "b")
    assert result.returncode == 2
    assert "out-of-fold" in result.said
    result = evaluate(tmp_path / "folds", tmp_path / "b", "--cohort", lab / "cohort.csv", "--tiles", lab / "tiles")
    assert result.returncode == 2, "nor by naming the cohort"
    assert "has seen 6 patients of this cohort" in result.said


@pytest.mark.parametrize("order", [1, -1])
def test_an_export_among_the_members_is_told_in_any_order(run, exported, tmp_path, order):
    write_ensemble(tmp_path / "mixed", [run, exported][::order], "seeds")
    result = evaluate(tmp_path / "mixed", tmp_path / "out")
    assert result.returncode == 0, result.said
    assert metrics_of(tmp_path / "out")["slides"] == 4
    assert "cannot be checked" in (tmp_path / "out" / "metrics.md").read_text()


def test_an_ensemble_moves_with_its_members(members, tmp_path):
    for number, member in enumerate(members):
        shutil.copytree(member, tmp_path / "here" / str(number))
    write_ensemble(tmp_path / "here" / "ensemble", [tmp_path / "here" / "0", tmp_path / "here" / "1"], "seeds")
    shutil.move(tmp_path / "here", tmp_path / "there")
    found, _ = find_member_folders(tmp_path / "there" / "ensemble")
    assert [path.resolve() for path in found] == [tmp_path / "there" / "0", tmp_path / "there" / "1"]


def test_a_slide_file_that_was_replaced_is_predicted_again(run, lab, own_cohort, tmp_path):
    shutil.copy(lab / "1.svs", own_cohort / "slide.svs")
    edit(own_cohort / "external.csv", lambda rows: rows[0].update(path="slide.svs"))
    assert evaluate(run, tmp_path / "out", *where(own_cohort)).returncode == 0
    before = read_predictions(tmp_path / "out" / "predictions.csv")
    shutil.copy(lab / "0.svs", own_cohort / "slide.svs")
    os.utime(own_cohort / "slide.svs", ns=(1, 1))
    result = evaluate(run, tmp_path / "out", *where(own_cohort), "--resume")
    assert result.returncode == 0, result.said
    after = read_predictions(tmp_path / "out" / "predictions.csv")
    assert after[0].logits != before[0].logits
    assert after[1:] == before[1:]


def test_members_are_loaded_from_a_run_an_export_and_an_ensemble(members, exported, tmp_path):
    write_ensemble(tmp_path / "ensemble", [*members, exported], "seeds")
    folders, _ = find_member_folders(tmp_path / "ensemble")
    models = [load_member(folder) for folder in folders]
    assert len(models) == 3
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 3, 224, 224), "uint8"))
    logits = [logits_of_tiles(each.model, noise, None) for each in models]
    torch.testing.assert_close(logits[0], logits[2], atol=1e-5, rtol=0)  # the export is of the first
    assert not torch.allclose(logits[0], logits[1])
    assert [len(find_member_folders(path)[0]) for path in (members[0], exported)] == [1, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ('{"kind": "bagging", "members": ["a"]}', "its kind is 'bagging'"),
        ('{"kind": "seeds", "members": []}', "names no members"),
        ('{"kind": "seeds", "members": ["absent"]}', "neither runs nor exports"),
        ('["a"]', "cannot be read"),
    ],
)
def test_an_ensemble_that_is_none_says_what_one_holds(tmp_path, text, said):
    (tmp_path / "ensemble.json").write_text(text)
    with pytest.raises(RunError, match=said):
        find_member_folders(tmp_path)


def test_an_ensemble_of_nothing_is_not_written(tmp_path):
    with pytest.raises(RunError):
        write_ensemble(tmp_path, [], "seeds")
    assert not (tmp_path / "ensemble.json").exists()


def test_members_of_different_targets_are_refused(run, train, tmp_path):
    other = train("tp53", 'task.targets=["TP53"]')
    write_ensemble(tmp_path, [run, other], "seeds")
    result = evaluate(tmp_path, tmp_path / "out")
    assert result.returncode == 2
    assert "different targets" in result.said
