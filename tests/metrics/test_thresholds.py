"""Thresholds compared with a search over all thresholds, and rates compared with scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from tapfm.errors import SettingError
from tapfm.metrics.thresholds import compute_threshold_metrics, sensitivity_threshold, youden_threshold

UNITS = st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9])), max_size=30)


def to_arrays(units):
    return make_arrays([label for label, _ in units], [probability for _, probability in units])


def make_arrays(labels, probabilities):
    return np.array(labels, bool), np.array(probabilities, float)


@given(UNITS)
def test_youden_threshold_maximises_sensitivity_plus_specificity(units):
    labels, probabilities = to_arrays(units)
    threshold = youden_threshold(labels, probabilities)
    if len(set(labels)) < 2:
        assert threshold is None
        return
    assert threshold in [probability for _, probability in units]

    def quality(value):
        found = compute_threshold_metrics(labels, probabilities, value)
        distance = abs(found.sensitivity - found.specificity)
        return round(found.sensitivity + found.specificity, 9), -round(distance, 9), value

    assert threshold == max({probability for _, probability in units}, key=quality)
    other_thresholds = [
        -1.0,
        0.05,
        0.15,
        0.3,
        0.7,
        2.0,
    ]  # between or beyond the probabilities
    assert quality(threshold)[0] >= max(quality(value)[0] for value in other_thresholds)


def test_ties_of_youden_thresholds():
    assert youden_threshold(*make_arrays([0, 1, 0, 1, 0, 1], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])) == 0.4
    assert youden_threshold(*make_arrays([1, 0], [0.3, 0.3])) == 0.3
    # at 0.8 half of the positives and no negative, at 0.4 all positives and half of the negatives
    assert youden_threshold(*make_arrays([1, 0, 1, 0], [0.8, 0.6, 0.4, 0.2])) == 0.8


@given(UNITS, st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_sensitivity_threshold_is_the_highest_possible(units, sensitivity):
    labels, probabilities = to_arrays(units)
    threshold = sensitivity_threshold(labels, probabilities, sensitivity)
    if not labels.any():
        assert threshold is None
        return
    sufficient = [
        p for _, p in units if compute_threshold_metrics(labels, probabilities, p).sensitivity >= sensitivity - 1e-9
    ]
    assert threshold == max(sufficient)


def test_nine_of_ten_positives_are_a_sensitivity_of_0_9():
    labels, probabilities = make_arrays([1] * 10, [number / 10 for number in range(10)])
    assert sensitivity_threshold(labels, probabilities, 0.9) == 0.1
    assert sensitivity_threshold(labels, probabilities, 0.91) == 0.0


@pytest.mark.parametrize("sensitivity", [0.0, -0.1, 1.1])
def test_invalid_sensitivity_is_rejected(sensitivity):
    with pytest.raises(SettingError, match="above 0"):
        sensitivity_threshold(*make_arrays([1], [0.5]), sensitivity)


@given(UNITS.filter(lambda units: len({label for label, _ in units}) == 2), st.sampled_from([0.05, 0.2, 0.6]))
def test_rates_match_scikit_learn(units, threshold):
    found = compute_threshold_metrics(*to_arrays(units), threshold)
    labels, probabilities = to_arrays(units)
    calls = [int(probability >= threshold) for probability in probabilities]
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(labels, calls))
    assert found.f1 == pytest.approx(metrics.f1_score(labels, calls))
    assert found.sensitivity == pytest.approx(metrics.recall_score(labels, calls))
    assert found.specificity == pytest.approx(metrics.recall_score(labels, calls, pos_label=0))
    if 1 in calls:
        assert found.ppv == pytest.approx(metrics.precision_score(labels, calls))
    if 0 in calls:
        assert found.npv == pytest.approx(metrics.precision_score(labels, calls, pos_label=0))


def test_rates_with_denominator_0_are_none():
    only_negatives = compute_threshold_metrics(*make_arrays([0, 0], [0.2, 0.8]), 0.5)
    assert (only_negatives.sensitivity, only_negatives.balanced_accuracy, only_negatives.f1) == (None, None, None)
    assert (only_negatives.specificity, only_negatives.ppv, only_negatives.npv) == (0.5, 0.0, 1.0)
    assert compute_threshold_metrics(*make_arrays([0, 1], [0.2, 0.8]), 0.9).ppv is None
    assert compute_threshold_metrics(*make_arrays([0, 1], [0.2, 0.8]), 0.1).npv is None
    assert set(vars(compute_threshold_metrics(*make_arrays([], []), 0.5)).values()) == {None}
