"""Tables, figures, fits and conclusions of a study, from made-up results."""

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
from study_results import a_study, history, predictions, results_of

from tapfm.errors import InputError
from tapfm.evaluation.predictions import write_predictions
from tapfm.results.latex import latex_table
from tapfm.results.markdown import markdown_table
from tapfm.results.table import cell_text, list_reasons, table_csv
from tapfm.study.ablation import ablation_table, fit_losses
from tapfm.study.comparison import compare_study, tidy_table, wide_table
from tapfm.study.costs import costs_table
from tapfm.study.figures import curves_figure, log_losses_figure, roc_figure
from tapfm.study.folder import StudyFolder
from tapfm.study.forgetting import (
    _draw_tiles as draw_tiles,
)
from tapfm.study.forgetting import (
    describe_forgetting,
    forgetting_table,
    summarise_probes,
)
from tapfm.study.probe import _cosine_distance as cosine_distance
from tapfm.study.probe import _linear_cka as linear_cka
from tapfm.study.probe import _probe as probe
from tapfm.study.probe_tiles import find_probe_tiles
from tapfm.study.results import MethodResult, StudyResults
from tapfm.study.results import _pool_folds as pool_folds
from tapfm.study.runs import PlannedRun, list_methods
from tapfm.study.stability import (
    Trajectory,
    describe_stability,
    means_table,
    measure_trajectories,
    runs_table,
)
from tapfm.study.stability import (
    _measure_history as measure_history,
)

ORDERS = ("before", "after", "joint")


def rows_of(table):
    return list(csv.DictReader(io.StringIO(table_csv(table))))


def comparison_of(study, *given, **more):
    return compare_study(results_of(study, *given, **more))


def markdown_of(study, comparison):
    return markdown_table(wide_table(comparison, study))


def test_the_best_is_bold_the_second_underlined_and_tests_are_against_the_best():
    study = a_study(aggregators=["abmil", "mean"])
    comparison = comparison_of(study, (0.5, 1.0, 2.0))
    text = markdown_of(study, comparison)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert lines["tapfm-pocket (TAPFM)"].count("**") == 4  # test and external
    assert lines["tapfm-pocket + mean (FT)"].count("<u>") == 2
    assert "p = " not in lines["tapfm-pocket (TAPFM)"]
    assert "p = " in lines["tapfm-pocket + ABMIL (FT)"]
    assert "*Fine-tuned (FT) encoder with MIL aggregators*" in text
    assert "| Model | FGFR3, Test (N = 30) | FGFR3, External (N = 30) |" in text
    rows = rows_of(tidy_table(comparison))
    best = next(row for row in rows if row["model"] == "tapfm-pocket (TAPFM)" and row["cohort"] == "test")
    worst = next(row for row in rows if row["model"] == "tapfm-pocket + ABMIL (FT)" and row["cohort"] == "test")
    assert (best["rank"], worst["rank"]) == ("1", "3")
    assert best["p_holm"] == ""
    assert float(worst["difference_to_best"]) == pytest.approx(float(worst["auc"]) - float(best["auc"]))
    assert float(worst["difference_to_best"]) < 0
    assert float(worst["ci_low"]) < float(worst["auc"]) < float(worst["ci_high"])
    assert 0 < float(worst["p_holm"]) <= 1


def test_equal_methods_share_a_rank():
    study = a_study(aggregators=["abmil", "mean"])
    comparison = comparison_of(study, (1.0, 1.0, 0.2))
    assert [method.aucs["test", "FGFR3"].rank for method in comparison.methods] == [1, 1, 3]
    assert "<u>" not in markdown_of(study, comparison)


def test_seeds_are_averaged_and_their_spread_is_told():
    study = a_study(seeds=[0, 1, 2])
    comparison = comparison_of(study, (0.5, 1.0), seeds=3)
    found = comparison.methods[0].aucs["test", "FGFR3"]
    assert found.seeds == 3
    assert found.seed_sd > 0
    assert found.auc.low < found.auc.value < found.auc.high
    assert "means over 3 seeds" in markdown_of(study, comparison)


def test_the_colour_baseline_has_a_row_and_may_be_the_best():
    study = a_study()
    comparison = comparison_of(study, (0.1, 0.5), baseline=3.0)
    assert comparison.methods[-1].title == "colours and tile count"
    assert comparison.methods[-1].aucs["test", "FGFR3"].rank == 1
    assert ("external", "FGFR3") not in comparison.methods[-1].aucs
    assert "| *Without an encoder* |" in markdown_of(study, comparison)


