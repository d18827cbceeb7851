"""Logistic regression with an L2 penalty, for baselines with a few features per slide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tapfm.errors import LabelError, NonFiniteError, SettingError
from tapfm.metrics.arrays import Floats

_TOLERANCE = 1e-10  # of the gradient


@dataclass(frozen=True)
class LogisticFit:
    """Coefficients of standardised columns; a constant column has the coefficient 0."""

    means: Floats
    deviations: Floats
    coefficients: Floats
    intercept: float

    def logits(self, X: ArrayLike) -> Floats:
        """Return the logit of each row."""
        rows: Floats = np.asarray(X, dtype=np.float64)
        logits: Floats = (rows - self.means) / self.deviations @ self.coefficients + self.intercept
        return logits


def fit_logistic(X: ArrayLike, y: ArrayLike, l2: float = 1.0, *, balanced: bool = False) -> LogisticFit:
    """Fit by minimising sum of log losses + l2 / 2 |coefficients|^2; the intercept is not penalised.

    balanced: weight the classes so that each counts as half of all rows.
    """
    from sklearn.linear_model import LogisticRegression

    rows, labels = _check_input(X, y, l2)
    means, deviations = rows.mean(axis=0), rows.std(axis=0)
    constant = deviations <= 1e-12 * np.abs(means)
    deviations[constant] = 1.0
    standardised = np.where(constant, 0.0, (rows - means) / deviations)  # a column of zeros gets the coefficient 0
    model = LogisticRegression(
        C=1 / l2, class_weight="balanced" if balanced else None, solver="newton-cholesky", tol=_TOLERANCE
    ).fit(standardised, labels)
    return LogisticFit(means, deviations, model.coef_[0], float(model.intercept_[0]))


def _check_input(X: ArrayLike, y: ArrayLike, l2: float) -> tuple[Floats, Floats]:
    """Return rows and labels as arrays. Raises a TapfmError if they cannot be fitted."""
    rows, labels = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if rows.ndim != 2 or labels.shape != rows.shape[:1]:
        raise SettingError(
            f"X must have two dimensions and y one label per row; got shapes {rows.shape} and {labels.shape}."
        )
    if not l2 > 0:
        raise SettingError(
            f"l2 must be above 0; got {l2}.", hint="Without a penalty, separable classes have no finite solution."
        )
    if not np.isfinite(rows).all():
        raise NonFiniteError(
            f"{int((~np.isfinite(rows)).sum())} values of X are not finite.", hint="Remove rows with NaN or infinity."
        )
    if set(labels.tolist()) != {0.0, 1.0}:
        raise LabelError(
            "y contains only one class, or labels other than 0 and 1.",
            hint="A logistic regression needs labels of both classes, 0 and 1.",
        )
    return rows, labels
