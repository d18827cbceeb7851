"""Figures and tables of an evaluation: the numbers are those that were measured; where there are none, they say why."""

import numpy as np
import pytest
from report_lab import history, predictions

from tapfm.evaluation.figures import EvaluatedPredictions, evaluation_figures, target_panels
from tapfm.evaluation.metric_tables import (
    all_metrics_table,
    baseline_tables,
    evaluation_sections,
    metric_table,
    subgroup_tables,
)
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds
from tapfm.evaluation.metrics_json import metrics_json, read_metrics_json
from tapfm.evaluation.predictions import Prediction
from tapfm.evaluation.results import BaselinePredictions, EvaluatedTable, EvaluationSettings, evaluate_predictions
from tapfm.evaluation.subgroups import Subgroup
from tapfm.metrics.ranking import roc_curve
from tapfm.results.figure import Band, Bars, Line, Points, Rule
from tapfm.results.formatting import format_estimate
from tapfm.results.markdown import markdown_table
from tapfm.results.table import list_reasons, table_csv
from tapfm.runs.curves import training_figure
from tapfm.tasks.catalog import target_kinds

ABOUT = {"model": "runs/first", "kind": "run", "cohort": "own", "split": "test", "table": "cohort.csv", "seed": 0}


def measured(slides, targets=("FGFR3",), *, validation=None, baseline=(), groups=(), unit="patient", resamples=50):
    kinds = target_kinds(targets)
    chosen = choose_thresholds(validation, kinds, unit) if validation else None
    return evaluate_predictions(
        slides,
        kinds,
        EvaluationSettings(unit, resamples=resamples),
        thresholds=ChosenThresholds(chosen, "8 slides"),
        groups=groups,
        baseline=BaselinePredictions(tuple(baseline), (), "A baseline."),
        table=EvaluatedTable("cohort.csv", (), ()),
        about=ABOUT | {"targets": list(targets), "unit": unit, "sensitivity": 0.9, "resamples": resamples},
    )


def evaluated(slides, results, baseline=()):
    chosen = results.chosen.thresholds
    about, thresholds = results.about, {} if chosen is None else chosen.youden
    return EvaluatedPredictions(
        slides, baseline, about["unit"], results.select_metrics("model"), thresholds, about["resamples"], about["seed"]
    )


def panels_of(slides, target="FGFR3", baseline=(), **given):
    results = measured(slides, (target,), **given)
    return target_panels(evaluated(slides, results, baseline), target, results.kinds[target]), results


def marks(panel, kind):
    return [mark for mark in panel.marks if isinstance(mark, kind)]


def test_legends_have_the_numbers_of_the_evaluation():
    panels, results = panels_of(predictions(20), validation=predictions(8), baseline=predictions(20, seed=3))
    found = results.select_metrics("model")
    assert list(panels) == ["roc", "pr", "reliability", "scores"]
    chance, baseline, model = marks(panels["roc"], Line)
    assert model.label == f"AUC {format_estimate(found['FGFR3', 'auc'].estimate)}"
    assert (chance.dash, baseline.label) == ("dotted", "colour baseline")
    assert marks(panels["pr"], Rule)[0].label == "prevalence 50%"
    assert marks(panels["reliability"], Points)[0].label == f"ECE {format_estimate(found['FGFR3', 'ece'].estimate)}"
    negative, positive = marks(panels["scores"], Bars)
    assert (negative.label, positive.label) == ("negative (10)", "positive (10)")
    assert sum(negative.heights) == sum(positive.heights) == 10
    assert positive.floors == negative.heights  # one on top of the other
    assert marks(panels["scores"], Rule)[0].value == results.chosen.thresholds.youden["FGFR3"]


def test_the_curve_is_the_roc_curve_without_points_on_straight_lines():
    slides = predictions(200, strength=1.0)
    panels, _ = panels_of(slides)
    line = marks(panels["roc"], Line)[-1]
    positive = np.array([each.labels["FGFR3"] == 1 for each in slides])
    x, y, _ = roc_curve(positive, np.array([each.logits["FGFR3"] for each in slides]))
    assert len(line.x) < len(x)
    assert set(zip(line.x, line.y, strict=True)) <= set(zip(x.tolist(), y.tolist(), strict=True))
    assert np.trapezoid(line.y, line.x) == pytest.approx(np.trapezoid(y, x))


