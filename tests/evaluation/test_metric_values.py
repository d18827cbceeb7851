"""Metrics of predictions: values as in scikit-learn, confidence intervals, and reasons for missing values."""

import time
from dataclasses import replace

import numpy as np
import pytest
from sklearn import metrics

from tapfm.errors import LabelError, SettingError
from tapfm.evaluation.metric_values import Thresholds, choose_thresholds, compute_metrics
from tapfm.evaluation.predictions import Prediction
from tapfm.metrics.delong import auc_interval
from tapfm.metrics.thresholds import sensitivity_threshold, youden_threshold
from tapfm.tasks.binary_metrics import _METRICS as METRICS
from tapfm.tasks.binary_target import _sigmoid as sigmoid
from tapfm.tasks.catalog import target_kinds

FIXED = Thresholds({"A": 0.7, "B": 0.7}, {"A": 0.6, "B": 0.6}, 0.9)


def make_prediction(number, labels, logits, *, patient=None, cohort="c"):
    return Prediction(f"s{number}", patient or f"p{number}", "test", cohort, labels, logits, 10)


def make_cohort(count=60, targets=("A", "B"), prevalence=0.4, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        labels = {target: int(number % 10 < 10 * prevalence) for target in targets[:1]}
        labels |= {target: int(rng.random() < prevalence) for target in targets[1:]}
        logits = {target: float(rng.normal() + 1.5 * labels[target] - 0.7) for target in targets}
        found.append(make_prediction(number, labels, logits))
    return found


def index_metrics(found_metrics):
    return {(each.target, each.metric): each for each in found_metrics}


def make_slides(label, logits, start=0):
    return [make_prediction(start + i, {"A": label}, {"A": logit}) for i, logit in enumerate(logits)]


def test_values_match_scikit_learn():
    slides = make_cohort()
    found = index_metrics(compute_metrics(slides, target_kinds(["A", "B"]), "slide", FIXED, resamples=50))
    for target in "AB":
        labels = [each.labels[target] for each in slides]
        probabilities = [sigmoid(each.logits[target]) for each in slides]
        for suffix, threshold in (("", 0.7), ("_at_chosen", 0.6)):
            calls = [int(probability >= threshold) for probability in probabilities]
            assert found[target, f"sensitivity{suffix}"].estimate.value == metrics.recall_score(labels, calls)
            assert found[target, f"npv{suffix}"].estimate.value == metrics.precision_score(labels, calls, pos_label=0)
        calls = [int(probability >= 0.7) for probability in probabilities]
        for name, value in {
            "auc": metrics.roc_auc_score(labels, probabilities),
            "average_precision": metrics.average_precision_score(labels, probabilities),
            "brier": metrics.brier_score_loss(labels, probabilities),
            "balanced_accuracy": metrics.balanced_accuracy_score(labels, calls),
            "f1": metrics.f1_score(labels, calls),
        }.items():
            assert found[target, name].estimate.value == pytest.approx(value), name
        assert found[target, "auc"].delong == auc_interval(
            np.array(labels) == 1, np.array([each.logits[target] for each in slides])
        )
        assert (found[target, "auc"].units, found[target, "auc"].positives) == (60, sum(labels))
    for metric in METRICS:
        mean = (found["A", metric].estimate.value + found["B", metric].estimate.value) / 2
        assert found["macro", metric].estimate.value == pytest.approx(mean)
    assert (found["macro", "auc"].units, found["macro", "auc"].positives, found["macro", "auc"].delong) == (
        60,
        None,
        None,
    )


def test_all_metrics_are_in_order_and_within_their_intervals():
    found_metrics = compute_metrics(make_cohort(), target_kinds(["B", "A"]), "patient", FIXED, resamples=100)
    assert [(each.target, each.metric) for each in found_metrics] == [
        (target, metric) for target in ("B", "A", "macro") for metric in METRICS
    ]
    for each in found_metrics:
        assert 0 <= each.estimate.low <= each.estimate.value <= each.estimate.high <= 1, each
        assert each.estimate.reason == ""
        assert (each.delong is not None) == (each.metric == "auc" and each.target != "macro")
    assert {
        each.target for each in compute_metrics(make_cohort(), target_kinds(["A"]), "slide", None, resamples=5)
    } == {"A"}


def test_metrics_depend_on_the_seed_but_not_on_slide_order():
    slides = make_cohort()
    first = compute_metrics(slides, target_kinds(["A", "B"]), "slide", FIXED, resamples=80, seed=3)
    again = compute_metrics(slides[::-1], target_kinds(["A", "B"]), "slide", FIXED, resamples=80, seed=3)
    for one, other in zip(first, again, strict=True):
        for field in ("value", "low", "high"):
            assert getattr(one.estimate, field) == pytest.approx(getattr(other.estimate, field), abs=1e-12)
    other = compute_metrics(slides, target_kinds(["A", "B"]), "slide", FIXED, resamples=80, seed=4)
    assert other[0].estimate != first[0].estimate


def test_bootstrap_and_delong_agree_on_many_patients():
    auc = index_metrics(compute_metrics(make_cohort(400), target_kinds(["A"]), "patient", None))["A", "auc"]
    assert auc.estimate.low == pytest.approx(auc.delong.low, abs=0.01)
    assert auc.estimate.high == pytest.approx(auc.delong.high, abs=0.01)


def test_several_slides_per_patient_do_not_narrow_the_interval():
    alone = make_cohort(40, ("A",))
    copies = [replace(each, slide_id=f"{each.slide_id}-{copy}") for each in alone for copy in range(4)]
    of_patients = index_metrics(compute_metrics(alone, target_kinds(["A"]), "slide", None))["A", "auc"]
    of_copies = index_metrics(compute_metrics(copies, target_kinds(["A"]), "slide", None))["A", "auc"]
    assert of_copies.estimate == of_patients.estimate  # four copies of a slide contain no more information than one
    assert of_copies.delong.value == of_copies.estimate.value
    assert of_copies.delong.low is None
    assert "independent" in of_copies.delong.reason
    pooled = index_metrics(compute_metrics(copies, target_kinds(["A"]), "patient", None))["A", "auc"]
    assert pooled.delong == of_patients.delong
    assert pooled.units == 40


@pytest.mark.parametrize(
    ("slides", "metric", "reason"),
    [
        (make_slides(0, [1.0, 2.0]), "auc", "no positive slide among 2"),
        (make_slides(1, [1.0, 2.0]), "average_precision", "no negative slide among 2"),
        (make_slides(1, [1.0, 2.0]), "specificity", "no negative slide among 2"),
        (make_slides(0, [1.0, 2.0]), "f1", "no positive slide among 2"),
        (make_slides(None, [1.0, 2.0]), "brier", "no labelled slide among 2"),
        (make_slides(None, [1.0, 2.0]), "npv", "no labelled slide among 2"),
        ([], "auc", "no labelled slide among 0"),
        (make_slides(0, [-9.0, -8.0]) + make_slides(1, [-9.0, -8.0], 2), "ppv", "no slide is predicted positive"),
        (make_slides(0, [9.0, 8.0]) + make_slides(1, [9.0, 8.0], 2), "npv_at_chosen", "no slide is predicted negative"),
    ],
)
def test_missing_value_has_a_reason(slides, metric, reason):
    found = index_metrics(compute_metrics(slides, target_kinds(["A"]), "slide", FIXED, resamples=20))[
        "A", metric
    ].estimate
    assert (found.value, found.low, found.high, found.reason) == (None, None, None, reason)


@pytest.mark.parametrize(
    ("slides", "metric", "reason"),
    [
        (
            make_slides(0, [1.0, 2.0, 0.0]) + make_slides(1, [1.5], 3),
            "auc",
            "no confidence interval: only one positive patient",
        ),
        (
            make_slides(0, [1.0]) + make_slides(1, [1.5, 0.5], 3),
            "brier",
            "no confidence interval: only one negative patient",
        ),
        (
            make_slides(0, [1.0, 2.0]) + make_slides(1, [3.0, 4.0], 2),
            "auc",
            "no confidence interval: all resamples give the same value",
        ),
        (
            make_slides(0, [-1.0] * 9) + make_slides(1, [1.0] * 9, 9),
            "sensitivity",
            "no confidence interval: all resamples",
        ),
    ],
)
def test_missing_interval_has_a_reason(slides, metric, reason):
    found = index_metrics(compute_metrics(slides, target_kinds(["A"]), "slide", FIXED, resamples=200))[
        "A", metric
    ].estimate
    assert found.value is not None
    assert (found.low, found.high) == (None, None)
    assert reason in found.reason


def test_resamples_without_predicted_positives_are_counted():
    slides = make_slides(0, [-2.0] * 20) + make_slides(1, [2.0] * 4 + [-2.0] * 4, 20)
    found = index_metrics(compute_metrics(slides, target_kinds(["A"]), "slide", FIXED, resamples=2000))[
        "A", "ppv"
    ].estimate
    assert found.value == 1  # also in every resample with a predicted positive
    mixed = [*slides, *make_slides(0, [2.0], 28)]
    found = index_metrics(compute_metrics(mixed, target_kinds(["A"]), "slide", FIXED, resamples=2000))[
        "A", "ppv"
    ].estimate
    assert found.low < 0.8 < found.high
    assert "of 2,000 resamples excluded" in found.reason


def test_metrics_without_thresholds_have_a_reason():
    found = index_metrics(compute_metrics(make_cohort(), target_kinds(["A", "B"]), "slide", None, resamples=5))
    assert found["A", "auc"].estimate.value is not None
    for metric in METRICS[4:]:
        estimate = found["A", metric].estimate
        assert (estimate.value, estimate.reason) == (None, "no threshold: there are no validation predictions")
        assert found["macro", metric].estimate.value is None
        assert "A: no threshold" in found["macro", metric].estimate.reason
    partly = Thresholds({"A": 0.5, "B": None}, {"A": None}, 0.9)
    found = index_metrics(compute_metrics(make_cohort(), target_kinds(["A", "B"]), "slide", partly, resamples=50))
    assert found["B", "f1"].estimate.reason == "no threshold: B has labels of at most one class in the validation split"
    assert (
        found["A", "ppv_at_chosen"].estimate.reason == "no threshold: A has no positive label in the validation split"
    )
    macro = found["macro", "f1"].estimate
    assert macro.value == found["A", "f1"].estimate.value
    assert macro.low is not None
    assert macro.reason == "mean without B: no threshold: B has labels of at most one class in the validation split"


def test_interval_of_a_rare_target_with_and_without_other_targets():
    rng = np.random.default_rng(2)
    slides = []
    for number in range(200):
        labels = {"MET": int(number < 6)} | {target: int(rng.random() < 0.4) for target in "BCD"}
        slides.append(make_prediction(number, labels, {target: rng.normal() + labels[target] for target in labels}))
    width = {}
    for targets in (["MET"], ["MET", "B", "C", "D"]):  # six positives with at least four different label patterns
        auc = index_metrics(compute_metrics(slides, target_kinds(targets), "patient", None))["MET", "auc"].estimate
        width[len(targets)] = auc.high - auc.low
    assert width[4] == pytest.approx(width[1], rel=0.15)


def test_mean_has_no_interval_if_a_target_has_one_positive_patient():
    slides = [replace(each, labels=each.labels | {"B": int(number == 3)}) for number, each in enumerate(make_cohort())]
    macro = index_metrics(compute_metrics(slides, target_kinds(["A", "B"]), "slide", None, resamples=20))[
        "macro", "auc"
    ].estimate
    assert macro.value is not None
    assert (macro.low, macro.reason) == (None, "no confidence interval: only one positive patient (B)")


def test_choose_thresholds_of_each_target():
    validation = make_cohort(30, seed=9)
    chosen = choose_thresholds(validation, target_kinds(["A", "B"]), "patient", 0.8)
    for target in "AB":
        labels = [each.labels[target] for each in validation]
        probabilities = [sigmoid(each.logits[target]) for each in validation]
        assert chosen.youden[target] == youden_threshold(np.array(labels) == 1, np.array(probabilities))
        assert chosen.at_sensitivity[target] == sensitivity_threshold(
            np.array(labels) == 1, np.array(probabilities), 0.8
        )
    assert chosen.sensitivity == 0.8
    only_positives = choose_thresholds(make_slides(1, [0.5]), target_kinds(["A"]), "slide")
    assert (only_positives.youden, only_positives.at_sensitivity) == (
        {"A": None},
        {"A": pytest.approx(0.622, abs=1e-3)},
    )
    assert choose_thresholds([], target_kinds(["A"]), "slide").at_sensitivity == {"A": None}


def test_invalid_units_and_targets_are_rejected():
    with pytest.raises(SettingError, match="'slide' or 'patient'"):
        compute_metrics(make_cohort(), target_kinds(["A"]), "biopsy", None)
    with pytest.raises(LabelError, match="no prediction for MET"):
        compute_metrics(make_cohort(), target_kinds(["MET"]), "slide", None)


def test_compute_metrics_takes_less_than_6_seconds():
    slides = make_cohort(500, ("A", "B", "C", "D"))
    thresholds = choose_thresholds(slides, target_kinds("ABCD"), "patient")
    start = time.process_time()
    compute_metrics(slides, target_kinds("ABCD"), "patient", thresholds)
    assert time.process_time() - start < 6  # 0.3 s on an idle core


def test_interval_of_a_target_does_not_depend_on_other_targets():
    alone, with_others = (
        index_metrics(compute_metrics(make_cohort(), target_kinds(names), "slide", None))
        for names in (["A"], ["A", "B"])
    )
    assert alone["A", "auc"] == with_others["A", "auc"]
