"""AUC against its definition (how often a positive stands above a negative), and the curves by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import NonFiniteError
from tapfm.metrics.ranking import auc, average_precision, explain_undefined, precision_recall_curve, roc_curve

# few different scores, so that ties are common
RANKED = st.lists(st.tuples(st.booleans(), st.integers(-5, 5)), max_size=40)


def columns(ranked):
    return np.array([label for label, _ in ranked], bool), np.array([score for _, score in ranked], float)


def known(labels, scores):
    return np.array(labels, bool), np.array(scores, float)


def by_definition(labels, scores):
    positives = [score for label, score in zip(labels, scores, strict=True) if label]
    negatives = [score for label, score in zip(labels, scores, strict=True) if not label]
    if not positives or not negatives:
        return None
    above = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives)
    return above / (len(positives) * len(negatives))


@given(RANKED)
def test_it_is_the_share_of_pairs_in_order_with_ties_counted_half(ranked):
    labels, scores = columns(ranked)
    assert auc(labels, scores) == by_definition(labels, scores)


@given(RANKED)
def test_only_the_order_of_scores_counts(ranked):
    labels, scores = columns(ranked)
    assert auc(labels, 2 * scores**3 + 1) == auc(labels, scores)


@given(RANKED)
def test_swapped_labels_turn_it_around(ranked):
    labels, scores = columns(ranked)
    swapped = auc(~labels, scores)
    value = auc(labels, scores)
    assert swapped == (None if value is None else pytest.approx(1 - value))


@given(RANKED)
def test_it_is_undefined_exactly_where_a_reason_is_given(ranked):
    labels, scores = columns(ranked)
    assert (auc(labels, scores) is None) == bool(explain_undefined(labels))


def test_values_by_hand():
    assert auc(*known([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])) == 0.75
    assert auc(*known([0, 1, 0, 1], [3.0, 3.0, 3.0, 3.0])) == 0.5
    assert auc(*known([0, 1], [math.inf, -math.inf])) == 0.0
    # from the highest score down: precision 1 at recall 1/2, 1/2 between, 2/3 at recall 1
    assert average_precision(*known([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])) == pytest.approx((1 + 2 / 3) / 2)


def test_curves_by_hand_go_through_every_distinct_score():
    labels, scores = known([0, 0, 1, 1, 0], [0.1, 0.4, 0.35, 0.8, 0.8])
    false_positives, true_positives, thresholds = roc_curve(labels, scores)
    np.testing.assert_allclose(false_positives, [0, 1 / 3, 2 / 3, 2 / 3, 1])
    np.testing.assert_allclose(true_positives, [0, 1 / 2, 1 / 2, 1, 1])
    assert thresholds.tolist() == [math.inf, 0.8, 0.4, 0.35, 0.1]
    precision, recall, thresholds = precision_recall_curve(labels, scores)
    np.testing.assert_allclose(precision, [2 / 5, 2 / 4, 1 / 3, 1 / 2, 1])
    np.testing.assert_allclose(recall, [1, 1, 1 / 2, 1 / 2, 0])
    assert thresholds.tolist() == [0.1, 0.35, 0.4, 0.8]


def test_infinite_scores_are_the_ends_of_curves():
    labels, scores = known([0, 1, 0, 1], [-math.inf, -math.inf, 0.0, math.inf])
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
def test_reasons_name_the_class_that_is_absent(labels, reason):
    assert explain_undefined(np.array(labels, bool), "slide") == reason


@pytest.mark.parametrize("metric", [auc, average_precision, roc_curve, precision_recall_curve])
def test_scores_that_are_no_numbers_or_too_few_are_refused(metric):
    with pytest.raises(NonFiniteError, match="1 of 2 scores"):
        metric(*known([0, 1], [0.1, math.nan]))
    with pytest.raises(ValueError, match="for each label"):
        metric(*known([0, 1], [0.1]))


def both_classes(ranked):
    return len({label for label, _ in ranked}) == 2


@given(RANKED.filter(both_classes))
def test_the_area_under_the_curve_is_the_auc(ranked):
    labels, scores = columns(ranked)
    false_positives, true_positives, _ = roc_curve(labels, scores)
    assert np.trapezoid(true_positives, false_positives) == pytest.approx(auc(labels, scores))


@given(RANKED.filter(lambda ranked: not both_classes(ranked)))
def test_without_both_classes_there_is_no_curve(ranked):
    labels, scores = columns(ranked)
    assert roc_curve(labels, scores) is precision_recall_curve(labels, scores) is None
    assert average_precision(labels, scores) is None
