"""A number with its confidence interval, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value and its confidence interval; what is missing is None, never NaN, and `why` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""
