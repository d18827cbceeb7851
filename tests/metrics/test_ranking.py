"""AUC compared with its definition, and known values of the curves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import NonFiniteError
from tapfm.metrics.ranking import auc, average_precision, explain_undefined, precision_recall_curve, roc_curve

# few distinct scores, so that ties are common
UNITS = st.lists(st.tuples(st.booleans(), st.integers(-5, 5)), max_size=40)


def to_arrays(units):
    return np.array([label for label, _ in units], bool), np.array([score for _, score in units], float)


def make_arrays(labels, scores):
    return np.array(labels, bool), np.array(scores, float)


def auc_by_definition(labels, scores):
    positives = [score for label, score in zip(labels, scores, strict=True) if label]
    negatives = [score for label, score in zip(labels, scores, strict=True) if not label]
    if not positives or not negatives:
        return None
    above = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives)
    return above / (len(positives) * len(negatives))


@given(UNITS)
def test_auc_matches_the_definition(units):
    labels, scores = to_arrays(units)
    assert auc(labels, scores) == auc_by_definition(labels, scores)


@given(UNITS)
def test_auc_depends_only_on_the_order_of_scores(units):
    labels, scores = to_arrays(units)
    assert auc(labels, 2 * scores**3 + 1) == auc(labels, scores)


@given(UNITS)
def test_auc_of_swapped_labels(units):
    labels, scores = to_arrays(units)
    swapped = auc(~labels, scores)
    value = auc(labels, scores)
    assert swapped == (None if value is None else pytest.approx(1 - value))


@given(UNITS)
def test_auc_is_none_exactly_if_there_is_a_reason(units):
    labels, scores = to_arrays(units)
    assert (auc(labels, scores) is None) == bool(explain_undefined(labels))


def test_known_values():
    assert auc(*make_arrays([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])) == 0.75
    assert auc(*make_arrays([0, 1, 0, 1], [3.0, 3.0, 3.0, 3.0])) == 0.5
    assert auc(*make_arrays([0, 1], [math.inf, -math.inf])) == 0.0
    # in descending order of scores: precision 1 at recall 1/2, and 2/3 at recall 1
    assert average_precision(*make_arrays([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])) == pytest.approx((1 + 2 / 3) / 2)


def test_curves_contain_every_distinct_score():
    labels, scores = make_arrays([0, 0, 1, 1, 0], [0.1, 0.4, 0.35, 0.8, 0.8])
    false_positives, true_positives, thresholds = roc_curve(labels, scores)
    np.testing.assert_allclose(false_positives, [0, 1 / 3, 2 / 3, 2 / 3, 1])
    np.testing.assert_allclose(true_positives, [0, 1 / 2, 1 / 2, 1, 1])
    assert thresholds.tolist() == [math.inf, 0.8, 0.4, 0.35, 0.1]
    precision, recall, thresholds = precision_recall_curve(labels, scores)
    np.testing.assert_allclose(precision, [2 / 5, 2 / 4, 1 / 3, 1 / 2, 1])
    np.testing.assert_allclose(recall, [1, 1, 1 / 2, 1 / 2, 0])
    assert thresholds.tolist() == [0.1, 0.35, 0.4, 0.8]


def test_curves_with_infinite_scores():
    labels, scores = make_arrays([0, 1, 0, 1], [-math.inf, -math.inf, 0.0, math.inf])
    false_positives, true_positives, _ = roc_curve(labels, scores)
    assert (false_positives.tolist(), true_positives.tolist()) == ([0, 0, 0.5, 1], [0, 0.5, 0.5, 1])
    assert average_precision(labels, scores) == 0.75


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([0] * 12, "no positive slide among 12"),
        ([1, 1], "no negative slide among 2"),
        ([], "no labelled slide"),
        ([0, 1], ""),
    ],
)
def test_reason_contains_the_missing_class(labels, reason):
    assert explain_undefined(np.array(labels, bool), "slide") == reason


@pytest.mark.parametrize("metric", [auc, average_precision, roc_curve, precision_recall_curve])
def test_nan_scores_and_different_shapes_are_rejected(metric):
    with pytest.raises(NonFiniteError, match="1 of 2 scores"):
        metric(*make_arrays([0, 1], [0.1, math.nan]))
    with pytest.raises(ValueError, match="same shape"):
        metric(*make_arrays([0, 1], [0.1]))


def has_both_classes(units):
    return len({label for label, _ in units}) == 2


@given(UNITS.filter(has_both_classes))
def test_area_under_the_roc_curve_is_the_auc(units):
    labels, scores = to_arrays(units)
    false_positives, true_positives, _ = roc_curve(labels, scores)
    assert np.trapezoid(true_positives, false_positives) == pytest.approx(auc(labels, scores))


@given(UNITS.filter(lambda units: not has_both_classes(units)))
def test_no_curve_without_both_classes(units):
    labels, scores = to_arrays(units)
    assert roc_curve(labels, scores) is precision_recall_curve(labels, scores) is None
    assert average_precision(labels, scores) is None
