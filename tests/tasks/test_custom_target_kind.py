"""A custom target kind works from a table to a comparison without changes outside tasks/."""

# ruff: noqa: ARG002 - methods of the protocol have arguments that this kind does not use

from dataclasses import dataclass

import numpy as np
import pytest

from tapfm.evaluation.figures import EvaluatedPredictions, build_evaluation_figures
from tapfm.evaluation.metric_tables import build_evaluation_sections
from tapfm.evaluation.metric_values import ChosenThresholds, Thresholds, choose_thresholds, compute_metrics
from tapfm.evaluation.model_comparison import compare_models
from tapfm.evaluation.model_evaluation import (
    BaselinePredictions,
    EvaluatedTable,
    EvaluationSettings,
    evaluate_predictions,
)
from tapfm.evaluation.predictions import (
    Prediction,
    average_predictions,
    compute_scores,
    read_predictions,
    write_predictions,
)
from tapfm.evaluation.predictions import (
    _pool_by_patient as pool_by_patient,
)
from tapfm.evaluation.subgroups import Subgroup, evaluate_subgroup
from tapfm.results.figure import Panel, Points
from tapfm.results.figure_drawing import draw_svg
from tapfm.results.formatting import format_estimate
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import Cell
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import TargetKind, TargetThresholds


@dataclass(frozen=True)
class Percentage:
    """A number from 0 to 100; the score is minus the mean error. Implements `TargetKind`."""

    metrics = {"score": "minus the mean error", "bias": "bias"}  # noqa: RUF012 - the protocol requires a mapping
    main_metrics = ("score",)

    def threshold_name(self, metric):
        return ""

    def parse_label(self, text):
        if text and not 0 <= float(text) <= 100:
            raise ValueError(f"a percentage must be from 0 to 100; got {text!r}")
        return float(text) if text else None

    def format_label(self, label):
        return "" if label is None else f"{label:g}"

    def describe_label(self, label):
        return "unknown" if label is None else f"{label:g} %"

    def stratum(self, label):
        return None if label is None else "low" if label < 50 else "high"

    def pool_labels(self, labels):
        known = [label for label in labels if label is not None]
        return sum(known) / len(known) if known else None

    def missing_class(self, labels):
        return "" if any(label is not None for label in labels) else "labelled"

    def explain_undefined(self, labels, unit):
        return f"no labelled {unit}" if self.missing_class(labels) else ""

    def explain_too_few(self, labels, unit, minimum):
        known = self.count_positives(labels)[1]
        return f"{known} {unit}s" if known < minimum else ""

    def explain_missing_interval(self, labels, patients):
        return ""

    def count_positives(self, labels):
        return None, sum(label is not None for label in labels)

    label_count_title = "labelled"

    def label_count_cell(self, labels):
        return Cell(str(self.count_positives(labels)[1]))

    def describe_counts(self, labels, unit):
        return f"{self.count_positives(labels)[1]} {unit}s"

    def summarise_training_labels(self, labels):
        return {"labelled": self.count_positives(labels)[1]}

    def restore_training_labels(self, summary):
        return [50.0] * summary["labelled"]

    def activate(self, logit):
        return 10 * logit

    def combine_logits(self, logits):
        return sum(logits) / len(logits)

    def format_prediction(self, label, logit):
        return self.format_label(label), "", repr(self.activate(logit)), repr(logit)

    def parse_prediction(self, label, probability, logit):
        return self.parse_label(label), float(logit) if logit else float(probability) / 10

    def apply_threshold(self, logit, threshold):
        return None

    def select_labelled(self, labels, logits):
        pairs = [(label, logit) for label, logit in zip(labels, logits, strict=True) if label is not None]
        return np.array([label for label, _ in pairs], float), np.array([logit for _, logit in pairs], float)

    def compute_score(self, truth, logits):
        return -float(np.abs(truth - 10 * logits).mean()) if len(truth) else None

    def compute_resampled_scores(self, weights, truth, logits):
        return -(weights @ np.abs(truth - 10 * logits)) / weights.sum(axis=1)

    def compute_metrics(self, truth, logits, thresholds):
        return {
            "score": self.compute_score(truth, logits),
            "bias": float((10 * logits - truth).mean()) if len(truth) else None,
        }

    def compute_resampled_metrics(self, weights, truth, logits, thresholds):
        bias = weights @ (10 * logits - truth) / weights.sum(axis=1)
        return {"score": self.compute_resampled_scores(weights, truth, logits), "bias": bias}

    def explain_missing_metric(self, metric, target, labels, thresholds, unit):
        return self.explain_undefined(labels, unit)

    def compute_analytic_interval(self, metric, truth, logits, *, unit, clustered):
        return None

    def paired_test(self, truth, a, b, *, unit, clustered):
        return None, "no test"

    def choose_thresholds(self, truth, logits, sensitivity):
        return TargetThresholds()

    figure_titles = {"errors": "Errors"}  # noqa: RUF012

    def build_panels(self, data):
        return {"errors": Panel("Errors", marks=[Points(data.truth.tolist(), (10 * data.logits).tolist())])}

    def build_curve(self, truth, logits):
        return None

    def build_curve_panel(self, title, lines):
        return Panel(title, marks=lines)

    def describe_outcome(self, call, label):
        return ""

    def fit_linear(self, rows, labels):
        return None


