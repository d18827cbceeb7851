"""Calibration by hand and by its properties, and the Brier score against scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.calibration import calibration_curve

from tapfm.errors import SettingError
from tapfm.metrics.calibration import CalibrationBin, brier, expected_calibration_error, reliability_bins

CALLED = st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=40)


def columns(called):
    return np.array([label for label, _ in called], bool), np.array([probability for _, probability in called], float)


@given(CALLED)
def test_brier_is_that_of_scikit_learn(called):
    positive, probabilities = columns(called)
    theirs = metrics.brier_score_loss(positive, probabilities, pos_label=True)
    assert brier(positive, probabilities) == pytest.approx(theirs)


def test_values_by_hand():
    positive, probabilities = columns([(True, 0.9), (False, 0.1), (True, 0.6), (False, 0.7)])
    assert brier(positive, probabilities) == pytest.approx((0.01 + 0.01 + 0.16 + 0.49) / 4)
    # two bins: below 0.5 one at 0.1 without a positive; above three at a mean of 2.2 / 3, two of them positive
    assert expected_calibration_error(positive, probabilities, bins=2) == pytest.approx(
        (1 * 0.1 + 3 * abs(2.2 / 3 - 2 / 3)) / 4
    )


@pytest.mark.parametrize(("probability", "bin"), [(0.0, 0), (0.1, 1), (0.3, 3), (0.7, 7), (0.99, 9), (1.0, 9)])
def test_a_probability_on_an_edge_belongs_above_and_1_to_the_last_bin(probability, bin):
    counts = [each.count for each in reliability_bins(*columns([(True, probability)]))]
    assert counts == [int(number == bin) for number in range(10)]


def test_scikit_learn_puts_a_probability_on_an_edge_into_the_lower_bin():
    # the reason why the bins are our own: where this changes they need not be
    positive, probabilities = columns([(True, 0.5), (False, 0.25)])
    assert [each.count for each in reliability_bins(positive, probabilities, bins=2)] == [1, 1]
    assert calibration_curve(positive, probabilities, n_bins=2)[1].tolist() == [0.375]


def test_bins_say_what_they_hold_and_empty_ones_say_nothing():
    assert reliability_bins(*columns([(False, 0.5), (True, 0.75), (True, 1.0)]), bins=2) == [
        CalibrationBin(0.0, 0.5, 0, None, None),
        CalibrationBin(0.5, 1.0, 3, 0.75, pytest.approx(2 / 3)),
    ]


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 10)), min_size=1, max_size=8))
def test_perfect_probabilities_have_no_error(groups):
    # of every ten units that are given k / 10 exactly k are positive
    called = [(number < k, k / 10) for k, times in groups for _ in range(times) for number in range(10)]
    assert expected_calibration_error(*columns(called)) == pytest.approx(0, abs=1e-12)


@given(CALLED)
def test_the_error_lies_between_the_overall_gap_and_1(called):
    positive, probabilities = columns(called)
    overall = abs(sum(probabilities) - sum(positive)) / len(positive)
    assert overall - 1e-12 <= expected_calibration_error(positive, probabilities) <= 1
    assert expected_calibration_error(positive, probabilities, bins=1) == pytest.approx(overall)


def test_nothing_labelled_has_no_calibration_and_no_bins_are_refused():
    assert brier(*columns([])) is None
    assert expected_calibration_error(*columns([])) is None
    with pytest.raises(SettingError, match="at least 1"):
        reliability_bins(*columns([(True, 0.5)]), bins=0)
