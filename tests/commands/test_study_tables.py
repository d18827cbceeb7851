"""Tables, figures, fits and conclusions of a study, from fake results."""

import csv
import dataclasses
import io
import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from study_results import make_history, make_predictions, make_results, make_study

from tapfm.errors import InputError
from tapfm.evaluation.predictions import compute_scores, write_predictions
from tapfm.results.latex import latex_table
from tapfm.results.markdown import markdown_table
from tapfm.results.table import cell_text, list_reasons, table_csv
from tapfm.study.ablation import ablation_table, fit_losses
from tapfm.study.comparison import compare_study, tidy_table, wide_table
from tapfm.study.costs import costs_table
from tapfm.study.figures import curves_figure, log_losses_figure, roc_figure
from tapfm.study.folder import StudyFolder
from tapfm.study.forgetting import (
    _resample_tiles as resample_tiles,
)
from tapfm.study.forgetting import (
    describe_forgetting,
    forgetting_table,
    summarise_probes,
)
from tapfm.study.headline import build_study_headline, read_headline_rows
from tapfm.study.probe import _cosine_distance as cosine_distance
from tapfm.study.probe import _linear_cka as linear_cka
from tapfm.study.probe import _predict_with_probe as predict_with_probe
from tapfm.study.probe_tiles import find_probe_tiles
from tapfm.study.results import ModelResult, StudyResults
from tapfm.study.results import _pool_folds as pool_folds
from tapfm.study.runs import PlannedRun, list_models
from tapfm.study.stability import (
    MEASURES,
    RunStability,
    describe_stability,
    measure_stability,
    stability_means_table,
    stability_runs_table,
)
from tapfm.study.stability import (
    _measure_history as measure_history,
)
from tapfm.tasks.catalog import target_kinds

ORDERS = ("before", "after", "joint")


def csv_rows(table):
    return list(csv.DictReader(io.StringIO(table_csv(table))))


def compare_fake_study(study, strengths, **options):
    return compare_study(make_results(study, strengths, **options))


def format_markdown(study, comparison):
    return markdown_table(wide_table(comparison, study))


def test_best_is_bold_second_is_underlined_and_tests_are_against_the_best():
    study = make_study(aggregators=["abmil", "mean"])
    comparison = compare_fake_study(study, (0.5, 1.0, 2.0))
    text = format_markdown(study, comparison)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert lines["tapfm-pocket (TAPFM)"].count("**") == 4  # test and external
    assert lines["tapfm-pocket + mean (FT)"].count("<u>") == 2
    assert "p = " not in lines["tapfm-pocket (TAPFM)"]
    assert "p = " in lines["tapfm-pocket + ABMIL (FT)"]
    assert "*Fine-tuned (FT) encoder with MIL aggregators*" in text
    assert "| Model | FGFR3, Test (N = 30) | FGFR3, External (N = 30) |" in text
    rows = csv_rows(tidy_table(comparison))
    best = next(row for row in rows if row["model"] == "tapfm-pocket (TAPFM)" and row["cohort"] == "test")
    worst = next(row for row in rows if row["model"] == "tapfm-pocket + ABMIL (FT)" and row["cohort"] == "test")
    assert (best["rank"], worst["rank"]) == ("1", "3")
    assert best["p_holm"] == ""
    assert float(worst["difference_to_best"]) == pytest.approx(float(worst["auc"]) - float(best["auc"]))
    assert float(worst["difference_to_best"]) < 0
    assert float(worst["ci_low"]) < float(worst["auc"]) < float(worst["ci_high"])
    assert 0 < float(worst["p_holm"]) <= 1


def test_equal_models_have_the_same_rank():
    study = make_study(aggregators=["abmil", "mean"])
    comparison = compare_fake_study(study, (1.0, 1.0, 0.2))
    assert [model.aucs["test", "FGFR3"].rank for model in comparison.models] == [1, 1, 3]
    assert "<u>" not in format_markdown(study, comparison)


