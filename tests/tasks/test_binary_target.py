"""Labels, probabilities and metrics of binary targets."""

import math

import numpy as np
import pytest

from tapfm.errors import NonFiniteError
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.target import TargetThresholds

KIND = BinaryTarget()


@pytest.mark.parametrize(("text", "label"), [("", None), ("0", 0), ("1", 1), ("0.0", 0), ("1.0", 1)])
def test_labels_are_read_and_written(text, label):
    assert KIND.parse_label(text) == label
    assert KIND.format_label(label) == text.removesuffix(".0")


@pytest.mark.parametrize("text", ["2", "yes", "-1", " 1"])
def test_other_texts_are_no_labels(text):
    with pytest.raises(ValueError, match="0, 1 or empty"):
        KIND.parse_label(text)


def test_words_strata_and_patients():
    assert [KIND.describe_label(label) for label in (1, 0, None)] == ["positive", "negative", "unknown"]
    assert [KIND.stratum(label) for label in (1, 0, None)] == ["1", "0", None]
    assert [KIND.pool_labels(each) for each in ([0, 1, None], [0, None], [None], [])] == [1, 0, None, None]


@pytest.mark.parametrize(
    ("labels", "lacking", "reason"),
    [
        ([0, 0, None], "positive", "no positive slide among 2"),
        ([1, 1, None], "negative", "no negative slide among 2"),
        ([None, None], "labelled", "no labelled slide among 2"),
        ([], "labelled", "no labelled slide among 0"),
        ([0, 1], "", ""),
    ],
)
def test_what_labels_lack(labels, lacking, reason):
    assert KIND.missing_class(labels) == lacking
    assert KIND.explain_undefined(labels, "slide") == reason


def test_counts():
    labels = [1, 0, 0, None]
    assert KIND.count_labels(labels) == (1, 3)
    assert KIND.describe_counts(labels, "slide") == "1 positive and 2 negative slides"
    assert KIND.explain_too_few(labels, "patient", 2) == "1 positive and 2 negative patients: fewer than 2 of a class"
    assert KIND.explain_too_few(labels, "patient", 1) == ""
    summary = KIND.summarise_training_labels(labels)
    assert summary == {"positive": 1, "labelled": 3}
    assert KIND.summarise_training_labels(KIND.restore_training_labels(summary)) == summary


def test_a_class_of_one_patient_has_no_interval():
    assert KIND.explain_missing_interval([1, 1, 0, 0], "aabc") == "no interval: a single positive patient"
    assert KIND.explain_missing_interval([1, 1, 0, None], "abcd") == "no interval: a single negative patient"
    assert KIND.explain_missing_interval([1, 1, 0, 0], "abcd") == ""


def test_arrays_are_of_known_labels_and_refuse_what_is_no_number():
    positive, logits = KIND.select_labelled([0, 1, None], [0.1, 0.2, math.nan])
    assert (positive.tolist(), logits.tolist()) == ([False, True], [0.1, 0.2])
    assert KIND.compute_score(positive, logits) == 1.0
    with pytest.raises(NonFiniteError, match="1 of 2 scores"):
        KIND.select_labelled([0, 1], [0.1, math.nan])
    with pytest.raises(ValueError, match="shorter"):
        KIND.select_labelled([0, 1], [0.1])


def test_calls_are_at_or_above_a_threshold():
    assert [KIND.apply_threshold(0.0, threshold) for threshold in (0.4, 0.5, 0.6, None)] == [1, 1, 0, None]


def test_every_metric_has_a_value_in_resamples_too_and_says_which_threshold_it_needs():
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


def test_a_linear_fit_needs_both_classes_and_leaves_out_what_has_no_label():
    rows, labels = [[0.0], [1.0], [9.0], [2.0]], [0, 1, None, 1]
    fitted = KIND.fit_linear(rows, labels)
    again = KIND.fit_linear([rows[0], rows[1], rows[3]], [0, 1, 1])
    np.testing.assert_array_equal(fitted.logits([[0.0], [3.0]]), again.logits([[0.0], [3.0]]))
    assert KIND.fit_linear(rows, [1, 1, None, 1]) is None
