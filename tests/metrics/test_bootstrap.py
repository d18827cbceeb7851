"""The patient bootstrap: whom it draws, that weighted metrics are the plain ones, and what its intervals are worth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import SettingError
from tapfm.evaluation.patients import _patterns_of as patterns_of
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction
from tapfm.metrics import bootstrap, weighted
from tapfm.metrics.bootstrap import UNLABELLED, bootstrap_p_value, percentile_interval
from tapfm.metrics.bootstrap import _strata as strata
from tapfm.metrics.calibration import brier, expected_calibration_error
from tapfm.metrics.ranking import auc, average_precision
from tapfm.metrics.thresholds import compute_rates
from tapfm.tasks.catalog import target_kinds

UNITS = st.lists(st.tuples(st.booleans(), st.integers(-5, 5), st.integers(0, 3)), min_size=1, max_size=25)


def unit(number, labels, *, patient=None):
    named = {f"T{place}": label for place, label in enumerate(labels)}
    return Prediction(f"s{number}", patient or f"p{number}", None, "c", named, dict.fromkeys(named, 0.0), 1)


def make_units(*patterns):
    """As many units as given of each pattern."""
    return [unit(f"{place}-{i}", labels) for place, (labels, count) in enumerate(patterns) for i in range(count)]


def test_every_class_keeps_its_size_and_every_patient_is_drawn_as_often():
    drawn = resample_patients(make_units(([1], 3), ([0], 9), ([None], 2)), target_kinds(["T0"]), resamples=3000)
    assert drawn.counts.shape == (3000, 14)
    for members, size in ((slice(0, 3), 3), (slice(3, 12), 9), (slice(12, 14), 2)):
        assert (drawn.counts[:, members].sum(axis=1) == size).all()
    np.testing.assert_allclose(drawn.counts.mean(axis=0), 1, atol=0.08)


def test_patterns_of_all_targets_keep_their_sizes_where_they_are_many():
    units = make_units(([1, 1], 6), ([1, 0], 7), ([0, 1], 8), ([0, 0], 9))
    drawn = resample_patients(units, target_kinds(["T0", "T1"]), resamples=50)
    assert (drawn.counts[:, 6:13].sum(axis=1) == 7).all()
    patterns = patterns_of(units, [("c", each.patient_id) for each in units], target_kinds(["T0", "T1"]))
    assert sorted(len(members) for members in strata(patterns).values()) == [6, 7, 8, 9]


def test_positives_of_a_rare_target_are_not_each_a_stratum_of_their_own():
    few = [("1", "1", "0"), ("1", "0", "1"), ("1", "0", "0"), ("1", UNLABELLED, "0")]
    patterns = [*few, *[("0", "1", "0")] * 20, *[("0", "0", "1")] * 20, *[("0", "0", "0")] * 30]
    assert sorted(strata(patterns).values()) == [[0, 1, 2, 3], [*range(4, 24)], [*range(24, 44)], [*range(44, 74)]]


def test_few_patients_of_many_patterns_are_drawn_together():
    """With eight patients and four targets nearly everybody would be alone, and the mean over targets hardly vary."""
    patterns = [tuple(each) for each in ("1000", "0110", "0001", "1100", "0011", "0000", "1010", "0101")]
    assert sorted(strata(patterns).values()) == [[*range(8)]]


def test_names_of_strata_are_those_of_all_earlier_versions():
    # they choose the draws: other names would change every interval
    assert list(strata([("1",)] * 5 + [("0",)] * 6 + [(UNLABELLED,)] * 2)) == ["all (1,)", "all (0,)", "rarest None"]
    assert list(strata([("1", "0")] * 2 + [("0", UNLABELLED)] * 9)) == ["rarest (0, 1)", "all (0, None)"]


def test_slides_of_a_patient_stay_together():
    units = [unit(number, [number % 4 // 2], patient=f"p{number // 2}") for number in range(40)]
    drawn = resample_patients(units, target_kinds(["T0"]), resamples=20)
    (_, weights), *_ = drawn.blocks()
    np.testing.assert_array_equal(weights[:, ::2], weights[:, 1::2])
    assert (weights.sum(axis=1) == 40).all()
    assert weights.max() > 1


@given(st.permutations(range(12)))
def test_the_order_of_units_makes_no_difference_to_any_draw(order):
    units = make_units(([1], 4), ([0], 8))
    (_, plain), *_ = resample_patients(units, target_kinds(["T0"]), resamples=5).blocks()
    (_, other), *_ = resample_patients([units[place] for place in order], target_kinds(["T0"]), resamples=5).blocks()
    np.testing.assert_array_equal(other, plain[:, order])


def test_draws_follow_the_seed_and_come_in_blocks(monkeypatch):
    units = make_units(([1], 30), ([0], 70))
    first, same, other = (
        resample_patients(units, target_kinds(["T0"]), resamples=9, seed=seed).counts for seed in (1, 1, 2)
    )
    assert (first == same).all()
    assert (first != other).any()
    whole = resample_patients(units, target_kinds(["T0"]), resamples=5)
    (_, all_weights), *_ = whole.blocks()
    monkeypatch.setattr(bootstrap, "_BLOCK", 350)
    blocks = list(whole.blocks())
    assert [(rows.start, weights.shape) for rows, weights in blocks] == [(0, (3, 100)), (3, (2, 100))]
    np.testing.assert_array_equal(np.concatenate([weights for _, weights in blocks]), all_weights)
    with pytest.raises(SettingError, match="at least 1"):
        resample_patients(units, target_kinds(["T0"]), resamples=0)


@given(UNITS, st.sampled_from([0.1, 0.5, 0.9]))
def test_weighted_metrics_are_the_plain_ones_of_repeated_units(units, threshold):
    positive = np.array([label for label, _, _ in units])
    scores = np.array([float(score) for _, score, _ in units])
    probabilities = 1 / (1 + np.exp(-scores))
    weights = np.array([[1.0] * len(units), [times for _, _, times in units]])
    for row, times in enumerate(weights.astype(int)):
        labels, repeated, chances = (np.repeat(each, times) for each in (positive, scores, probabilities))
        expected = {
            "auc": (auc(labels, repeated), weighted.aucs(weights, positive, scores)),
            "ap": (average_precision(labels, repeated), weighted.average_precisions(weights, positive, scores)),
            "brier": (brier(labels, chances), weighted.briers(weights, positive, probabilities)),
            "ece": (
                expected_calibration_error(labels, chances),
                weighted.calibration_errors(weights, positive, probabilities),
            ),
        }
        plain = vars(compute_rates(labels, chances, threshold))
        by_name = weighted.rates(weights, positive, probabilities, threshold)
        assert plain.keys() == by_name.keys()
        expected |= {name: (plain[name], by_name[name]) for name in plain}
        for name, (value, rows) in expected.items():
            assert rows[row] == pytest.approx(np.nan if value is None else value, nan_ok=True, abs=1e-12), name


def test_infinite_scores_are_ranked_without_complaint():
    scores = np.array([-np.inf, -np.inf, 0.0, np.inf])
    assert weighted.aucs(np.ones((1, 4)), np.array([False, True, False, True]), scores).tolist() == [0.625]


def test_an_interval_is_that_of_percentiles_and_holds_the_value():
    draws = np.linspace(0, 1, 1001)
    assert percentile_interval(0.5, draws).low == pytest.approx(0.025)
    assert percentile_interval(0.5, draws).high == pytest.approx(0.975)
    assert percentile_interval(0.01, draws).low == 0.01
    assert percentile_interval(0.99, draws).high == 0.99


def test_resamples_without_a_value_are_left_out_and_counted():
    draws = np.linspace(0, 1, 100)
    draws[:5] = np.nan
    assert percentile_interval(0.5, draws).reason == "5 of 100 resamples without a value left out"
    assert percentile_interval(0.5, draws).low is not None
    draws[:40] = np.nan
    few = percentile_interval(0.5, draws)
    assert (few.value, few.low, few.reason) == (0.5, None, "no interval: 40 of 100 resamples have no value")
    assert bootstrap_p_value(draws) is None
    assert percentile_interval(1.0, np.ones(50)).reason == "no interval: all resamples give the same value"
    assert percentile_interval(None, np.full(50, np.nan), reason="no positive").reason == "no positive"


def test_p_values_by_hand():
    assert bootstrap_p_value(np.array([1.0] * 98 + [-1.0] * 1)) == pytest.approx(2 * 2 / 100)
    assert bootstrap_p_value(np.ones(99)) == pytest.approx(2 * 1 / 100)
    assert bootstrap_p_value(np.zeros(99)) == 1
    assert bootstrap_p_value(np.full(99, 1e-17)) == 1  # what rounding leaves of nothing


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(5)
    truth = 0.7602  # P(positive above negative), normal scores 1 apart
    units = make_units(([1], 40), ([0], 60))
    positive = np.repeat([True, False], [40, 60])
    drawn = resample_patients(units, target_kinds(["T0"]), resamples=300)
    (_, weights), *_ = drawn.blocks()
    held = 0
    for _ in range(200):
        scores = rng.normal(size=100) + positive
        found = percentile_interval(auc(positive, scores), weighted.aucs(weights, positive, scores))
        held += found.low <= truth <= found.high
    assert 0.90 <= held / 200 <= 0.99