def test_seeds_are_averaged_with_their_standard_deviation():
    study = make_study(seeds=[0, 1, 2])
    comparison = compare_fake_study(study, (0.5, 1.0), seeds=3)
    compared = comparison.models[0].aucs["test", "FGFR3"]
    assert compared.seeds == 3
    assert compared.seed_sd > 0
    assert compared.auc.low < compared.auc.value < compared.auc.high
    assert "(at most 3)" in format_markdown(study, comparison)


def test_colour_baseline_has_a_row_and_can_be_the_best():
    study = make_study()
    comparison = compare_fake_study(study, (0.1, 0.5), baseline=3.0)
    assert comparison.models[-1].title == "colour baseline"
    assert comparison.models[-1].aucs["test", "FGFR3"].rank == 1
    assert ("external", "FGFR3") not in comparison.models[-1].aucs
    assert "| *Without an encoder* |" in format_markdown(study, comparison)


def test_best_model_is_chosen_on_common_patients():
    """The first model is the best on its own patients, but not on the patients that both models have."""
    study = make_study(methods=["tapfm"], tapfm_aggregators=["cls-attention", "mean"])
    good, fair = make_predictions(3.0), make_predictions(1.0)
    swapped = [dataclasses.replace(each, logits={"FGFR3": -each.logits["FGFR3"]}) for each in good[:10]]
    predictions = (swapped + good[10:], fair[:10])
    models = [
        ModelResult(model, {"r": make_history([1.0])}, {"test": [slides]})
        for model, slides in zip(list_models(study), predictions, strict=True)
    ]
    comparison = compare_study(StudyResults(study, StudyFolder(Path()), models, {}))
    assert comparison.patients == {("test", "FGFR3"): 10}
    assert [model.aucs["test", "FGFR3"].rank for model in comparison.models] == [2, 1]
    assert "tapfm-pocket/tapfm/cls-attention" in comparison.notes[0]
    assert comparison.notes[0].endswith(": 20.")


def test_multilabel_table_has_macro_average_and_cohorts_below_each_other():
    targets = ("EGFR", "KRAS")
    study = make_study(targets=list(targets))
    comparison = compare_fake_study(study, (0.5, 1.0), targets=targets)
    aucs = comparison.models[0].aucs
    mean = (aucs["test", "EGFR"].auc.value + aucs["test", "KRAS"].auc.value) / 2
    assert aucs["test", "macro"].auc.value == pytest.approx(mean)
    table = wide_table(comparison, study)
    assert [column.title for column in table.columns] == ["Model", "EGFR", "KRAS", "Macro average"]
    assert [row.heading for row in table.rows if row.heading_level == 1] == ["Test (N = 30)", "External (N = 30)"]
    assert r"\multicolumn{4}{c}{\textbf{External (N = 30)}}" in latex_table(table, "c", "l")


def test_separate_models_have_one_column_per_target():
    study = make_study(targets=["EGFR", "KRAS"], task="binary", methods=["tapfm"])
    models = [
        ModelResult(model, {"r": make_history([1.0])}, {"test": [make_predictions(strength, targets=(model.target,))]})
        for model, strength in zip(list_models(study), (0.5, 2.0), strict=True)
    ]
    results = StudyResults(study, StudyFolder(Path()), models, {})
    comparison = compare_study(results)
    assert list(comparison.patients) == [("test", "EGFR"), ("test", "KRAS")]
    (model,) = comparison.models
    assert len(model.aucs) == 2
    assert [panel.title for panel in roc_figure(results).panels] == ["EGFR, Test", "KRAS, Test"]
    assert costs_table(results).rows[0].cells[0].value == "EGFR: tapfm-pocket (TAPFM)"


