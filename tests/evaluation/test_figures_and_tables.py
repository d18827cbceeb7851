"""Figures and tables of an evaluation show the computed metrics, or the reason why they are missing."""

import numpy as np
import pytest
from report_folders import make_history, make_predictions

from tapfm.evaluation.figures import EvaluatedPredictions, build_evaluation_figures, build_target_panels
from tapfm.evaluation.metric_tables import (
    build_all_metrics_table,
    build_baseline_tables,
    build_evaluation_sections,
    build_metric_table,
    build_subgroup_tables,
)
from tapfm.evaluation.metric_values import ChosenThresholds, choose_thresholds
from tapfm.evaluation.metrics_json import format_metrics_json, read_metrics_json
from tapfm.evaluation.model_evaluation import (
    BaselinePredictions,
    EvaluatedTable,
    EvaluationSettings,
    evaluate_predictions,
)
from tapfm.evaluation.predictions import Prediction
from tapfm.evaluation.subgroups import Subgroup
from tapfm.metrics.ranking import roc_curve
from tapfm.results.figure import Band, Bars, Line, Points, ReferenceLine
from tapfm.results.formatting import format_estimate
from tapfm.results.markdown import markdown_table
from tapfm.results.table import list_reasons, table_csv
from tapfm.runs.curves import build_training_figure
from tapfm.tasks.catalog import target_kinds

ABOUT = {"model": "runs/first", "kind": "run", "cohort": "own", "split": "test", "table": "cohort.csv", "seed": 0}


def compute_results(
    slides, targets=("FGFR3",), *, validation=None, baseline=(), groups=(), unit="patient", resamples=50
):
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


def make_evaluated(slides, results, baseline=()):
    chosen = results.chosen_thresholds.thresholds
    about, thresholds = results.about, {} if chosen is None else chosen.youden
    return EvaluatedPredictions(
        slides, baseline, about["unit"], results.select_metrics("model"), thresholds, about["resamples"], about["seed"]
    )


def make_panels(slides, target="FGFR3", baseline=(), **given):
    results = compute_results(slides, (target,), **given)
    return build_target_panels(make_evaluated(slides, results, baseline), target, results.targets[target]), results


def select_marks(panel, kind):
    return [mark for mark in panel.marks if isinstance(mark, kind)]


def test_legends_show_the_metrics():
    panels, results = make_panels(
        make_predictions(20), validation=make_predictions(8), baseline=make_predictions(20, seed=3)
    )
    found = results.select_metrics("model")
    assert list(panels) == ["roc", "pr", "reliability", "scores"]
    chance, baseline, model = select_marks(panels["roc"], Line)
    assert model.label == f"AUC {format_estimate(found['FGFR3', 'auc'].estimate)}"
    assert (chance.dash, baseline.label) == ("dotted", "colour baseline")
    assert select_marks(panels["pr"], ReferenceLine)[0].label == "prevalence 50%"
    assert (
        select_marks(panels["reliability"], Points)[0].label == f"ECE {format_estimate(found['FGFR3', 'ece'].estimate)}"
    )
    negative, positive = select_marks(panels["scores"], Bars)
    assert (negative.label, positive.label) == ("negative (10)", "positive (10)")
    assert sum(negative.heights) == sum(positive.heights) == 10
    assert positive.floors == negative.heights  # stacked
    threshold = results.chosen_thresholds.thresholds.youden["FGFR3"]
    assert select_marks(panels["scores"], ReferenceLine)[0].value == threshold


def test_roc_line_omits_points_on_straight_lines():
    slides = make_predictions(200, strength=1.0)
    panels, _ = make_panels(slides)
    line = select_marks(panels["roc"], Line)[-1]
    positive = np.array([each.labels["FGFR3"] == 1 for each in slides])
    x, y, _ = roc_curve(positive, np.array([each.logits["FGFR3"] for each in slides]))
    assert len(line.x) < len(x)
    assert set(zip(line.x, line.y, strict=True)) <= set(zip(x.tolist(), y.tolist(), strict=True))
    assert np.trapezoid(line.y, line.x) == pytest.approx(np.trapezoid(y, x))


def test_roc_band_contains_the_curve():
    panels, _ = make_panels(make_predictions(120, strength=1.0), resamples=300)
    (band,), line = select_marks(panels["roc"], Band), select_marks(panels["roc"], Line)[-1]
    low, high, curve = np.array(band.low), np.array(band.high), np.interp(band.x, line.x, line.y)
    assert (low <= high).all()
    assert np.mean((low <= curve + 1e-9) & (curve <= high + 1e-9)) > 0.9
    assert (low[-1], high[-1]) == (1, 1)
    assert 0.05 < np.mean(high - low) < 0.5


