"""The log-linear fit and its t quantile against scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tapfm.metrics.loglinear import fit, t_quantile


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 17, 18, 100, 501])
def test_t_quantiles(level, freedom):
    assert t_quantile(level, freedom) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-9)


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=19).filter(lambda losses: np.ptp(np.log(losses)) > 0))
def test_it_is_a_line_through_the_logarithms(losses):
    found = fit(dict(enumerate(losses, start=2)))
    theirs = stats.linregress(range(2, 2 + len(losses)), np.log(losses))
    reach = stats.t.ppf(0.975, len(losses) - 2) * theirs.stderr
    assert (found.a, found.b) == (pytest.approx(theirs.intercept, abs=1e-9), pytest.approx(theirs.slope, abs=1e-9))
    assert (found.b_low, found.b_high) == (
        pytest.approx(theirs.slope - reach, abs=1e-6),
        pytest.approx(theirs.slope + reach, abs=1e-6),
    )
    if np.ptp(losses) > 1e-3 * max(losses):
        assert found.r_squared == pytest.approx(theirs.rvalue**2, abs=1e-6)
    assert found.epochs_used == tuple(range(2, 2 + len(losses)))


def test_the_papers_decay_comes_back_from_epochs_2_to_20_alone():
    losses = {epoch: math.exp(0.4 - 0.081 * epoch) for epoch in range(1, 31)} | {1: 9.0, 21: 9.0}
    found = fit(losses)
    assert (found.a, found.b) == (pytest.approx(0.4), pytest.approx(-0.081))
    assert found.b_low == pytest.approx(found.b) == pytest.approx(found.b_high)
    assert (found.r_squared, found.epochs_used, found.why) == (pytest.approx(1), tuple(range(2, 21)), "")
    assert fit(losses, first=3, last=5).epochs_used == (3, 4, 5)


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ({}, "0 of epochs 2 to 20"),
        ({1: 1.0, 2: 1.0, 3: 0.5}, "2 of epochs 2 to 20; a fit needs 3"),
        ({2: 1.0, 3: 0.0, 4: 0.5}, "loss of epoch 3"),
        ({2: 1.0, 3: 0.5, 4: -0.1}, "loss of epoch 4"),
        ({2: 1.0, 3: math.nan, 4: 0.5}, "loss of epoch 3"),
    ],
)
def test_no_fit_says_why(losses, why):
    found = fit(losses)
    assert (found.a, found.b, found.b_low, found.b_high, found.r_squared) == (None,) * 5
    assert why in found.why


@pytest.mark.parametrize("last", [0.001, 0.0010000000000000002])  # of which the logarithm is the same
def test_a_constant_loss_has_a_slope_of_0_and_no_r_squared(last):
    found = fit({2: 0.001, 3: 0.001, 4: last})
    assert (found.b, found.b_low, found.r_squared) == (0, 0, None)
    assert found.why