def test_undefined_auc_is_a_dash_with_a_reason():
    study = make_study(methods=["tapfm"])
    one_class = [each for each in make_predictions(1.0) if each.labels["FGFR3"] == 1]
    (model,) = list_models(study)
    results = StudyResults(
        study, StudyFolder(Path()), [ModelResult(model, {"r": make_history([1.0])}, {"test": [one_class]})], {}
    )
    comparison = compare_study(results)
    text = format_markdown(study, comparison)
    assert "| tapfm-pocket (TAPFM) | - <sup>1</sup> |" in text
    assert "no negative" in text
    assert "--" in latex_table(wide_table(comparison, study), "c", "l")
    assert "no negative" in csv_rows(tidy_table(comparison))[0]["reason"]
    assert roc_figure(results).panels[0].why_empty


def test_missing_interval_has_a_reason():
    study = make_study()
    comparison = compare_fake_study(study, (0.5, 50.0))
    (reason,) = list_reasons(wide_table(comparison, study))
    assert "all resamples give the same value" in reason


def test_tables_are_empty_without_finished_runs():
    study = make_study()
    results = StudyResults(study, StudyFolder(Path()), [], {})
    comparison = compare_study(results)
    tables = [tidy_table(comparison), wide_table(comparison, study), costs_table(results), ablation_table([])]
    assert not any(
        table.rows for table in [*tables, stability_means_table([]), stability_runs_table([]), forgetting_table([])]
    )
    assert roc_figure(results) is None