ABOUT = {"model": "m", "kind": "run", "cohort": "own", "split": "test", "table": "table.csv"}
TARGETS: dict[str, TargetKind] = {"necrosis": Percentage()}


def make_slides(noise, count=40, seed=0):
    """Return two slides of each patient; the first slide has no label."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        label = 100.0 * (number // 2) / count
        logit = label / 10 + float(rng.normal(0, noise))
        labels = {"necrosis": label if number else None}
        found.append(Prediction(f"s{number}", f"p{number // 2}", "test", "c", labels, {"necrosis": logit}, 5))
    return found


def test_table_round_trip(tmp_path):
    predictions = make_slides(1.0)
    write_predictions(tmp_path / "t.csv", predictions, TARGETS)
    assert read_predictions(tmp_path / "t.csv", TARGETS) == predictions
    assert (tmp_path / "t.csv").read_text().splitlines()[2].startswith("p0,s1,c,test,necrosis,0,")


def test_pooling_averaging_and_scores_use_the_kind():
    predictions = make_slides(1.0)
    pooled = pool_by_patient(predictions, TARGETS)
    assert (pooled[0].labels, len(pooled)) == ({"necrosis": 0.0}, 20)
    assert pooled[3].logits["necrosis"] == (predictions[6].logits["necrosis"] + predictions[7].logits["necrosis"]) / 2
    shifted = [
        Prediction(**{**vars(each), "logits": {"necrosis": each.logits["necrosis"] + 1}}) for each in predictions
    ]
    (first, *_) = average_predictions([predictions, shifted], TARGETS)
    assert first.logits["necrosis"] == pytest.approx(predictions[0].logits["necrosis"] + 0.5)
    assert compute_scores(make_slides(0.0), TARGETS, "patient").auc == {"necrosis": 0.0}


def test_metrics_of_several_kinds():
    (score, bias) = compute_metrics(make_slides(1.0), TARGETS, "patient", None, resamples=100)
    assert (score.metric, bias.metric, score.units, score.positives, score.delong) == ("score", "bias", 20, None, None)
    assert score.estimate.low < score.estimate.value < score.estimate.high < 0
    both = {"necrosis": Percentage(), "grade": Percentage()}
    predictions = [
        Prediction(**{**vars(each), "labels": dict.fromkeys(both, 5.0), "logits": dict.fromkeys(both, 1.0)})
        for each in make_slides(1.0)
    ]
    found = {
        (each.target, each.metric): each.estimate.value for each in compute_metrics(predictions, both, "slide", None)
    }
    assert found["macro", "score"] == -5.0
    assert choose_thresholds(predictions, both, "slide") == Thresholds(dict.fromkeys(both), dict.fromkeys(both), 0.9)
    mixed = TARGETS | target_kinds(["FGFR3"])
    predictions = [
        Prediction(
            **{**vars(each), "labels": {"necrosis": 5.0, "FGFR3": place % 2}, "logits": dict.fromkeys(mixed, 1.0)}
        )
        for place, each in enumerate(make_slides(1.0))
    ]
    metrics = {(each.target, each.metric) for each in compute_metrics(predictions, mixed, "slide", None, resamples=20)}
    assert {("necrosis", "score"), ("FGFR3", "auc")} < metrics
    assert not [each for each in metrics if each[0] == "macro"]  # the kinds have no common metric


def test_comparison_evaluation_and_figures():
    good, poor = make_slides(0.2), make_slides(2.0, seed=1)
    found = compare_models({"good": [good], "poor": [poor]}, TARGETS, "patient", resamples=200)
    (pair,) = found.pairs
    assert pair.difference.low > 0
    assert (pair.p_delong, pair.reason) == (None, "no test")
    assert pair.p_bootstrap < 0.05
    group = Subgroup("site", "a", frozenset(each.slide_id for each in good[:10]))
    (score,) = evaluate_subgroup(group, good, TARGETS, "slide", resamples=20, seed=0)
    assert (score.metric, score.units) == ("score", 9)
    results = evaluate_predictions(
        good,
        TARGETS,
        EvaluationSettings(unit="slide", resamples=20),
        thresholds=ChosenThresholds(None, "nowhere"),
        groups=[group],
        baseline=BaselinePredictions(tuple(poor), (), ""),
        table=EvaluatedTable("table.csv", (), ()),
        about=ABOUT | {"targets": list(TARGETS), "unit": "slide", "resamples": 20, "seed": 0},
    )
    assert {(row.model, row.metric_value.metric) for row in results.rows} == {
        (model, metric) for model in ("model", "colour baseline") for metric in ("score", "bias")
    }
    page = markdown_sections("title", build_evaluation_sections(results), {})
    score = results.select_metrics("model")["necrosis", "score"].estimate
    assert f"| minus the mean error | {format_estimate(score)} |" in page
    assert "| site = a | necrosis | 9 |" in page
    evaluated = EvaluatedPredictions(good, poor, "slide", results.select_metrics("model"), {}, 20, 0)
    (figure,) = build_evaluation_figures(evaluated, TARGETS, "test").values()
    assert len(figure.panels[0].marks[0].x) == 39  # slides with a label
    assert draw_svg(figure)
