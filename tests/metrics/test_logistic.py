"""Logistic regression with standardised columns."""

import numpy as np
import pytest

from tapfm.errors import LabelError, NonFiniteError, SettingError
from tapfm.metrics.logistic import fit_logistic


def make_data(rows=80, columns=22, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-3, 4, columns) + rng.normal(size=columns) * 50
    y = (rng.random(rows) < 0.3).astype(int)
    X[:, 0] += 2 * y * X[:, 0].std()
    return X, y


@pytest.mark.parametrize("l2", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("balanced", [False, True])
def test_gradient_of_the_loss_is_0_at_the_fit(l2, balanced):
    X, y = make_data()
    fitted = fit_logistic(X, y, l2, balanced=balanced)
    standardised = (X - X.mean(0)) / X.std(0)
    np.testing.assert_allclose(fitted.logits(X), standardised @ fitted.coefficients + fitted.intercept)
    weights = np.where(y == 1, 0.5 / y.mean(), 0.5 / (1 - y.mean())) if balanced else np.ones(len(y))
    residuals = weights * (1 / (1 + np.exp(-fitted.logits(X))) - y)
    np.testing.assert_allclose(standardised.T @ residuals + l2 * fitted.coefficients, 0, atol=1e-6)
    assert residuals.sum() == pytest.approx(0, abs=1e-6)  # the intercept has no penalty


def test_constant_and_duplicate_columns():
    X, y = make_data(columns=3)
    with_constant = fit_logistic(np.column_stack([X, np.full(len(X), 0.1)]), y)
    assert with_constant.coefficients[-1] == 0
    np.testing.assert_allclose(
        with_constant.logits(np.column_stack([X, np.full(len(X), 0.1)])), fit_logistic(X, y).logits(X)
    )
    duplicated = fit_logistic(np.column_stack([X, X[:, 0]]), y)
    assert duplicated.coefficients[0] == pytest.approx(duplicated.coefficients[-1])


def test_separable_classes_have_a_finite_fit():
    fitted = fit_logistic([[0.0], [1.0], [1e6]], [0, 0, 1], l2=1e-6)
    assert np.isfinite(fitted.logits([[0.0], [1e6]])).all()
    assert (fitted.logits([[0.0], [1.0], [1e6]]) > 0).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("X", "y", "l2", "error"),
    [
        ([[1.0], [2.0]], [1, 1], 1.0, LabelError),
        ([[1.0], [2.0]], [0, 2], 1.0, LabelError),
        (np.zeros((0, 2)), [], 1.0, LabelError),
        ([[1.0], [float("nan")]], [0, 1], 1.0, NonFiniteError),
        ([1.0, 2.0], [0, 1], 1.0, SettingError),
        ([[1.0], [2.0]], [0, 1, 1], 1.0, SettingError),
        ([[1.0], [2.0]], [0, 1], 0.0, SettingError),
    ],
)
def test_invalid_input_is_rejected(X, y, l2, error):
    with pytest.raises(error):
        fit_logistic(X, y, l2)