def test_latex_is_valid_and_escaped(tmp_path):
    study = make_study(aggregators=["abmil", "mean"])
    comparison = compare_fake_study(study, (0.5, 1.0, 2.0), baseline=0.1)
    text = latex_table(wide_table(comparison, study), "A_study: 95% & more", "comparison")
    body = text.replace(r"\{", "").replace(r"\}", "")
    assert body.count("{") == body.count("}")
    assert r"A\_study: 95\% \& more" in text
    for line in text.splitlines():
        if line.endswith(r"\\") and "multicolumn" not in line and line.startswith(("tapfm", "colours")):
            assert line.count("&") == 2
    assert r"\textbf{" in text
    assert r"\underline{" in text
    if shutil.which("pdflatex"):
        packages = r"\usepackage{booktabs,multirow,graphicx}"
        (tmp_path / "t.tex").write_text(rf"\documentclass{{article}}{packages}\begin{{document}}{text}\end{{document}}")
        compiled = subprocess.run(
            ["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, capture_output=True, check=False
        )
        assert compiled.returncode == 0, compiled.stdout


def test_csv_markdown_and_latex_have_the_same_values():
    study = make_study(aggregators=["abmil", "mean"], targets=["EGFR", "KRAS"])
    comparison = compare_fake_study(study, (0.5, 1.0, 2.0), baseline=0.1, targets=("EGFR", "KRAS"))
    table = wide_table(comparison, study)
    texts = markdown_table(table), latex_table(table, "c", "l")
    rows = csv_rows(tidy_table(comparison))
    assert len(rows) == 3 * 6 + 3  # three models in two cohorts, and the baseline in one
    for row in rows:
        for text in texts:
            lines = [line for line in text.splitlines() if row["model"] in line]
            expected = [f"{float(row['auc']):.4f}", *(f"{float(row[name]):.3f}" for name in ("ci_low", "ci_high"))]
            assert any(all(number in line for number in expected) for line in lines)


def test_costs_are_means_and_maximum_memory():
    results = make_results(make_study(methods=["tapfm"]), (1.0,), losses=(1.0, 0.9, 0.8))
    (row,) = csv_rows(costs_table(results))
    assert float(row["best_epoch"]) == 3
    assert float(row["seconds"]) == 6
    assert float(row["seconds_per_epoch"]) == 2
    assert float(row["peak_memory_gib"]) == pytest.approx(0.7)


def test_roc_curves_have_the_right_points_and_area():
    results = make_results(make_study(), (0.0, 50.0), baseline=1.0)
    test, external = roc_figure(results).panels
    assert [mark.label for mark in test.marks] == [
        "",
        "tapfm-pocket + ABMIL (FT)",
        "tapfm-pocket (TAPFM)",
        "colour baseline",
    ]
    assert len(external.marks) == 3
    perfect = test.marks[2]
    assert (perfect.x, perfect.y) == ([0, 0, 1], [0, 1, 1])
    area = np.trapezoid(test.marks[1].y, test.marks[1].x)
    assert area == pytest.approx(compare_study(results).models[0].aucs["test", "FGFR3"].auc.value, abs=1e-4)


def test_many_models_are_labelled_by_method():
    study = make_study(methods=["finetune"], variants=[{"name": f"v{i}"} for i in range(16)])
    results = make_results(study, [1.0] * 16)
    for figure in (roc_figure(results), curves_figure(results)):
        for panel in figure.panels:
            assert [mark.label for mark in panel.marks if mark.label] == ["finetune"]


def test_folds_are_pooled_and_a_patient_in_two_folds_is_an_error(tmp_path):
    predictions = make_predictions(1.0, count=6)
    write_predictions(tmp_path / "a.csv", predictions[:3])
    write_predictions(tmp_path / "b.csv", predictions[3:])
    assert len(pool_folds([tmp_path / "a.csv", tmp_path / "b.csv"])) == 6
    write_predictions(tmp_path / "b.csv", predictions[2:])
    with pytest.raises(InputError, match=r"Patient p2 .* two folds"):
        pool_folds([tmp_path / "a.csv", tmp_path / "b.csv"])


def test_ablation_fit_has_the_right_slope():
    variants = [{"name": f"{rate}", "settings": {"adaptation": {"lambda": rate}}} for rate in (0.25, 1.0)]
    study = make_study(methods=["tapfm"], report="ablation", variants=variants, seeds=[0, 1])
    losses = [math.exp(0.3 - 0.07 * epoch) for epoch in range(1, 26)]
    results = make_results(study, (0.5, 1.0), losses=losses, seeds=2)
    comparison = compare_study(results)
    first, second = fit_losses(results, comparison)
    assert first.fit.b == pytest.approx(-0.07)
    assert (first.fit.epochs_used[0], first.fit.epochs_used[-1]) == (2, 20)
    assert first.test == comparison.models[0].aucs["test", "FGFR3"].auc
    assert second.test.value > first.test.value
    assert first.val_auc == pytest.approx(0.74)
    table = ablation_table([first])
    (row,) = csv_rows(table)
    assert float(row["r_squared"]) == pytest.approx(1.0)
    assert float(row["b_low"]) <= float(row["b"]) <= float(row["b_high"])
    assert float(row["test_auc_low"]) == first.test.low
    assert "-0.0700" in markdown_table(table)
    labels = [mark.label for mark in log_losses_figure([first, second]).panels[0].marks]
    assert labels == ["", "0.25: b = -0.0700", "", "1.0: b = -0.0700"]


def test_too_few_epochs_have_no_fit_but_a_reason():
    variants = [{"name": "a", "settings": {"adaptation": {"lambda": 1.0}}}]
    results = make_results(
        make_study(methods=["tapfm"], report="ablation", variants=variants), (0.5,), losses=(1.0, 0.9)
    )
    fits = fit_losses(results, compare_study(results))
    text = markdown_table(ablation_table(fits))
    assert "<sup>1</sup>" in text
    assert "a fit needs at least 3" in text
    assert [mark.label for mark in log_losses_figure(fits).panels[0].marks] == ["a"]


def test_stability_measures_are_lower_for_a_smooth_loss():
    epochs = range(1, 12)
    smooth = measure_history(make_history([math.exp(-0.1 * epoch) for epoch in epochs]))
    noisy = measure_history(
        make_history(
            [math.exp(-0.1 * epoch + 0.2 * (-1) ** epoch) for epoch in epochs],
            norm_encoder=[1.0 + e % 2 for e in epochs],
        )
    )
    assert smooth["residual_sd"] == pytest.approx(0, abs=1e-9)
    assert smooth["mean_abs_change"] == pytest.approx(0.1)
    assert (smooth["increase_fraction"], smooth["grad_norm_cv"]) == (0, 0)
    assert all(noisy[name] > smooth[name] for name in smooth)
    assert measure_history(make_history([1.0, 0.5])) == dict.fromkeys(smooth)


def test_stability_compares_runs_of_the_same_seed():
    variants = [{"name": each, "settings": {"adaptation": {"bag_gradient": each}}} for each in ORDERS]
    study = make_study(methods=["tapfm"], report="stability", variants=variants, seeds=[0, 1])
    runs = measure_stability(make_results(study, (1.0, 1.0, 1.0), seeds=2, losses=(1.0, 0.9, 0.8, 0.7)))
    assert [run.order for run in runs] == [order for order in ORDERS for _ in (0, 1)]
    assert len({run.group for run in runs}) == 2
    assert [row["order"] for row in csv_rows(stability_runs_table(runs))] == [run.order for run in runs]
    table = stability_means_table(runs)
    counts = [cell_text(cell, column) for cell, column in zip(table.rows[-1].cells, table.columns, strict=True)]
    assert counts == ["runs", "2", "2", "2"]


def make_stability_runs(joint, before, after, seed=0):
    """Return one run per order, with the same value for all measures."""
    values = {"joint": joint, "before": before, "after": after}
    return [
        RunStability(order, f"{order}/seed{seed}", (seed,), dict.fromkeys(MEASURES, value))
        for order, value in values.items()
    ]


@pytest.mark.parametrize(
    ("values", "conclusion"),
    [
        ((3.0, 1.0, 2.0), "runs support"),
        ((0.5, 1.0, 2.0), "runs contradict"),
        ((1.5, 1.0, 2.0), "neither support nor contradict"),
        ((2.0, 2.0, 1.0), "neither support nor contradict"),
    ],
)
def test_stability_conclusion(values, conclusion):
    sentences = describe_stability([each for seed in range(5) for each in make_stability_runs(*values, seed=seed)])
    assert conclusion in sentences[-1]
    assert "chance" not in sentences[-1]
    assert "chance" in describe_stability(make_stability_runs(*values))[-1]


def test_seeds_that_disagree_are_inconclusive():
    sentences = describe_stability(make_stability_runs(3.0, 1.0, 2.0) + make_stability_runs(0.5, 1.0, 2.0, seed=1))
    assert "neither support nor contradict" in sentences[-1]
    assert "highest value in 1 of 2" in sentences[1]
    incomplete = describe_stability(make_stability_runs(1.0, 1.0, 1.0)[:2])
    assert len(incomplete) == 2, "the claim, and that there is nothing to compare"


@pytest.mark.parametrize("classes", [2, 3])
def test_probe_is_multinomial_logistic_regression_with_penalty_1(classes):
    rng = np.random.default_rng(0)
    truth = rng.integers(0, classes, 90)
    features = rng.normal(size=(90, 5)) + truth[:, None] * np.array([2.0, -1.0, 0.0, 0.2, 0.0])
    probabilities = predict_with_probe(features, truth, features, classes)
    residuals = probabilities - np.eye(classes)[truth]
    np.testing.assert_allclose(residuals.sum(0), 0, atol=1e-4)  # intercepts have no penalty
    standardised = (features - features.mean(0)) / features.std(0)
    # at the minimum of the loss, the weights follow from the residuals: logits - features @ weights are intercepts
    rest = np.log(probabilities) + standardised @ standardised.T @ residuals
    intercepts = rest - rest.mean(1, keepdims=True)
    np.testing.assert_allclose(intercepts, np.broadcast_to(intercepts[0], intercepts.shape), atol=1e-3)
    predicted = predict_with_probe(features[:60], truth[:60], features[60:], classes)
    assert np.mean(predicted.argmax(1) == truth[60:]) > 0.5


def test_drift_is_zero_for_equal_features_and_cka_ignores_rotation_and_scale():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 6))
    rotation, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    assert cosine_distance(features, features) == pytest.approx(0)
    assert cosine_distance(features, -features) == pytest.approx(2)
    assert linear_cka(features, 3 * features @ rotation) == pytest.approx(1)
    assert linear_cka(features, rng.normal(size=(40, 6))) < 0.5


