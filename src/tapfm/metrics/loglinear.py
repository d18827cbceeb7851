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
    from scipy import stats

    epochs = tuple(sorted(epoch for epoch in losses if first <= epoch <= last))
    if len(epochs) < 3:
        return _missing(epochs, f"{len(epochs)} of epochs {first} to {last}; a fit needs 3")
    if unusable := [epoch for epoch in epochs if not (math.isfinite(losses[epoch]) and losses[epoch] > 0)]:
        return _missing(epochs, f"no logarithm of the loss of epoch {unusable[0]} ({losses[unusable[0]]:g})")
    k = np.array(epochs, dtype=np.float64)
    logs = np.log([losses[epoch] for epoch in epochs])
    if not np.ptp(logs):
        return LogLinearFit(float(logs[0]), 0.0, 0.0, 0.0, None, epochs, why="a constant loss has no R^2")
    line = stats.linregress(k, logs)
    reach = float(stats.t.ppf((1 + level) / 2, len(epochs) - 2) * line.stderr)
    a, b = float(line.intercept), float(line.slope)
    return LogLinearFit(a, b, b - reach, b + reach, float(line.rvalue) ** 2, epochs)


def _missing(epochs: tuple[int, ...], why: str) -> LogLinearFit:
    """Make the fit that there is not."""
    return LogLinearFit(None, None, None, None, None, epochs, why)