def test_the_best_is_that_of_the_patients_that_all_methods_have():
    """The first method is the best on its own patients, not on those that both have."""
    study = a_study(regimes=["tapfm"], tapfm_aggregators=["cls-attention", "mean"])
    good, fair = predictions(3.0), predictions(1.0)
    swapped = [dataclasses.replace(each, logits={"FGFR3": -each.logits["FGFR3"]}) for each in good[:10]]
    made = (swapped + good[10:], fair[:10])
    methods = [
        MethodResult(method, {"r": history([1.0])}, {"test": [slides]})
        for method, slides in zip(list_methods(study), made, strict=True)
    ]
    comparison = compare_study(StudyResults(study, StudyFolder(Path()), methods, {}))
    assert comparison.patients == {("test", "FGFR3"): 10}
    assert [method.aucs["test", "FGFR3"].rank for method in comparison.methods] == [2, 1]
    assert "20 patients of tapfm-pocket/tapfm/cls-attention are not counted" in comparison.notes[0]


def test_several_targets_of_one_model_have_their_mean_and_one_cohort_below_the_other():
    targets = ("EGFR", "KRAS")
    study = a_study(targets=list(targets))
    comparison = comparison_of(study, (0.5, 1.0), targets=targets)
    aucs = comparison.methods[0].aucs
    mean = (aucs["test", "EGFR"].auc.value + aucs["test", "KRAS"].auc.value) / 2
    assert aucs["test", "macro"].auc.value == pytest.approx(mean)
    table = wide_table(comparison, study)
    assert [column.title for column in table.columns] == ["Model", "EGFR", "KRAS", "Macro average"]
    assert [row.heading for row in table.rows if row.level == 1] == ["Test (N = 30)", "External (N = 30)"]
    assert r"\multicolumn{4}{c}{\textbf{External (N = 30)}}" in latex_table(table, "c", "l")


def test_a_model_for_each_target_has_a_column_for_each():
    study = a_study(targets=["EGFR", "KRAS"], task="binary", regimes=["tapfm"])
    methods = [
        MethodResult(method, {"r": history([1.0])}, {"test": [predictions(strength, targets=(method.target,))]})
        for method, strength in zip(list_methods(study), (0.5, 2.0), strict=True)
    ]
    results = StudyResults(study, StudyFolder(Path()), methods, {})
    comparison = compare_study(results)
    assert list(comparison.patients) == [("test", "EGFR"), ("test", "KRAS")]
    (method,) = comparison.methods
    assert len(method.aucs) == 2
    assert [panel.title for panel in roc_figure(results).panels] == ["EGFR, Test", "KRAS, Test"]
    assert costs_table(results).rows[0].cells[0].value == "EGFR: tapfm-pocket (TAPFM)"


def test_an_auc_that_is_undefined_is_a_dash_and_says_why():
    study = a_study(regimes=["tapfm"])
    one_class = [each for each in predictions(1.0) if each.labels["FGFR3"] == 1]
    (method,) = list_methods(study)
    results = StudyResults(
        study, StudyFolder(Path()), [MethodResult(method, {"r": history([1.0])}, {"test": [one_class]})], {}
    )
    comparison = compare_study(results)
    text = markdown_of(study, comparison)
    assert "| tapfm-pocket (TAPFM) | - <sup>1</sup> |" in text
    assert "no negative" in text
    assert "--" in latex_table(wide_table(comparison, study), "c", "l")
    assert "no negative" in rows_of(tidy_table(comparison))[0]["reason"]
    assert roc_figure(results).panels[0].why_empty


def test_an_interval_that_is_missing_says_why():
    study = a_study()
    comparison = comparison_of(study, (0.5, 50.0))
    (reason,) = list_reasons(wide_table(comparison, study))
    assert "all resamples give the same value" in reason


def test_nothing_finished_makes_tables_without_rows():
    study = a_study()
    results = StudyResults(study, StudyFolder(Path()), [], {})
    comparison = compare_study(results)
    tables = [tidy_table(comparison), wide_table(comparison, study), costs_table(results), ablation_table([])]
    assert not any(table.rows for table in [*tables, means_table([]), runs_table([]), forgetting_table([])])
    assert roc_figure(results) is None