def write_probe_file(path, correct_after, classes=2, count=20):
    """Write a probe that is correct for all tiles before adaptation, and for the first `correct_after` tiles after."""
    truth = [i % classes for i in range(count)]
    before = (np.eye(classes)[truth] * 0.8 + 0.1).tolist()
    after = [row if i < correct_after else row[::-1] for i, row in enumerate(before)]
    probe = {"classes": ["a", "b"], "train": 9, "test": [], "truth": truth, "before": before, "after": after}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(probe | {"cosine_distance": 0.25, "linear_cka": 0.75}))


def test_forgetting_is_measured_and_compared_between_models(tmp_path):
    study = make_study(report="forgetting", probe={"tiles": "t"}, seeds=[0])
    results = make_results(study, (0.5, 1.0), folder=tmp_path)
    finetune, tapfm = (PlannedRun(model, 0, None) for model in list_models(study))
    write_probe_file(StudyFolder(tmp_path).probe(finetune), correct_after=8)
    write_probe_file(StudyFolder(tmp_path).probe(tapfm), correct_after=20)
    probes = summarise_probes(results)
    assert probes[0].estimates["accuracy", "change"].value == pytest.approx(-0.6)
    assert probes[1].estimates["accuracy", "change"].value == 0
    sentences = describe_forgetting(probes)
    assert sentences[0].startswith("tapfm-pocket + ABMIL (FT): accuracy decreased, -0.600")
    assert sentences[1].startswith("tapfm-pocket (TAPFM): no significant change")
    assert "tapfm-pocket (TAPFM) is higher than that of tapfm-pocket + ABMIL (FT): +0.600" in sentences[2]
    table = forgetting_table(probes)
    rows = csv_rows(table)
    assert float(rows[0]["linear_cka"]) == 0.75
    assert float(rows[0]["auc_before"]) == 1
    assert "| -0.600 (" in markdown_table(table)


