"""Labels, probabilities and metrics of binary targets."""

import math

import numpy as np
import pytest

from tapfm.errors import NonFiniteError
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.target import TargetThresholds

KIND = BinaryTarget()


@pytest.mark.parametrize(("text", "label"), [("", None), ("0", 0), ("1", 1), ("0.0", 0), ("1.0", 1)])
def test_parse_and_format_labels(text, label):
    assert KIND.parse_label(text) == label
    assert KIND.format_label(label) == text.removesuffix(".0")


@pytest.mark.parametrize("text", ["2", "yes", "-1", " 1"])
def test_invalid_labels_are_rejected(text):
    with pytest.raises(ValueError, match="0, 1 or empty"):
        KIND.parse_label(text)


def test_describe_stratify_and_pool_labels():
    assert [KIND.describe_label(label) for label in (1, 0, None)] == ["positive", "negative", "unknown"]
    assert [KIND.stratum(label) for label in (1, 0, None)] == ["1", "0", None]
    assert [KIND.pool_labels(each) for each in ([0, 1, None], [0, None], [None], [])] == [1, 0, None, None]


@pytest.mark.parametrize(
    ("labels", "missing", "reason"),
    [
        ([0, 0, None], "positive", "no positive slide among 2"),
        ([1, 1, None], "negative", "no negative slide among 2"),
        ([None, None], "labelled", "no labelled slide among 2"),
        ([], "labelled", "no labelled slide among 0"),
        ([0, 1], "", ""),
    ],
)
def test_missing_class_and_reason(labels, missing, reason):
    assert KIND.missing_class(labels) == missing
    assert KIND.explain_undefined(labels, "slide") == reason


def test_label_counts():
    labels = [1, 0, 0, None]
    assert KIND.count_positives(labels) == (1, 3)
    assert KIND.describe_counts(labels, "slide") == "1 positive and 2 negative slides"
    assert KIND.explain_too_few(labels, "patient", 2) == (
        "1 positive and 2 negative patients, but at least 2 of each class are required"
    )
    assert KIND.explain_too_few(labels, "patient", 1) == ""
    summary = KIND.summarise_training_labels(labels)
    assert summary == {"positive": 1, "labelled": 3}
    assert KIND.summarise_training_labels(KIND.restore_training_labels(summary)) == summary


def test_no_interval_with_one_patient_of_a_class():
    assert KIND.explain_missing_interval([1, 1, 0, 0], "aabc") == "no confidence interval: only one positive patient"
    assert KIND.explain_missing_interval([1, 1, 0, None], "abcd") == "no confidence interval: only one negative patient"
    assert KIND.explain_missing_interval([1, 1, 0, 0], "abcd") == ""


def test_select_labelled_drops_missing_labels_and_rejects_nan():
    positive, logits = KIND.select_labelled([0, 1, None], [0.1, 0.2, math.nan])
    assert (positive.tolist(), logits.tolist()) == ([False, True], [0.1, 0.2])
    assert KIND.compute_score(positive, logits) == 1.0
    with pytest.raises(NonFiniteError, match="1 of 2 scores"):
        KIND.select_labelled([0, 1], [0.1, math.nan])
    with pytest.raises(ValueError, match="shorter"):
        KIND.select_labelled([0, 1], [0.1])


def test_apply_threshold():
    assert [KIND.apply_threshold(0.0, threshold) for threshold in (0.4, 0.5, 0.6, None)] == [1, 1, 0, None]


def test_metrics_resampled_metrics_and_threshold_names_agree():
    positive, logits = np.array([True, False, True, False]), np.array([1.0, -1.0, 0.5, 0.2])
    at = TargetThresholds(0.5, 0.4)
    values, drawn = (
        KIND.compute_metrics(positive, logits, at),
        KIND.compute_resampled_metrics(np.ones((1, 4)), positive, logits, at),
    )
    assert list(values) == list(drawn) == list(KIND.metrics)
    assert {name: rows.tolist() for name, rows in drawn.items()} == {
        name: [pytest.approx(value, nan_ok=True) if value is not None else pytest.approx(math.nan, nan_ok=True)]
        for name, value in values.items()
    }
    without = KIND.compute_metrics(positive, logits, None)
    assert {name for name in values if without[name] is None} == {name for name in values if KIND.threshold_name(name)}


def test_linear_fit_needs_both_classes_and_ignores_missing_labels():
    rows, labels = [[0.0], [1.0], [9.0], [2.0]], [0, 1, None, 1]
    fitted = KIND.fit_linear(rows, labels)
    again = KIND.fit_linear([rows[0], rows[1], rows[3]], [0, 1, 1])
    np.testing.assert_array_equal(fitted.logits([[0.0], [3.0]]), again.logits([[0.0], [3.0]]))
    assert KIND.fit_linear(rows, [1, 1, None, 1]) is None