def test_latex_is_balanced_and_escaped(tmp_path):
    study = a_study(aggregators=["abmil", "mean"])
    comparison = comparison_of(study, (0.5, 1.0, 2.0), baseline=0.1)
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
        made = subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, capture_output=True, check=False)
        assert made.returncode == 0, made.stdout


def test_csv_markdown_and_latex_have_the_same_numbers():
    study = a_study(aggregators=["abmil", "mean"], targets=["EGFR", "KRAS"])
    comparison = comparison_of(study, (0.5, 1.0, 2.0), baseline=0.1, targets=("EGFR", "KRAS"))
    table = wide_table(comparison, study)
    texts = markdown_table(table), latex_table(table, "c", "l")
    rows = rows_of(tidy_table(comparison))
    assert len(rows) == 3 * 6 + 3  # three methods in two cohorts; the baseline in one
    for row in rows:
        for text in texts:
            lines = [line for line in text.splitlines() if row["model"] in line]
            wanted = [f"{float(row['auc']):.4f}", *(f"{float(row[name]):.3f}" for name in ("ci_low", "ci_high"))]
            assert any(all(number in line for number in wanted) for line in lines)


def test_costs_are_means_and_the_highest_memory():
    results = results_of(a_study(regimes=["tapfm"]), (1.0,), losses=(1.0, 0.9, 0.8))
    (row,) = rows_of(costs_table(results))
    assert float(row["best_epoch"]) == 3
    assert float(row["seconds"]) == 6
    assert float(row["seconds_per_epoch"]) == 2
    assert float(row["peak_memory_gib"]) == pytest.approx(0.7)


def test_roc_curves_pass_through_the_points_where_they_turn():
    results = results_of(a_study(), (0.0, 50.0), baseline=1.0)
    test, external = roc_figure(results).panels
    assert [mark.label for mark in test.marks] == [
        "",
        "tapfm-pocket + ABMIL (FT)",
        "tapfm-pocket (TAPFM)",
        "colours and tile count",
    ]
    assert len(external.marks) == 3
    perfect = test.marks[2]
    assert (perfect.x, perfect.y) == ([0, 0, 1], [0, 1, 1])
    area = np.trapezoid(test.marks[1].y, test.marks[1].x)
    assert area == pytest.approx(compare_study(results).methods[0].aucs["test", "FGFR3"].auc.value, abs=1e-4)


def test_of_many_methods_regimes_are_named_once():
    study = a_study(regimes=["finetune"], variants=[{"name": f"v{i}"} for i in range(16)])
    results = results_of(study, [1.0] * 16)
    for figure in (roc_figure(results), curves_figure(results)):
        for panel in figure.panels:
            assert [mark.label for mark in panel.marks if mark.label] == ["finetune"]


def test_predictions_of_folds_are_pooled_and_a_patient_in_two_is_refused(tmp_path):
    made = predictions(1.0, count=6)
    write_predictions(tmp_path / "a.csv", made[:3])
    write_predictions(tmp_path / "b.csv", made[3:])
    assert len(pool_folds([tmp_path / "a.csv", tmp_path / "b.csv"])) == 6
    write_predictions(tmp_path / "b.csv", made[2:])
    with pytest.raises(InputError, match="Patient p2 is tested in two folds"):
        pool_folds([tmp_path / "a.csv", tmp_path / "b.csv"])


def test_the_fit_of_an_ablation_finds_the_slope():
    variants = [{"name": f"{rate}", "settings": {"adaptation": {"lambda": rate}}} for rate in (0.25, 1.0)]
    study = a_study(regimes=["tapfm"], report="ablation", variants=variants, seeds=[0, 1])
    losses = [math.exp(0.3 - 0.07 * epoch) for epoch in range(1, 26)]
    results = results_of(study, (0.5, 1.0), losses=losses, seeds=2)
    comparison = compare_study(results)
    first, second = fit_losses(results, comparison)
    assert first.fit.b == pytest.approx(-0.07)
    assert (first.fit.epochs_used[0], first.fit.epochs_used[-1]) == (2, 20)
    assert first.test == comparison.methods[0].aucs["test", "FGFR3"].auc
    assert second.test.value > first.test.value
    assert first.val_auc == pytest.approx(0.74)
    table = ablation_table([first])
    (row,) = rows_of(table)
    assert float(row["r_squared"]) == pytest.approx(1.0)
    assert float(row["b_low"]) <= float(row["b"]) <= float(row["b_high"])
    assert float(row["test_auc_low"]) == first.test.low
    assert "-0.0700" in markdown_table(table)
    labels = [mark.label for mark in log_losses_figure([first, second]).panels[0].marks]
    assert labels == ["", "0.25: b = -0.0700", "", "1.0: b = -0.0700"]