def test_resampling_tiles_preserves_class_sizes():
    truth = np.array([0, 0, 0, 1, 1, 2])
    counts = resample_tiles(truth, 50)
    for label, size in ((0, 3), (1, 2), (2, 1)):
        assert (counts[:, truth == label].sum(1) == size).all()
    assert len(np.unique(counts, axis=0)) > 5


def test_probe_tiles_have_two_layouts_and_missing_classes_are_an_error(tmp_path):
    for name in ("a", "b"):
        for number in range(6):
            path = tmp_path / "plain" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    tiles = find_probe_tiles(tmp_path / "plain", seed=1)
    assert tiles.classes == ("a", "b")
    assert (len(tiles.train), len(tiles.test)) == (6, 6)
    assert not {each.path for each in tiles.train} & {each.path for each in tiles.test}
    assert find_probe_tiles(tmp_path / "plain", seed=1) == tiles
    assert find_probe_tiles(tmp_path / "plain", seed=2) != tiles
    shutil.copytree(tmp_path / "plain", tmp_path / "split" / "train")
    shutil.copytree(tmp_path / "plain", tmp_path / "split" / "test")
    assert len(find_probe_tiles(tmp_path / "split").test) == 12
    shutil.rmtree(tmp_path / "plain" / "b")
    with pytest.raises(InputError, match="at least 2 classes"):
        find_probe_tiles(tmp_path / "plain")
    with pytest.raises(InputError, match="no folder"):
        find_probe_tiles(tmp_path / "absent")


