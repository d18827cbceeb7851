"""Format numbers, confidence intervals, durations and sizes as text."""

from __future__ import annotations

from tapfm.results.estimate import Estimate

MISSING = "-"  # shown for a missing value


def format_number(value: float | None, format_spec: str = ".3f") -> str:
    """Format a number, or return a dash for None."""
    return MISSING if value is None else f"{value:{format_spec}}"


def format_interval(estimate: Estimate, format_spec: str = ".3f") -> str:
    """Format a confidence interval, or return an empty string if there is none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:{format_spec}} to {estimate.high:{format_spec}}"


def format_estimate(estimate: Estimate, format_spec: str = ".3f") -> str:
    """Format a value with its interval in brackets, or return a dash."""
    value, interval = format_number(estimate.value, format_spec), format_interval(estimate, format_spec)
    return f"{value} ({interval})" if interval and estimate.value is not None else value


def format_p_value(value: float | None) -> str:
    """Format a p value, or return a dash for None."""
    if value is None:
        return MISSING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def format_percentage(part: int, whole: int) -> str:
    """Format a fraction in per cent. Fractions near 0 and 1 get one decimal place, so that 3 of 1,000 is not 0%."""
    if not whole:
        return MISSING
    is_extreme = 0 < part < 0.01 * whole or 0.99 * whole < part < whole
    return f"{part / whole:.1%}" if is_extreme else f"{part / whole:.0%}"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds <= 5400 else f"{seconds / 3600:.1f} h"


def format_bytes(count: int) -> str:
    """Format a number of bytes in kB or MB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{max(1, round(count / 1e3))} kB"