def test_too_few_epochs_have_no_fit_and_say_so():
    variants = [{"name": "a", "settings": {"adaptation": {"lambda": 1.0}}}]
    results = results_of(a_study(regimes=["tapfm"], report="ablation", variants=variants), (0.5,), losses=(1.0, 0.9))
    fitted = fit_losses(results, compare_study(results))
    assert "<sup>1</sup> 1 of epochs 2 to 20" in markdown_table(ablation_table(fitted))
    assert [mark.label for mark in log_losses_figure(fitted).panels[0].marks] == ["a"]


def test_a_steady_run_measures_less_than_a_jumpy_one():
    epochs = range(1, 12)
    steady = measure_history(history([math.exp(-0.1 * epoch) for epoch in epochs]))
    jumpy = measure_history(
        history(
            [math.exp(-0.1 * epoch + 0.2 * (-1) ** epoch) for epoch in epochs],
            norm_encoder=[1.0 + e % 2 for e in epochs],
        )
    )
    assert steady["residual"] == pytest.approx(0, abs=1e-9)
    assert steady["step"] == pytest.approx(0.1)
    assert (steady["rises"], steady["norm_spread"]) == (0, 0)
    assert all(jumpy[name] > steady[name] for name in steady)
    assert measure_history(history([1.0, 0.5])) == dict.fromkeys(steady)


def test_runs_of_the_same_seed_are_compared():
    variants = [{"name": each, "settings": {"adaptation": {"bag_gradient": each}}} for each in ORDERS]
    study = a_study(regimes=["tapfm"], report="stability", variants=variants, seeds=[0, 1])
    trajectories = measure_trajectories(results_of(study, (1.0, 1.0, 1.0), seeds=2, losses=(1.0, 0.9, 0.8, 0.7)))
    assert [each.order for each in trajectories] == [order for order in ORDERS for _ in (0, 1)]
    assert len({each.pair for each in trajectories}) == 2
    assert [row["order"] for row in rows_of(runs_table(trajectories))] == [each.order for each in trajectories]
    counts = means_table(trajectories).rows[-1]
    assert [cell_text(cell, column) for cell, column in zip(counts.cells, means_table([]).columns, strict=True)] == [
        *("runs", "2", "2", "2")
    ]


def made_up(joint, before, after, seed=0):
    numbers = {"joint": joint, "before": before, "after": after}
    measured = ("residual", "step", "rises", "norm_spread")
    return [
        Trajectory(order, f"{order}/seed{seed}", (seed,), dict.fromkeys(measured, value))
        for order, value in numbers.items()
    ]


@pytest.mark.parametrize(
    ("numbers", "conclusion"),
    [
        ((3.0, 1.0, 2.0), "runs support"),
        ((0.5, 1.0, 2.0), "runs contradict"),
        ((1.5, 1.0, 2.0), "neither support nor contradict"),
        ((2.0, 2.0, 1.0), "neither support nor contradict"),
    ],
)
def test_the_conclusion_follows_the_numbers(numbers, conclusion):
    sentences = describe_stability([each for seed in range(5) for each in made_up(*numbers, seed=seed)])
    assert conclusion in sentences[-1]
    assert "chance" not in sentences[-1]
    assert "chance" in describe_stability(made_up(*numbers))[-1]


def test_seeds_that_disagree_settle_nothing():
    sentences = describe_stability(made_up(3.0, 1.0, 2.0) + made_up(0.5, 1.0, 2.0, seed=1))
    assert "neither support nor contradict" in sentences[-1]
    assert "joint is above both others in 1 of 2 seeds, and below both in 1" in sentences[1]
    assert describe_stability(made_up(1.0, 1.0, 1.0)[:2])[-1] == "No seed has runs of all three orders yet."


