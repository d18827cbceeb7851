"""How fast a loss falls: log L_k = a + b k over the epochs k."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LogLinearFit:
    """Intercept, slope with its 95% interval, and the share of variance explained; `why` where there is no fit."""

    a: float | None
    b: float | None
    b_low: float | None
    b_high: float | None
    r_squared: float | None
    epochs_used: tuple[int, ...]
    why: str = ""


def fit(losses: Mapping[int, float], first: int = 2, last: int = 20, level: float = 0.95) -> LogLinearFit:
    """Fit the losses of epochs first..last, as many of them as there are, by least squares."""
    epochs = tuple(sorted(epoch for epoch in losses if first <= epoch <= last))
    if len(epochs) < 3:
        return _missing(epochs, f"{len(epochs)} of epochs {first} to {last}; a fit needs 3")
    if unusable := [epoch for epoch in epochs if not (math.isfinite(losses[epoch]) and losses[epoch] > 0)]:
        return _missing(epochs, f"no logarithm of the loss of epoch {unusable[0]} ({losses[unusable[0]]:g})")
    k = np.array(epochs, dtype=np.float64)
    logs = np.log([losses[epoch] for epoch in epochs])
    centred = k - k.mean()
    b = float(centred @ logs / (centred @ centred))
    a = float(logs.mean() - b * k.mean())
    residual = float(((logs - a - b * k) ** 2).sum())
    total = float(((logs - logs.mean()) ** 2).sum())
    reach = t_quantile(level, len(epochs) - 2) * math.sqrt(residual / (len(epochs) - 2) / float(centred @ centred))
    if not total:
        return LogLinearFit(a, b, b - reach, b + reach, None, epochs, why="a constant loss has no R^2")
    return LogLinearFit(a, b, b - reach, b + reach, 1 - residual / total, epochs)


def _missing(epochs: tuple[int, ...], why: str) -> LogLinearFit:
    """Make the fit that there is not."""
    return LogLinearFit(None, None, None, None, None, epochs, why)


def t_quantile(level: float, freedom: int) -> float:
    """Find t with P(|T| <= t) = level for Student's distribution."""
    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        if _t_within(middle, freedom) < level:
            low = middle
        else:
            high = middle
    return math.tan(high) * math.sqrt(freedom)


def _t_within(angle: float, freedom: int) -> float:
    """Compute P(|T| <= t) at angle = atan(t / sqrt(freedom)), a finite sum for whole degrees of freedom."""
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
