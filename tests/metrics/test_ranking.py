"""AUC against its definition: how often a positive stands above a negative."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from tapfm.errors import NonFiniteError
from tapfm.metrics.ranking import auc, average_precision, precision_recall_curve, roc_curve, why_undefined

# few different scores, so that ties are common
RANKED = st.lists(st.tuples(st.sampled_from([0, 1, None]), st.integers(-5, 5)), min_size=1, max_size=40)


def columns(ranked):
    return [label for label, _ in ranked], [float(score) for _, score in ranked]


def by_definition(labels, scores):
    positives = [score for label, score in zip(labels, scores, strict=True) if label == 1]
    negatives = [score for label, score in zip(labels, scores, strict=True) if label == 0]
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
    assert auc(labels, [2 * score**3 + 1 for score in scores]) == auc(labels, scores)


@given(RANKED)
def test_swapped_labels_turn_it_around(ranked):
    labels, scores = columns(ranked)
    swapped = auc([None if label is None else 1 - label for label in labels], scores)
    value = auc(labels, scores)
    assert swapped == (None if value is None else pytest.approx(1 - value))


@given(RANKED)
def test_it_is_undefined_exactly_where_a_reason_is_given(ranked):
    labels, scores = columns(ranked)
    assert (auc(labels, scores) is None) == bool(why_undefined(labels))


def test_values_by_hand():
    assert auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75
    assert auc([0, 1, None], [0.1, 0.2, -9.0]) == 1.0
    assert auc([0, 1, 0, 1], [3.0, 3.0, 3.0, 3.0]) == 0.5
    assert auc([0, 1], [math.inf, -math.inf]) == 0.0


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([0] * 12, "no positive slide among 12"),
        ([1, 1, None], "no negative slide among 2"),
        ([None, None], "no labelled slide among 2"),
        ([], "no labelled slide among 0"),
        ([0, 1], ""),
    ],
)
def test_reasons_name_the_class_that_is_absent(labels, reason):
    assert why_undefined(labels) == reason


def test_a_reason_names_patients_where_patients_are_scored():
    assert why_undefined([0, 0], "patient") == "no positive patient among 2"


def test_scores_that_are_no_numbers_are_refused_unless_their_label_is_missing():
    with pytest.raises(NonFiniteError, match="1 of 2 scores"):
        auc([0, 1], [0.1, math.nan])
    assert auc([0, 1, None], [0.1, 0.2, math.nan]) == 1.0


def test_labels_and_scores_must_be_as_many():
    with pytest.raises(ValueError, match="shorter"):
        auc([0, 1], [0.1])


def both_classes(ranked):
    labels = {label for label, _ in ranked}
    return {0, 1} <= labels


def known_columns(ranked):
    return columns([each for each in ranked if each[0] is not None])


@given(RANKED.filter(both_classes))
def test_curves_and_average_precision_are_those_of_scikit_learn(ranked):
    labels, scores = columns(ranked)
    known, known_scores = known_columns(ranked)
    assert average_precision(labels, scores) == pytest.approx(metrics.average_precision_score(known, known_scores))
    assert auc(labels, scores) == pytest.approx(metrics.roc_auc_score(known, known_scores))
    ours, theirs = roc_curve(labels, scores), metrics.roc_curve(known, known_scores, drop_intermediate=False)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other)
    ours, theirs = precision_recall_curve(labels, scores), metrics.precision_recall_curve(known, known_scores)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other)


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
