"""A small logistic regression with an L2 penalty, for baselines on a few numbers of each slide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tapfm.errors import LabelError, NonFiniteError, SettingError
from tapfm.metrics.arrays import Floats

_STEPS = 100  # Newton needs about 10


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
    """Minimise the sum of log losses + l2 / 2 |coefficients|^2 by Newton's method; the intercept is free.

    `balanced` weighs each class as half of all rows.
    """
    rows, labels = _checked(X, y, l2)
    means, deviations = rows.mean(axis=0), rows.std(axis=0)
    constant = deviations <= 1e-12 * np.abs(means)  # up to rounding
    deviations[constant] = 1.0
    weights = np.where(labels == 1, 0.5 / labels.mean(), 0.5 / (1 - labels.mean())) if balanced else np.ones(len(rows))
    standardised = np.where(constant, 0.0, (rows - means) / deviations)  # so that its coefficient is 0
    design = np.column_stack([np.ones(len(rows)), standardised])
    penalty = np.array([0.0] + [l2] * rows.shape[1])
    solution = _newton(design, labels, weights, penalty)
    return LogisticFit(means, deviations, solution[1:], float(solution[0]))


def _newton(design: Floats, labels: Floats, weights: Floats, penalty: Floats) -> Floats:
    """Take Newton steps, halved where one would go up, until they no longer lower the loss."""

    def loss(solution: Floats) -> float:
        logits = design @ solution
        return float(weights @ (np.logaddexp(0, logits) - labels * logits) + penalty @ solution**2 / 2)

    solution = np.zeros(design.shape[1])
    lowest = loss(solution)
    for _ in range(_STEPS):
        chances = 0.5 * (1 + np.tanh(design @ solution / 2))
        gradient = design.T @ (weights * (chances - labels)) + penalty * solution
        curvature = (design.T * (weights * chances * (1 - chances))) @ design + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        if gradient @ step < 1e-20 * (1 + abs(lowest)):
            break
        size = 1.0
        while (reached := loss(solution - size * step)) > lowest and size > 1e-8:
            size /= 2
        if reached > lowest:
            break
        solution, lowest = solution - size * step, reached
    return solution


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
