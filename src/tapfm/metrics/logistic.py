"""A small logistic regression with an L2 penalty, for baselines on a few numbers of each slide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tapfm.errors import LabelError, NonFiniteError, SettingError
from tapfm.metrics.arrays import Floats

_TOLERANCE = 1e-10  # of the gradient


@dataclass(frozen=True)
class LogisticFit:
    """Coefficients of standardised columns; a column without spread counts nothing."""

    means: Floats
    deviations: Floats
    coefficients: Floats
    intercept: float

    def logits(self, X: ArrayLike) -> Floats:
        """Score rows of the same columns."""
        rows: Floats = np.asarray(X, dtype=np.float64)
        scored: Floats = (rows - self.means) / self.deviations @ self.coefficients + self.intercept
        return scored


def fit(X: ArrayLike, y: ArrayLike, l2: float = 1.0, *, balanced: bool = False) -> LogisticFit:
    """Minimise the sum of log losses + l2 / 2 |coefficients|^2; the intercept is free.

    `balanced` weighs each class as half of all rows.
    """
    from sklearn.linear_model import LogisticRegression

    rows, labels = _checked(X, y, l2)
    means, deviations = rows.mean(axis=0), rows.std(axis=0)
    constant = deviations <= 1e-12 * np.abs(means)  # up to rounding
    deviations[constant] = 1.0
    standardised = np.where(constant, 0.0, (rows - means) / deviations)  # so that its coefficient is 0
    model = LogisticRegression(
        C=1 / l2, class_weight="balanced" if balanced else None, solver="newton-cholesky", tol=_TOLERANCE
    ).fit(standardised, labels)
    return LogisticFit(means, deviations, model.coef_[0], float(model.intercept_[0]))


def _checked(X: ArrayLike, y: ArrayLike, l2: float) -> tuple[Floats, Floats]:
    """Refuse what cannot be fitted."""
    rows, labels = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if rows.ndim != 2 or labels.shape != rows.shape[:1]:
        raise SettingError(f"A fit needs rows of columns and a label for each row; got {rows.shape}, {labels.shape}.")
    if not l2 > 0:
        raise SettingError(f"l2 must be above 0; got {l2}.", hint="Without it separable rows have no finite fit.")
    if not np.isfinite(rows).all():
        raise NonFiniteError(f"{int((~np.isfinite(rows)).sum())} numbers of the rows are not finite.")
    if set(labels.tolist()) != {0.0, 1.0}:
        raise LabelError("A logistic fit needs labels 0 and 1, both of them.")
    return rows, labels
