"""Log-linear fit of a training loss: log L_k = a + b k over the epochs k."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LogLinearFit:
    """Intercept a, slope b with its 95% confidence interval, and R²; `reason` explains missing values."""

    a: float | None
    b: float | None
    b_low: float | None
    b_high: float | None
    r_squared: float | None
    epochs_used: tuple[int, ...]
    reason: str = ""


def fit_log_linear(losses: Mapping[int, float], first: int = 2, last: int = 20, level: float = 0.95) -> LogLinearFit:
    """Fit log(loss) = a + b * epoch by least squares, for the given epochs from `first` to `last`."""
    from scipy import stats

    epochs = tuple(sorted(epoch for epoch in losses if first <= epoch <= last))
    if len(epochs) < 3:
        return _missing_fit(epochs, f"{len(epochs)} epochs from {first} to {last}; a fit needs at least 3")
    if unusable := [epoch for epoch in epochs if not (math.isfinite(losses[epoch]) and losses[epoch] > 0)]:
        return _missing_fit(epochs, f"the loss of epoch {unusable[0]} has no logarithm ({losses[unusable[0]]:g})")
    k = np.array(epochs, dtype=np.float64)
    logs = np.log([losses[epoch] for epoch in epochs])
    if not np.ptp(logs):
        return LogLinearFit(float(logs[0]), 0.0, 0.0, 0.0, None, epochs, reason="R² is undefined for a constant loss")
    line = stats.linregress(k, logs)
    half_width = float(stats.t.ppf((1 + level) / 2, len(epochs) - 2) * line.stderr)
    a, b = float(line.intercept), float(line.slope)
    return LogLinearFit(a, b, b - half_width, b + half_width, float(line.rvalue) ** 2, epochs)


def _missing_fit(epochs: tuple[int, ...], reason: str) -> LogLinearFit:
    return LogLinearFit(None, None, None, None, None, epochs, reason)
