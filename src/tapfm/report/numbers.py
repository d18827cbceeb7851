"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Hashable

from tapfm.metrics.estimate import Estimate
from tapfm.report.content import Cell

ABSENT = "–"


def format_number(value: float | None, digits: int = 3) -> str:
    """Write a number, or a dash."""
    return ABSENT if value is None else _minus(f"{value:.{digits}f}")


def signed(value: float) -> str:
    """Write a difference."""
    return _minus(f"{value:+.3f}")


def _minus(text: str) -> str:
    """Put the sign that is as wide as a plus."""
    return text.replace("-", "\N{MINUS SIGN}")


def percent(part: int, whole: int) -> str:
    """Write a share; a few of many are neither none nor all."""
    if not whole:
        return ABSENT
    few = 0 < part < 0.01 * whole or 0.99 * whole < part < whole
    return f"{part / whole:.1%}" if few else f"{part / whole:.0%}"


def format_interval(estimate: Estimate) -> str:
    """Write an interval, or nothing."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{format_number(estimate.low)} to {format_number(estimate.high)}"


def estimate_cell(estimate: Estimate | None) -> Cell:
    """Write a value, its interval, and why one of them is missing."""
    if estimate is None:
        return Cell("")
    return Cell(format_number(estimate.value), format_interval(estimate), estimate.why)


def called(flag: Hashable) -> str:
    """Write a label or a call."""
    return ABSENT if flag is None else "positive" if flag else "negative"


def duration(seconds: float) -> str:
    """Write a time."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds <= 5400 else f"{seconds / 3600:.1f} h"


def format_bytes(count: int) -> str:
    """Write a number of bytes."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{max(1, round(count / 1e3))} kB"