@pytest.mark.parametrize("classes", [2, 3])
def test_the_probe_is_multinomial_logistic_regression_with_a_penalty_of_1(classes):
    rng = np.random.default_rng(0)
    truth = rng.integers(0, classes, 90)
    features = rng.normal(size=(90, 5)) + truth[:, None] * np.array([2.0, -1.0, 0.0, 0.2, 0.0])
    found = probe(features, truth, features, classes)
    residuals = found - np.eye(classes)[truth]
    np.testing.assert_allclose(residuals.sum(0), 0, atol=1e-4)  # intercepts have no penalty
    standardised = (features - features.mean(0)) / features.std(0)
    # where the loss is smallest the weights are what the residuals leave, and the logits follow from them
    rest = np.log(found) + standardised @ standardised.T @ residuals
    intercepts = rest - rest.mean(1, keepdims=True)
    np.testing.assert_allclose(intercepts, np.broadcast_to(intercepts[0], intercepts.shape), atol=1e-3)
    probed = probe(features[:60], truth[:60], features[60:], classes)
    assert np.mean(probed.argmax(1) == truth[60:]) > 0.5


def test_drift_is_nothing_where_nothing_moved_and_cka_ignores_rotation_and_scale():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 6))
    turn, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    assert cosine_distance(features, features) == pytest.approx(0)
    assert cosine_distance(features, -features) == pytest.approx(2)
    assert linear_cka(features, 3 * features @ turn) == pytest.approx(1)
    assert linear_cka(features, rng.normal(size=(40, 6))) < 0.5


def probe_file(path, after_right, classes=2, count=20):
    """A probe that was right of all tiles before, and of some after."""
    truth = [i % classes for i in range(count)]
    right = np.eye(classes)[truth] * 0.8 + 0.1
    after = [row if i < after_right else row[::-1] for i, row in enumerate(right.tolist())]
    found = {"classes": ["a", "b"], "train": 9, "test": [], "truth": truth, "before": right.tolist(), "after": after}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found | {"cosine_distance": 0.25, "linear_cka": 0.75}))


def test_forgetting_is_measured_and_compared(tmp_path):
    study = a_study(report="forgetting", probe={"tiles": "t"}, seeds=[0])
    results = results_of(study, (0.5, 1.0), folder=tmp_path)
    finetune, tapfm = (PlannedRun(method, 0, None) for method in list_methods(study))
    probe_file(StudyFolder(tmp_path).probe(finetune), after_right=8)
    probe_file(StudyFolder(tmp_path).probe(tapfm), after_right=20)
    found = summarise_probes(results)
    assert found[0].found["accuracy", "change"].value == pytest.approx(-0.6)
    assert found[1].found["accuracy", "change"].value == 0
    sentences = describe_forgetting(found)
    assert sentences[0].startswith("tapfm-pocket + ABMIL (FT): accuracy fell, -0.600")
    assert sentences[1].startswith("tapfm-pocket (TAPFM): no significant change")
    assert sentences[2].startswith("tapfm-pocket (TAPFM) keeps more accuracy than tapfm-pocket + ABMIL (FT): +0.600")
    table = forgetting_table(found)
    rows = rows_of(table)
    assert float(rows[0]["linear_cka"]) == 0.75
    assert float(rows[0]["auc_before"]) == 1
    assert "| -0.600 (" in markdown_table(table)


def test_resampled_tiles_keep_the_size_of_each_class():
    truth = np.array([0, 0, 0, 1, 1, 2])
    counts = draw_tiles(truth, 50)
    for label, size in ((0, 3), (1, 2), (2, 1)):
        assert (counts[:, truth == label].sum(1) == size).all()
    assert len(np.unique(counts, axis=0)) > 5


def test_pictures_are_found_in_both_layouts_and_what_is_missing_is_told(tmp_path):
    for name in ("a", "b"):
        for number in range(6):
            path = tmp_path / "plain" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    found = find_probe_tiles(tmp_path / "plain", seed=1)
    assert found.classes == ("a", "b")
    assert (len(found.train), len(found.test)) == (6, 6)
    assert not {each.path for each in found.train} & {each.path for each in found.test}
    assert find_probe_tiles(tmp_path / "plain", seed=1) == found
    assert find_probe_tiles(tmp_path / "plain", seed=2) != found
    shutil.copytree(tmp_path / "plain", tmp_path / "split" / "train")
    shutil.copytree(tmp_path / "plain", tmp_path / "split" / "test")
    assert len(find_probe_tiles(tmp_path / "split").test) == 12
    shutil.rmtree(tmp_path / "plain" / "b")
    with pytest.raises(InputError, match="pictures of 1 classes"):
        find_probe_tiles(tmp_path / "plain")
    with pytest.raises(InputError, match="no folder"):
        find_probe_tiles(tmp_path / "absent")
