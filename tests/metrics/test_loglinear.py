"""The log-linear fit by hand and by its properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.metrics.loglinear import fit_log_linear


def test_values_by_hand():
    # logarithms 0, 2, 1, 3 at epochs 2, 3, 4, 5: sums of squares 5 of the epochs and of the logarithms, 4 of products
    found = fit_log_linear({epoch: math.exp(each) for epoch, each in zip((2, 3, 4, 5), (0, 2, 1, 3), strict=True)})
    assert (found.a, found.b, found.r_squared) == (pytest.approx(-1.3), pytest.approx(0.8), pytest.approx(0.64))
    # a rest of 1.8 over 2 degrees of freedom, divided by 5; the quantile of a table of Student's t is 4.3027
    reach = 4.3027 * math.sqrt(1.8 / 2 / 5)
    assert (found.b_low, found.b_high) == (pytest.approx(0.8 - reach, abs=1e-4), pytest.approx(0.8 + reach, abs=1e-4))


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=19).filter(lambda losses: np.ptp(np.log(losses)) > 0.01))
def test_what_the_line_leaves_has_no_trend(losses):
    found = fit_log_linear(dict(enumerate(losses, start=2)))
    epochs = np.arange(2, 2 + len(losses))
    rest = np.log(losses) - found.a - found.b * epochs
    assert (rest.sum(), rest @ epochs) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))
    assert found.b_low <= found.b <= found.b_high
    assert found.r_squared == pytest.approx(1 - np.var(rest) / np.var(np.log(losses)), abs=1e-6)
    assert found.epochs_used == tuple(epochs)


def test_the_papers_decay_comes_back_from_epochs_2_to_20_alone():
    losses = {epoch: math.exp(0.4 - 0.081 * epoch) for epoch in range(1, 31)} | {1: 9.0, 21: 9.0}
    found = fit_log_linear(losses)
    assert (found.a, found.b) == (pytest.approx(0.4), pytest.approx(-0.081))
    assert found.b_low == pytest.approx(found.b, abs=1e-6) == pytest.approx(found.b_high, abs=2e-6)
    assert (found.r_squared, found.epochs_used, found.reason) == (pytest.approx(1), tuple(range(2, 21)), "")
    assert fit_log_linear(losses, first=3, last=5).epochs_used == (3, 4, 5)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ({}, "0 of epochs 2 to 20"),
        ({1: 1.0, 2: 1.0, 3: 0.5}, "2 of epochs 2 to 20; a fit needs 3"),
        ({2: 1.0, 3: 0.0, 4: 0.5}, "loss of epoch 3"),
        ({2: 1.0, 3: 0.5, 4: -0.1}, "loss of epoch 4"),
        ({2: 1.0, 3: math.nan, 4: 0.5}, "loss of epoch 3"),
    ],
)
def test_no_fit_says_why(losses, reason):
    found = fit_log_linear(losses)
    assert (found.a, found.b, found.b_low, found.b_high, found.r_squared) == (None,) * 5
    assert reason in found.reason


@pytest.mark.parametrize("last", [0.001, 0.0010000000000000002])  # of which the logarithm is the same
def test_a_constant_loss_has_a_slope_of_0_and_no_r_squared(last):
    found = fit_log_linear({2: 0.001, 3: 0.001, 4: last})
    assert (found.b, found.b_low, found.r_squared) == (0, 0, None)
    assert found.reason