def test_the_range_of_resampled_curves_holds_the_curve():
    panels, _ = panels_of(predictions(120, strength=1.0), resamples=300)
    (band,), line = marks(panels["roc"], Band), marks(panels["roc"], Line)[-1]
    low, high, curve = np.array(band.low), np.array(band.high), np.interp(band.x, line.x, line.y)
    assert (low <= high).all()
    assert np.mean((low <= curve + 1e-9) & (curve <= high + 1e-9)) > 0.9
    assert (low[-1], high[-1]) == (1, 1)
    assert 0.05 < np.mean(high - low) < 0.5


def of_class(label, logits, start=0):
    return [
        Prediction(f"s{start + i}", f"p{start + i}", "test", None, {"FGFR3": label}, {"FGFR3": logit}, tiles=1)
        for i, logit in enumerate(logits)
    ]


def test_a_class_of_one_patient_has_no_range():
    panels, _ = panels_of(of_class(0, [1.0, 2.0]) + of_class(1, [1.5], 2))
    assert not marks(panels["roc"], Band)


def test_one_class_has_no_figures_and_says_why():
    panels, results = panels_of(of_class(0, [0.0, 1.0, 2.0, 3.0]))
    assert {panel.why_empty for panel in panels.values()} == {"no positive patient among 4"}
    table = metric_table(results)
    assert "no positive patient among 4" in list_reasons(table)
    assert table.notes == ["No threshold was chosen: 8 slides."]


def test_several_targets_have_panels_columns_and_a_mean():
    targets = ("EGFR", "KRAS")
    slides = predictions(12, targets=targets)
    results = measured(slides, targets, validation=predictions(8, targets=targets))
    figures = evaluation_figures(evaluated(slides, results), results.kinds, "first, test")
    assert [panel.title for panel in figures["roc"].panels] == ["EGFR", "KRAS"]
    table = metric_table(results)
    assert [column.title for column in table.columns] == ["", "EGFR", "KRAS", "mean of targets"]
    names = [row.cells[0].value for row in table.rows if row.cells]
    assert names.count("sensitivity") == 2  # at Youden's threshold, and at that for a sensitivity
    assert names.count("threshold") == 2
    assert names.count("AUC, DeLong's interval") == 1


def test_baseline_and_subgroups_have_tables():
    group = Subgroup("scanner", "alpha | beta", frozenset(f"S{i:03}" for i in range(8)))
    slides = predictions(12)
    results = measured(slides, baseline=predictions(12, seed=3), groups=[group])
    (baseline,), (subgroups,) = baseline_tables(results), subgroup_tables(results)
    assert [row.cells[0].value for row in baseline.rows] == ["AUC", "average precision", "Brier score"]
    assert baseline.rows[0].cells[3].value == results.differences[0].difference
    assert r"| scanner = alpha \| beta | FGFR3 | 8 | 4 |" in markdown_table(subgroups)
    titles = [section.title for section in evaluation_sections(results)]
    assert titles == ["", "Metrics", "Colour baseline", "Subgroups"]


def test_results_come_back_from_metrics_json(tmp_path):
    results = measured(predictions(12), validation=predictions(8), baseline=predictions(12, seed=3))
    (tmp_path / "metrics.json").write_bytes(metrics_json(results))
    again = read_metrics_json(tmp_path / "metrics.json")
    assert metrics_json(again) == metrics_json(results)
    assert table_csv(all_metrics_table(again)) == table_csv(all_metrics_table(results))
    assert metric_table(again) == metric_table(results)
    assert baseline_tables(again) == baseline_tables(results)


def test_curves_of_training_mark_the_epoch_that_was_kept():
    panels = training_figure(history(3), 2, "").panels
    assert [panel.title for panel in panels] == ["Loss of the aggregator", "AUC", "Loss of the encoder"]
    assert all(2 in [rule.value for rule in marks(panel, Rule)] for panel in panels)


def test_a_fixed_encoder_has_no_loss_and_missing_numbers_are_not_drawn():
    rows = [{"epoch": 1, "loss_agg": 0.5, "loss_pfm": 0.0, "val_loss": None, "val_macro_auc": None}]
    (loss,) = training_figure(rows, None, "").panels
    assert [line.label for line in marks(loss, Line)] == ["training"]
    rows = history(3)
    rows[1] |= {"loss_agg": float("nan"), "val_loss": float("inf")}
    training, validation = marks(training_figure(rows, 2, "").panels[0], Line)
    assert training.x == validation.x == [1, 3]


def test_each_target_has_its_own_faint_line():
    rows = [row | {"val_auc": {"A": 0.7, "B": None}} for row in history(2)]
    lines = marks(training_figure(rows, None, "").panels[1], Line)
    assert [line.faint for line in lines] == [True, False, False]
    assert lines[-1].label == "validation, mean of targets"
