"""Patient bootstrap: strata, weighted metrics, percentile intervals and p values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.errors import SettingError
from tapfm.evaluation.patients import _label_patterns as label_patterns
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction
from tapfm.metrics import bootstrap, weighted
from tapfm.metrics.bootstrap import UNLABELLED, bootstrap_p_value, percentile_interval
from tapfm.metrics.bootstrap import _strata as strata
from tapfm.metrics.calibration import brier_score, expected_calibration_error
from tapfm.metrics.ranking import auc, average_precision
from tapfm.metrics.thresholds import compute_threshold_metrics
from tapfm.tasks.catalog import target_kinds

UNITS = st.lists(st.tuples(st.booleans(), st.integers(-5, 5), st.integers(0, 3)), min_size=1, max_size=25)


def unit(number, labels, *, patient=None):
    named = {f"T{index}": label for index, label in enumerate(labels)}
    return Prediction(f"s{number}", patient or f"p{number}", None, "c", named, dict.fromkeys(named, 0.0), 1)


def make_units(*patterns):
    """Return units with these label patterns; patterns are (labels, count)."""
    return [unit(f"{index}-{i}", labels) for index, (labels, count) in enumerate(patterns) for i in range(count)]


def test_resamples_keep_class_sizes_and_sample_patients_equally_often():
    drawn = resample_patients(make_units(([1], 3), ([0], 9), ([None], 2)), target_kinds(["T0"]), resamples=3000)
    assert drawn.counts.shape == (3000, 14)
    for members, size in ((slice(0, 3), 3), (slice(3, 12), 9), (slice(12, 14), 2)):
        assert (drawn.counts[:, members].sum(axis=1) == size).all()
    np.testing.assert_allclose(drawn.counts.mean(axis=0), 1, atol=0.08)


def test_large_strata_are_the_label_patterns_of_all_targets():
    units = make_units(([1, 1], 6), ([1, 0], 7), ([0, 1], 8), ([0, 0], 9))
    drawn = resample_patients(units, target_kinds(["T0", "T1"]), resamples=50)
    assert (drawn.counts[:, 6:13].sum(axis=1) == 7).all()
    patterns = label_patterns(units, [("c", each.patient_id) for each in units], target_kinds(["T0", "T1"]))
    assert sorted(len(members) for members in strata(patterns).values()) == [6, 7, 8, 9]


def test_positives_of_a_rare_target_share_a_stratum():
    few = [("1", "1", "0"), ("1", "0", "1"), ("1", "0", "0"), ("1", UNLABELLED, "0")]
    patterns = [*few, *[("0", "1", "0")] * 20, *[("0", "0", "1")] * 20, *[("0", "0", "0")] * 30]
    assert sorted(strata(patterns).values()) == [[0, 1, 2, 3], [*range(4, 24)], [*range(24, 44)], [*range(44, 74)]]


def test_few_patients_with_many_patterns_share_a_stratum():
    """Otherwise most patients would be alone in a stratum, and the mean over targets would hardly vary."""
    patterns = [tuple(each) for each in ("1000", "0110", "0001", "1100", "0011", "0000", "1010", "0101")]
    assert sorted(strata(patterns).values()) == [[*range(8)]]


def test_names_of_strata_do_not_change():
    # the names seed the resampling: different names would change every confidence interval
    assert list(strata([("1",)] * 5 + [("0",)] * 6 + [(UNLABELLED,)] * 2)) == ["all (1,)", "all (0,)", "rarest None"]
    assert list(strata([("1", "0")] * 2 + [("0", UNLABELLED)] * 9)) == ["rarest (0, 1)", "all (0, None)"]


def test_slides_of_a_patient_are_resampled_together():
    units = [unit(number, [number % 4 // 2], patient=f"p{number // 2}") for number in range(40)]
    drawn = resample_patients(units, target_kinds(["T0"]), resamples=20)
    (_, weights), *_ = drawn.blocks()
    np.testing.assert_array_equal(weights[:, ::2], weights[:, 1::2])
    assert (weights.sum(axis=1) == 40).all()
    assert weights.max() > 1


@given(st.permutations(range(12)))
def test_resamples_do_not_depend_on_the_order_of_units(order):
    units = make_units(([1], 4), ([0], 8))
    (_, plain), *_ = resample_patients(units, target_kinds(["T0"]), resamples=5).blocks()
    (_, other), *_ = resample_patients([units[index] for index in order], target_kinds(["T0"]), resamples=5).blocks()
    np.testing.assert_array_equal(other, plain[:, order])


def test_resamples_depend_on_the_seed_and_are_yielded_in_blocks(monkeypatch):
    units = make_units(([1], 30), ([0], 70))
    first, same, other = (
        resample_patients(units, target_kinds(["T0"]), resamples=9, seed=seed).counts for seed in (1, 1, 2)
    )
    assert (first == same).all()
    assert (first != other).any()
    whole = resample_patients(units, target_kinds(["T0"]), resamples=5)
    (_, all_weights), *_ = whole.blocks()
    monkeypatch.setattr(bootstrap, "_BLOCK_SIZE", 350)
    blocks = list(whole.blocks())
    assert [(rows.start, weights.shape) for rows, weights in blocks] == [(0, (3, 100)), (3, (2, 100))]
    np.testing.assert_array_equal(np.concatenate([weights for _, weights in blocks]), all_weights)
    with pytest.raises(SettingError, match="at least 1"):
        resample_patients(units, target_kinds(["T0"]), resamples=0)


@given(UNITS, st.sampled_from([0.1, 0.5, 0.9]))
def test_weighted_metrics_equal_metrics_of_repeated_units(units, threshold):
    positive = np.array([label for label, _, _ in units])
    scores = np.array([float(score) for _, score, _ in units])
    probabilities = 1 / (1 + np.exp(-scores))
    weights = np.array([[1.0] * len(units), [times for _, _, times in units]])
    for row, times in enumerate(weights.astype(int)):
        labels, repeated, repeated_probabilities = (
            np.repeat(each, times) for each in (positive, scores, probabilities)
        )
        expected = {
            "auc": (auc(labels, repeated), weighted.aucs(weights, positive, scores)),
            "ap": (average_precision(labels, repeated), weighted.average_precisions(weights, positive, scores)),
            "brier": (
                brier_score(labels, repeated_probabilities),
                weighted.brier_scores(weights, positive, probabilities),
            ),
            "ece": (
                expected_calibration_error(labels, repeated_probabilities),
                weighted.calibration_errors(weights, positive, probabilities),
            ),
        }
        plain = vars(compute_threshold_metrics(labels, repeated_probabilities, threshold))
        by_name = weighted.threshold_metrics(weights, positive, probabilities, threshold)
        assert plain.keys() == by_name.keys()
        expected |= {name: (plain[name], by_name[name]) for name in plain}
        for name, (value, rows) in expected.items():
            assert rows[row] == pytest.approx(np.nan if value is None else value, nan_ok=True, abs=1e-12), name


def test_weighted_auc_of_infinite_scores():
    scores = np.array([-np.inf, -np.inf, 0.0, np.inf])
    assert weighted.aucs(np.ones((1, 4)), np.array([False, True, False, True]), scores).tolist() == [0.625]


def test_percentile_interval_contains_the_value():
    resampled = np.linspace(0, 1, 1001)
    assert percentile_interval(0.5, resampled).low == pytest.approx(0.025)
    assert percentile_interval(0.5, resampled).high == pytest.approx(0.975)
    assert percentile_interval(0.01, resampled).low == 0.01
    assert percentile_interval(0.99, resampled).high == 0.99


def test_undefined_resamples_are_excluded_and_counted():
    resampled = np.linspace(0, 1, 100)
    resampled[:5] = np.nan
    assert (
        percentile_interval(0.5, resampled).reason
        == "5 of 100 resamples excluded, because the metric is undefined in them"
    )
    assert percentile_interval(0.5, resampled).low is not None
    resampled[:40] = np.nan
    few = percentile_interval(0.5, resampled)
    assert (few.value, few.low, few.reason) == (
        0.5,
        None,
        "no confidence interval: the metric is undefined in 40 of 100 resamples",
    )
    assert bootstrap_p_value(resampled) is None
    assert percentile_interval(1.0, np.ones(50)).reason == "no confidence interval: all resamples give the same value"
    assert percentile_interval(None, np.full(50, np.nan), reason="no positive").reason == "no positive"


def test_p_values():
    assert bootstrap_p_value(np.array([1.0] * 98 + [-1.0] * 1)) == pytest.approx(2 * 2 / 100)
    assert bootstrap_p_value(np.ones(99)) == pytest.approx(2 * 1 / 100)
    assert bootstrap_p_value(np.zeros(99)) == 1
    assert bootstrap_p_value(np.full(99, 1e-17)) == 1  # a rounding error


def test_coverage_of_bootstrap_intervals():
    rng = np.random.default_rng(5)
    truth = 0.7602  # P(positive above negative), normal scores 1 apart
    units = make_units(([1], 40), ([0], 60))
    positive = np.repeat([True, False], [40, 60])
    drawn = resample_patients(units, target_kinds(["T0"]), resamples=300)
    (_, weights), *_ = drawn.blocks()
    covered = 0
    for _ in range(200):
        scores = rng.normal(size=100) + positive
        found = percentile_interval(auc(positive, scores), weighted.aucs(weights, positive, scores))
        covered += found.low <= truth <= found.high
    assert 0.90 <= covered / 200 <= 0.99