def headline_rows(results):
    return {row.model: row for row in read_headline_rows(csv_rows(tidy_table(compare_study(results))))}


def test_model_is_chosen_on_validation_not_on_test():
    study = make_study(aggregators=["abmil", "mean"])
    results = make_results(study, (0.5, 1.0, 2.0), validation=(1.0, 2.5, 0.5), baseline=3.0)
    comparison = compare_study(results)
    assert comparison.chosen == {"FGFR3": "tapfm-pocket/finetune/mean"}
    rows = headline_rows(results)
    assert [row.chosen for row in rows.values()] == [False, True, False, False]
    chosen = rows["tapfm-pocket + mean (FT)"]
    expected = compute_scores(make_predictions(2.5, seed=50, count=20, split="val"), target_kinds(["FGFR3"]), "slide")
    assert chosen.aucs["Validation"].auc.value == pytest.approx(expected.auc["FGFR3"])
    assert chosen.aucs["Validation"].auc.low < chosen.aucs["Validation"].auc.value
    assert (chosen.aucs["Validation"].patients, chosen.aucs["Test"].patients) == (20, 30)
    assert "Validation" not in rows["colour baseline"].aucs
    table = build_study_headline(list(rows.values()), with_choice=True)
    assert [cell.rank for cell in table.rows[1].cells] == [1, 0, 1, 1]
    assert not any(cell.rank for row in (table.rows[0], *table.rows[2:]) for cell in row.cells)
    assert table.notes[0].startswith("Chosen on validation: tapfm-pocket + mean (FT). AUC: validation 0.")
    assert "; test 0." in table.notes[0]


def test_validation_auc_is_the_mean_over_seeds():
    study = make_study(seeds=[0, 1, 2])
    results = make_results(study, (0.5, 1.0), seeds=3, validation=(0.5, 1.0))
    (first, _) = headline_rows(results).values()
    aucs = [
        compute_scores(each, target_kinds(["FGFR3"]), "slide").auc["FGFR3"]
        for each in results.models[0].validation.values()
    ]
    assert len(set(aucs)) == 3
    assert first.aucs["Validation"].auc.value == pytest.approx(sum(aucs) / 3)
    assert first.detail == "fine-tuned encoder, 3 runs"


def test_validation_auc_of_folds_is_the_mean_over_runs_with_different_patients():
    study = make_study(folds=[0, 1], methods=["finetune", "tapfm"])
    models = []
    for model, strength in zip(list_models(study), (0.5, 2.0), strict=True):
        folds = {
            PlannedRun(model, 0, fold).name: [
                dataclasses.replace(each, slide_id=f"f{fold}-{each.slide_id}", patient_id=f"f{fold}-{each.patient_id}")
                for each in make_predictions(strength, seed=fold, count=12, split="val")
            ]
            for fold in study.folds
        }
        histories = {name: make_history((1.0,)) for name in folds}
        models.append(ModelResult(model, histories, {"test": [make_predictions(1.0)]}, folds))
    results = StudyResults(study, StudyFolder(Path()), models, {})
    rows = headline_rows(results)
    assert [row.chosen for row in rows.values()] == [False, True]
    measured = rows["tapfm-pocket (TAPFM)"].aucs["Validation"]
    kinds = target_kinds(["FGFR3"])
    aucs = [compute_scores(each, kinds, "slide").auc["FGFR3"] for each in models[1].validation.values()]
    assert measured.auc.value == pytest.approx(sum(aucs) / 2)
    assert (measured.patients, measured.auc.low) == (24, None)
    assert "mean over folds" in measured.auc.reason


