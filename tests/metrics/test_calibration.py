"""Calibration error and reliability bins, and the Brier score compared with scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from sklearn.calibration import calibration_curve

from tapfm.errors import SettingError
from tapfm.metrics.calibration import CalibrationBin, brier_score, expected_calibration_error, reliability_bins

UNITS = st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=40)


def to_arrays(units):
    return np.array([label for label, _ in units], bool), np.array([probability for _, probability in units], float)


@given(UNITS)
def test_brier_matches_scikit_learn(units):
    positive, probabilities = to_arrays(units)
    expected = metrics.brier_score_loss(positive, probabilities, pos_label=True)
    assert brier_score(positive, probabilities) == pytest.approx(expected)


def test_known_values():
    positive, probabilities = to_arrays([(True, 0.9), (False, 0.1), (True, 0.6), (False, 0.7)])
    assert brier_score(positive, probabilities) == pytest.approx((0.01 + 0.01 + 0.16 + 0.49) / 4)
    # lower bin: one negative at 0.1; upper bin: three units with mean probability 2.2 / 3, two of them positive
    assert expected_calibration_error(positive, probabilities, bins=2) == pytest.approx(
        (1 * 0.1 + 3 * abs(2.2 / 3 - 2 / 3)) / 4
    )


@pytest.mark.parametrize(("probability", "bin"), [(0.0, 0), (0.1, 1), (0.3, 3), (0.7, 7), (0.99, 9), (1.0, 9)])
def test_edges_belong_to_the_upper_bin_and_1_to_the_last(probability, bin):
    counts = [each.count for each in reliability_bins(*to_arrays([(True, probability)]))]
    assert counts == [int(number == bin) for number in range(10)]


def test_scikit_learn_assigns_edges_to_the_lower_bin():
    # the reason for our own implementation; if this changes, it can be replaced
    positive, probabilities = to_arrays([(True, 0.5), (False, 0.25)])
    assert [each.count for each in reliability_bins(positive, probabilities, bins=2)] == [1, 1]
    assert calibration_curve(positive, probabilities, n_bins=2)[1].tolist() == [0.375]


def test_means_of_empty_bins_are_none():
    assert reliability_bins(*to_arrays([(False, 0.5), (True, 0.75), (True, 1.0)]), bins=2) == [
        CalibrationBin(0.0, 0.5, 0, None, None),
        CalibrationBin(0.5, 1.0, 3, 0.75, pytest.approx(2 / 3)),
    ]


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 10)), min_size=1, max_size=8))
def test_perfect_calibration_has_error_0(groups):
    # of ten units with probability k / 10, exactly k are positive
    units = [(number < k, k / 10) for k, times in groups for _ in range(times) for number in range(10)]
    assert expected_calibration_error(*to_arrays(units)) == pytest.approx(0, abs=1e-12)


@given(UNITS)
def test_calibration_error_is_at_least_the_overall_difference(units):
    positive, probabilities = to_arrays(units)
    overall = abs(sum(probabilities) - sum(positive)) / len(positive)
    assert overall - 1e-12 <= expected_calibration_error(positive, probabilities) <= 1
    assert expected_calibration_error(positive, probabilities, bins=1) == pytest.approx(overall)


def test_no_labels_give_none_and_zero_bins_are_rejected():
    assert brier_score(*to_arrays([])) is None
    assert expected_calibration_error(*to_arrays([])) is None
    with pytest.raises(SettingError, match="at least 1"):
        reliability_bins(*to_arrays([(True, 0.5)]), bins=0)
