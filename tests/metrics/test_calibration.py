"""Calibration by hand and against scikit-learn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from tapfm.errors import SettingError
from tapfm.metrics.calibration import Bin, brier, expected_calibration_error, reliability

CALLED = st.lists(st.tuples(st.sampled_from([0, 1]), st.floats(0, 1)), min_size=1, max_size=40)


def columns(called):
    return [label for label, _ in called], [probability for _, probability in called]


@given(CALLED)
def test_brier_is_that_of_scikit_learn(called):
    labels, probabilities = columns(called)
    assert brier(labels, probabilities) == pytest.approx(metrics.brier_score_loss(labels, probabilities, pos_label=1))


def test_values_by_hand():
    labels = [1, 0, 1, None, 0]
    probabilities = [0.9, 0.1, 0.6, 0.3, 0.7]
    assert brier(labels, probabilities) == pytest.approx((0.01 + 0.01 + 0.16 + 0.49) / 4)
    # two bins: below 0.5 one at 0.1 without a positive; above three at a mean of 2.2 / 3, two of them positive
    assert expected_calibration_error(labels, probabilities, bins=2) == pytest.approx(
        (1 * 0.1 + 3 * abs(2.2 / 3 - 2 / 3)) / 4
    )


@pytest.mark.parametrize(("probability", "bin"), [(0.0, 0), (0.1, 1), (0.3, 3), (0.7, 7), (0.99, 9), (1.0, 9)])
def test_a_probability_on_an_edge_belongs_above_and_1_to_the_last_bin(probability, bin):
    counts = [each.count for each in reliability([1], [probability])]
    assert counts == [int(number == bin) for number in range(10)]


def test_bins_say_what_they_hold_and_empty_ones_say_nothing():
    assert reliability([0, 1, 1], [0.5, 0.75, 1.0], bins=2) == [
        Bin(0.0, 0.5, 0, None, None),
        Bin(0.5, 1.0, 3, 0.75, pytest.approx(2 / 3)),
    ]


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(1, 10)), min_size=1, max_size=8))
def test_perfect_probabilities_have_no_error(groups):
    # of every ten units that are given k / 10 exactly k are positive
    called = [(int(number < k), k / 10) for k, times in groups for _ in range(times) for number in range(10)]
    assert expected_calibration_error(*columns(called)) == pytest.approx(0, abs=1e-12)


@given(CALLED)
def test_the_error_lies_between_the_overall_gap_and_1(called):
    labels, probabilities = columns(called)
    overall = abs(sum(probabilities) - sum(labels)) / len(labels)
    assert overall - 1e-12 <= expected_calibration_error(labels, probabilities) <= 1
    assert expected_calibration_error(labels, probabilities, bins=1) == pytest.approx(overall)


def test_nothing_labelled_has_no_calibration_and_no_bins_are_refused():
    assert brier([None], [0.5]) is None
    assert expected_calibration_error([], []) is None
    with pytest.raises(SettingError, match="at least 1"):
        reliability([1], [0.5], bins=0)