def test_equal_validation_aucs_are_decided_by_the_validation_loss():
    study = make_study()
    results = make_results(study, (0.5, 1.0), validation=(1.0, 1.0))
    assert compare_study(results).chosen == {"FGFR3": "tapfm-pocket/finetune/abmil"}, "the first without losses"
    models = []
    for each, loss in zip(results.models, (0.7, 0.6), strict=True):
        histories = {name: [row | {"val_loss": loss} for row in rows] for name, rows in each.histories.items()}
        models.append(dataclasses.replace(each, histories=histories))
    results = dataclasses.replace(results, models=models)
    assert compare_study(results).chosen == {"FGFR3": "tapfm-pocket/tapfm/cls-attention"}


def test_each_target_has_its_own_choice():
    study = make_study(targets=["EGFR", "KRAS"], task="binary")
    models = []
    for model, strength in zip(list_models(study), (2.0, 0.2, 0.2, 2.0), strict=True):
        name, targets = PlannedRun(model, 0, None).name, (model.target,)
        validation = {name: make_predictions(strength, seed=9, targets=targets, split="val")}
        test = {"test": [make_predictions(1.0, targets=targets)]}
        models.append(ModelResult(model, {name: make_history((1.0,))}, test, validation))
    results = StudyResults(study, StudyFolder(Path()), models, {})
    assert compare_study(results).chosen == {
        "EGFR": "tapfm-pocket/finetune/abmil",
        "KRAS": "tapfm-pocket/tapfm/cls-attention",
    }
    rows = read_headline_rows(csv_rows(tidy_table(compare_study(results))))
    table = build_study_headline(rows, with_choice=True)
    assert [row.heading for row in table.rows] == ["EGFR", "", "", "KRAS", "", ""]
    assert [note.split(".")[0] for note in table.notes[:2]] == [
        "Chosen on validation for EGFR: tapfm-pocket + ABMIL (FT)",
        "Chosen on validation for KRAS: tapfm-pocket (TAPFM)",
    ]


def test_headline_of_several_targets_has_their_mean():
    study = make_study(targets=["EGFR", "KRAS"])
    results = make_results(study, (0.5, 1.0), validation=(2.0, 0.1), targets=("EGFR", "KRAS"))
    rows = read_headline_rows(csv_rows(tidy_table(compare_study(results))))
    assert [row.target for row in rows] == ["macro", "macro"]
    assert [row.chosen for row in rows] == [True, False]


def test_without_validation_slides_no_model_is_chosen():
    study = make_study()
    rows = read_headline_rows(csv_rows(tidy_table(compare_fake_study(study, (0.5, 1.0)))))
    assert not any(row.chosen for row in rows)
    notes = build_study_headline(rows, with_choice=True).notes
    assert notes == ["No model is chosen, because there are no validation AUCs."]


def test_a_single_model_is_described_without_a_choice():
    study = make_study(methods=["tapfm"])
    rows = read_headline_rows(csv_rows(tidy_table(compare_fake_study(study, (1.0,), validation=(1.0,), baseline=0.1))))
    assert not any(row.chosen for row in rows)
    table = build_study_headline(rows, with_choice=True)
    assert table.notes[0].startswith("tapfm-pocket (TAPFM). AUC: validation 0.")
    assert "hosen" not in " ".join(table.notes)


def test_patients_and_slides_are_counted(tmp_path):
    study = make_study(unit="patient")
    predictions = [dataclasses.replace(each, patient_id=f"p{i // 4}") for i, each in enumerate(make_predictions(1.0))]
    predictions = [dataclasses.replace(each, labels={"FGFR3": int(each.patient_id[1:]) % 2}) for each in predictions]
    models = [
        ModelResult(model, {PlannedRun(model, 0, None).name: make_history((1.0,))}, {"test": [predictions]})
        for model in list_models(study)
    ]
    (row, *_) = headline_rows(StudyResults(study, StudyFolder(tmp_path), models, {})).values()
    assert row.aucs["Test"].describe_size() == "8 patients, 30 slides"
