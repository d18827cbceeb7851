"""A value with its confidence interval."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A value and its confidence interval. Missing parts are None, never NaN.

    reason: why a part is missing, or how many resamples were excluded.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""
