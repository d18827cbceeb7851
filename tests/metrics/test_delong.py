"""DeLong's method, compared with its definition, a published example and the bootstrap."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tapfm.metrics.delong import _covariance as covariance
from tapfm.metrics.delong import auc_difference, auc_interval
from tapfm.metrics.ranking import auc

LABELS = st.lists(st.booleans(), max_size=30)
# ratings of CT images, definitely normal to definitely abnormal: Hanley & McNeil, Radiology 1982, table I
NORMAL_COUNTS, ABNORMAL_COUNTS = (33, 6, 6, 11, 2), (3, 2, 2, 11, 33)


def ct_ratings():
    counts = [
        *((0, each) for each in enumerate(NORMAL_COUNTS, 1)),
        *((1, each) for each in enumerate(ABNORMAL_COUNTS, 1)),
    ]
    ratings_by_label = [(label, float(rating)) for label, (rating, count) in counts for _ in range(count)]
    return np.array([label == 1 for label, _ in ratings_by_label]), np.array([rating for _, rating in ratings_by_label])


def covariance_by_definition(labels, *scores):
    """Return the covariance as defined in 1988, from all pairs of a positive and a negative."""
    positives, negatives = ([i for i, label in enumerate(labels) if label == side] for side in (1, 0))
    placements = np.array(
        [[[(s[p] > s[n]) + (s[p] == s[n]) / 2 for n in negatives] for p in positives] for s in scores]
    )
    positive_means, negative_means = placements.mean(axis=2), placements.mean(axis=1)
    means = placements.mean(axis=(1, 2))
    m, n = len(positives), len(negatives)
    positive_deviations, negative_deviations = (each - means[:, None] for each in (positive_means, negative_means))
    return (
        positive_deviations @ positive_deviations.T / (m - 1) / m
        + negative_deviations @ negative_deviations.T / (n - 1) / n
    )


@given(st.data(), LABELS)
def test_covariance_matches_the_definition(data, labels):
    assume(min(labels.count(0), labels.count(1)) >= 2)
    a, b = (data.draw(st.lists(st.integers(0, 6), min_size=len(labels), max_size=len(labels))) for _ in "ab")
    a, b = np.array(a, dtype=float), np.array(b, dtype=float)
    np.testing.assert_allclose(covariance(np.array(labels), [a, b]), covariance_by_definition(labels, a, b), atol=1e-14)


def test_published_example():
    positive, ratings = ct_ratings()
    value = auc_interval(positive, ratings).value
    deviation = math.sqrt(covariance(positive, [ratings])[0, 0])
    # documented by other software: AUC 0.8932, DeLong's standard error 0.0307, normal interval 0.83295 to 0.95339
    assert value == pytest.approx(0.8932, abs=5e-5)
    assert deviation == pytest.approx(0.0307, abs=5e-5)
    assert value - 1.959964 * deviation == pytest.approx(0.83295, abs=5e-6)
    assert value + 1.959964 * deviation == pytest.approx(0.95339, abs=5e-6)


def test_small_example():
    # positives 1, 3, 5 and negatives 0, 2, 4: fractions of negatives below each positive 1/3, 2/3, 1 (mean 2/3)
    # with variance 1/9, fractions of positives above each negative 1, 2/3, 1/3 with variance 1/9: 2 * (1/9) / 3 = 2/27
    positive, scores = np.repeat([True, False], 3), np.array([1.0, 3.0, 5.0, 0.0, 2.0, 4.0])
    assert covariance(positive, [scores])[0, 0] == pytest.approx(2 / 27)
    found = auc_interval(positive, scores)
    half_width = 1.959964 * math.sqrt(2 / 27) / (2 / 9)  # on the logit scale, where the AUC is log 2
    assert (found.value, found.reason) == (pytest.approx(2 / 3), "")
    assert found.low == pytest.approx(1 / (1 + math.exp(half_width - math.log(2))), abs=1e-6)
    assert found.high == pytest.approx(1 / (1 + math.exp(-half_width - math.log(2))), abs=1e-6)
    test = auc_difference(positive, scores, np.array([6.0, 7.0, 8.0, 0.0, 2.0, 4.0]))
    assert test.difference.value == pytest.approx(-1 / 3)
    # the second AUC is 1, with variance 0
    assert test.p == pytest.approx(math.erfc((1 / 3) / math.sqrt(2 / 27) / math.sqrt(2)))


def test_paired_variance_matches_bootstrap():
    rng = np.random.default_rng(3)
    labels = np.repeat([False, True], [80, 60])
    shared = rng.normal(size=140) + labels
    a, b = shared + rng.normal(size=140), shared + 1.5 * rng.normal(size=140)
    sampled = []
    for _ in range(800):
        rows = np.concatenate([rng.integers(0, 80, 80), rng.integers(80, 140, 60)])
        sampled.append(auc(labels[rows], a[rows]) - auc(labels[rows], b[rows]))
    found = auc_difference(labels, a, b)
    width = (found.difference.high - found.difference.low) / 2 / 1.959964
    assert width == pytest.approx(np.std(sampled), rel=0.1)


@given(st.data(), LABELS)
def test_properties_of_interval_and_difference(data, labels):
    sampled = [data.draw(st.lists(st.integers(-4, 4), min_size=len(labels), max_size=len(labels))) for _ in "ab"]
    a, b = (np.array(each, float) for each in sampled)
    labels = np.array(labels, bool)
    found = auc_interval(labels, a)
    assert (found.low is None) == (found.high is None) == bool(found.reason)
    if found.low is not None:
        assert 0 < found.low < found.value < found.high < 1
        flipped = auc_interval(~labels, a)
        assert (flipped.low, flipped.high) == (pytest.approx(1 - found.high), pytest.approx(1 - found.low))
        assert auc_interval(labels, a**3 + 7) == found
    one, other, itself = auc_difference(labels, a, b), auc_difference(labels, b, a), auc_difference(labels, a, a)
    assert one.p == other.p
    if one.difference.value is not None:
        assert one.difference.value == -other.difference.value
        assert itself.difference.value == 0
    if one.difference.low is not None:
        assert one.difference.low <= one.difference.value <= one.difference.high
        assert one.difference.low == pytest.approx(-other.difference.high)
        assert 0 <= one.p <= 1
    else:
        assert one.difference.reason
    if min(labels.sum(), (~labels).sum()) >= 2:
        assert itself.p == 1


@pytest.mark.parametrize(
    ("labels", "scores", "value", "reason"),
    [
        ([0, 0], [1, 2], None, "no positive unit among 2"),
        ([], [], None, "no labelled unit"),
        ([0, 0, 1], [1, 3, 2], 0.5, "one positive unit"),
        ([0, 1, 1], [1, 3, 2], 1.0, "one negative unit"),
        ([0, 0, 1, 1], [1, 2, 3, 4], 1.0, "no DeLong interval: the estimated variance of an AUC of 1 is 0"),
        ([1, 1, 0, 0], [1, 2, 3, 4], 0.0, "no DeLong interval: the estimated variance of an AUC of 0 is 0"),
        ([1, 1, 0, 0], [1, 1, 1, 1], 0.5, "the estimated variance is 0"),
    ],
)
def test_missing_interval_has_a_reason(labels, scores, value, reason):
    found = auc_interval(np.array(labels, bool), np.array(scores, float))
    assert (found.value, found.low, found.high) == (value, None, None)
    assert reason in found.reason


def test_difference_without_variance_has_no_p_value():
    rising = np.arange(1.0, 5.0)
    test = auc_difference(np.array([False, False, True, True]), rising, rising[::-1])
    assert (test.difference.value, test.difference.low, test.p) == (1.0, None, None)
    assert "variance is 0" in test.difference.reason
    assert auc_difference(np.array([False, True, True]), rising[:3], rising[2::-1]).p is None
    assert auc_difference(np.array([True, True]), rising[:2], rising[2:]).difference.value is None


def test_coverage_of_intervals_and_size_of_tests():
    rng = np.random.default_rng(11)
    truth = 0.5 * math.erfc(-1.2 / 2)  # P(positive above negative), normal scores 1.2 apart
    labels = np.repeat([False, True], [40, 25])
    found = [auc_interval(labels, rng.normal(size=65) + 1.2 * labels) for _ in range(400)]
    assert 0.92 <= np.mean([each.low <= truth <= each.high for each in found]) <= 0.98
    tests = [auc_difference(labels, *(rng.normal(size=(2, 65)) + 1.2 * labels)) for _ in range(400)]
    assert 0.02 <= np.mean([each.p <= 0.05 for each in tests]) <= 0.08