def make_slides(label, logits, start=0):
    return [
        Prediction(f"s{start + i}", f"p{start + i}", "test", None, {"FGFR3": label}, {"FGFR3": logit}, tiles=1)
        for i, logit in enumerate(logits)
    ]


def test_no_roc_band_with_one_positive_patient():
    panels, _ = make_panels(make_slides(0, [1.0, 2.0]) + make_slides(1, [1.5], 2))
    assert not select_marks(panels["roc"], Band)


def test_panels_and_table_explain_missing_class():
    panels, results = make_panels(make_slides(0, [0.0, 1.0, 2.0, 3.0]))
    assert {panel.why_empty for panel in panels.values()} == {"no positive patient among 4"}
    table = build_metric_table(results)
    assert "no positive patient among 4" in list_reasons(table)
    assert "no threshold was chosen: 8 slides." in table.notes[0]


def test_several_targets_have_panels_columns_and_a_mean():
    targets = ("EGFR", "KRAS")
    slides = make_predictions(12, targets=targets)
    results = compute_results(slides, targets, validation=make_predictions(8, targets=targets))
    figures = build_evaluation_figures(make_evaluated(slides, results), results.targets, "first, test")
    assert [panel.title for panel in figures["roc"].panels] == ["EGFR", "KRAS"]
    table = build_metric_table(results)
    assert [column.title for column in table.columns] == ["", "EGFR", "KRAS", "mean of targets"]
    names = [row.cells[0].value for row in table.rows if row.cells]
    assert names.count("sensitivity") == 2  # at Youden's threshold, and at the threshold for a sensitivity
    assert names.count("threshold") == 2
    assert names.count("AUC, DeLong's confidence interval") == 1


def test_tables_of_baseline_and_subgroups():
    group = Subgroup("scanner", "alpha | beta", frozenset(f"S{i:03}" for i in range(8)))
    slides = make_predictions(12)
    results = compute_results(slides, baseline=make_predictions(12, seed=3), groups=[group])
    (baseline,), (subgroups,) = build_baseline_tables(results), build_subgroup_tables(results)
    assert [row.cells[0].value for row in baseline.rows] == ["AUC", "average precision", "Brier score"]
    assert baseline.rows[0].cells[3].value == results.differences[0].difference
    assert r"| scanner = alpha \| beta | FGFR3 | 8 | 4 |" in markdown_table(subgroups)
    titles = [section.title for section in build_evaluation_sections(results)]
    assert titles == ["", "Metrics", "Colour baseline", "Subgroups"]


def test_metrics_json_round_trip(tmp_path):
    results = compute_results(
        make_predictions(12), validation=make_predictions(8), baseline=make_predictions(12, seed=3)
    )
    (tmp_path / "metrics.json").write_bytes(format_metrics_json(results))
    again = read_metrics_json(tmp_path / "metrics.json")
    assert format_metrics_json(again) == format_metrics_json(results)
    assert table_csv(build_all_metrics_table(again)) == table_csv(build_all_metrics_table(results))
    assert build_metric_table(again) == build_metric_table(results)
    assert build_baseline_tables(again) == build_baseline_tables(results)


def test_training_curves_mark_the_selected_epoch():
    panels = build_training_figure(make_history(3), 2, "").panels
    assert [panel.title for panel in panels] == ["Aggregator loss", "AUC", "Encoder loss"]
    assert all(2 in [rule.value for rule in select_marks(panel, ReferenceLine)] for panel in panels)


def test_training_curves_skip_missing_and_non_finite_values():
    rows = [{"epoch": 1, "loss_agg": 0.5, "loss_pfm": 0.0, "val_loss": None, "val_macro_auc": None}]
    (loss,) = build_training_figure(rows, None, "").panels
    assert [line.label for line in select_marks(loss, Line)] == ["training"]
    rows = make_history(3)
    rows[1] |= {"loss_agg": float("nan"), "val_loss": float("inf")}
    training, validation = select_marks(build_training_figure(rows, 2, "").panels[0], Line)
    assert training.x == validation.x == [1, 3]


def test_each_target_has_a_faint_line():
    rows = [row | {"val_auc": {"A": 0.7, "B": None}} for row in make_history(2)]
    lines = select_marks(build_training_figure(rows, None, "").panels[1], Line)
    assert [line.faint for line in lines] == [True, False, False]
    assert lines[-1].label == "validation, mean of targets"
