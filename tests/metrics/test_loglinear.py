"""Known values and properties of the log-linear fit."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.metrics.loglinear import fit_log_linear


def test_known_values():
    # logarithms 0, 2, 1, 3 at epochs 2, 3, 4, 5: sums of squares 5 and 5, sum of products 4
    found = fit_log_linear({epoch: math.exp(each) for epoch, each in zip((2, 3, 4, 5), (0, 2, 1, 3), strict=True)})
    assert (found.a, found.b, found.r_squared) == (pytest.approx(-1.3), pytest.approx(0.8), pytest.approx(0.64))
    # residual sum of squares 1.8, 2 degrees of freedom; the 97.5% quantile of Student's t is 4.3027
    half_width = 4.3027 * math.sqrt(1.8 / 2 / 5)
    assert (found.b_low, found.b_high) == (
        pytest.approx(0.8 - half_width, abs=1e-4),
        pytest.approx(0.8 + half_width, abs=1e-4),
    )


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=19).filter(lambda losses: np.ptp(np.log(losses)) > 0.01))
def test_residuals_have_no_trend(losses):
    found = fit_log_linear(dict(enumerate(losses, start=2)))
    epochs = np.arange(2, 2 + len(losses))
    residuals = np.log(losses) - found.a - found.b * epochs
    assert (residuals.sum(), residuals @ epochs) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))
    assert found.b_low <= found.b <= found.b_high
    assert found.r_squared == pytest.approx(1 - np.var(residuals) / np.var(np.log(losses)), abs=1e-6)
    assert found.epochs_used == tuple(epochs)


def test_only_epochs_2_to_20_are_fitted():
    losses = {epoch: math.exp(0.4 - 0.081 * epoch) for epoch in range(1, 31)} | {1: 9.0, 21: 9.0}
    found = fit_log_linear(losses)
    assert (found.a, found.b) == (pytest.approx(0.4), pytest.approx(-0.081))
    assert found.b_low == pytest.approx(found.b, abs=1e-6) == pytest.approx(found.b_high, abs=2e-6)
    assert (found.r_squared, found.epochs_used, found.reason) == (pytest.approx(1), tuple(range(2, 21)), "")
    assert fit_log_linear(losses, first=3, last=5).epochs_used == (3, 4, 5)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ({}, "0 epochs from 2 to 20"),
        ({1: 1.0, 2: 1.0, 3: 0.5}, "2 epochs from 2 to 20; a fit needs at least 3"),
        ({2: 1.0, 3: 0.0, 4: 0.5}, "loss of epoch 3"),
        ({2: 1.0, 3: 0.5, 4: -0.1}, "loss of epoch 4"),
        ({2: 1.0, 3: math.nan, 4: 0.5}, "loss of epoch 3"),
    ],
)
def test_missing_fit_has_a_reason(losses, reason):
    found = fit_log_linear(losses)
    assert (found.a, found.b, found.b_low, found.b_high, found.r_squared) == (None,) * 5
    assert reason in found.reason


@pytest.mark.parametrize("last", [0.001, 0.0010000000000000002])  # has the same logarithm
def test_constant_loss_has_slope_0_and_no_r_squared(last):
    found = fit_log_linear({2: 0.001, 3: 0.001, 4: last})
    assert (found.b, found.b_low, found.r_squared) == (0, 0, None)
    assert found.reason
