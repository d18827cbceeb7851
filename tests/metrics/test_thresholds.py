"""Thresholds by brute force, and rates against scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from tapfm.errors import SettingError
from tapfm.metrics.thresholds import compute_rates, sensitivity_threshold, youden_threshold

CALLED = st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9])), max_size=30)


def columns(called):
    return known([label for label, _ in called], [probability for _, probability in called])


def known(labels, probabilities):
    return np.array(labels, bool), np.array(probabilities, float)


@given(CALLED)
def test_youden_is_the_best_of_all_thresholds(called):
    labels, probabilities = columns(called)
    threshold = youden_threshold(labels, probabilities)
    if len(set(labels)) < 2:
        assert threshold is None
        return
    assert threshold in [probability for _, probability in called]

    def quality(at):
        found = compute_rates(labels, probabilities, at)
        distance = abs(found.sensitivity - found.specificity)
        return round(found.sensitivity + found.specificity, 9), -round(distance, 9), at

    assert threshold == max({probability for _, probability in called}, key=quality)
    everywhere = [-1.0, 0.05, 0.15, 0.3, 0.7, 2.0]  # nor is one between or beyond them better
    assert quality(threshold)[0] >= max(quality(at)[0] for at in everywhere)


def test_of_equally_good_thresholds_the_more_even_one_is_taken_then_the_higher():
    assert youden_threshold(*known([0, 1, 0, 1, 0, 1], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])) == 0.4
    assert youden_threshold(*known([1, 0], [0.3, 0.3])) == 0.3
    # at 0.8 half of the positives and no negative, at 0.4 all positives and half of the negatives
    assert youden_threshold(*known([1, 0, 1, 0], [0.8, 0.6, 0.4, 0.2])) == 0.8


@given(CALLED, st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_a_sensitivity_is_reached_by_the_highest_threshold_that_can(called, sensitivity):
    labels, probabilities = columns(called)
    threshold = sensitivity_threshold(labels, probabilities, sensitivity)
    if not labels.any():
        assert threshold is None
        return
    enough = [p for _, p in called if compute_rates(labels, probabilities, p).sensitivity >= sensitivity - 1e-9]
    assert threshold == max(enough)


def test_nine_of_ten_are_enough_for_90_percent():
    labels, probabilities = known([1] * 10, [number / 10 for number in range(10)])
    assert sensitivity_threshold(labels, probabilities, 0.9) == 0.1
    assert sensitivity_threshold(labels, probabilities, 0.91) == 0.0


@pytest.mark.parametrize("sensitivity", [0.0, -0.1, 1.1])
def test_a_sensitivity_outside_its_range_is_refused(sensitivity):
    with pytest.raises(SettingError, match="above 0"):
        sensitivity_threshold(*known([1], [0.5]), sensitivity)


@given(CALLED.filter(lambda called: len({label for label, _ in called}) == 2), st.sampled_from([0.05, 0.2, 0.6]))
def test_rates_are_those_of_scikit_learn(called, threshold):
    found = compute_rates(*columns(called), threshold)
    labels, probabilities = columns(called)
    calls = [int(probability >= threshold) for probability in probabilities]
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(labels, calls))
    assert found.f1 == pytest.approx(metrics.f1_score(labels, calls))
    assert found.sensitivity == pytest.approx(metrics.recall_score(labels, calls))
    assert found.specificity == pytest.approx(metrics.recall_score(labels, calls, pos_label=0))
    if 1 in calls:
        assert found.ppv == pytest.approx(metrics.precision_score(labels, calls))
    if 0 in calls:
        assert found.npv == pytest.approx(metrics.precision_score(labels, calls, pos_label=0))


def test_a_share_of_nothing_is_none():
    only_negatives = compute_rates(*known([0, 0], [0.2, 0.8]), 0.5)
    assert (only_negatives.sensitivity, only_negatives.balanced_accuracy, only_negatives.f1) == (None, None, None)
    assert (only_negatives.specificity, only_negatives.ppv, only_negatives.npv) == (0.5, 0.0, 1.0)
    assert compute_rates(*known([0, 1], [0.2, 0.8]), 0.9).ppv is None
    assert compute_rates(*known([0, 1], [0.2, 0.8]), 0.1).npv is None
    assert set(vars(compute_rates(*known([], []), 0.5)).values()) == {None}
