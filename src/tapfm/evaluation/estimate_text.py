"""Estimates in words: a value with its interval, a p value."""

from __future__ import annotations

from tapfm.results.estimate import Estimate


def format_estimate(estimate: Estimate, *, sign: bool = False) -> str:
    """Write a value and its interval, or a dash."""
    if estimate.value is None:
        return "-"
    value = f"{estimate.value:+.3f}" if sign else f"{estimate.value:.3f}"
    return f"{value} {interval_text(estimate, sign=sign)}".strip()


def interval_text(estimate: Estimate, *, sign: bool = False) -> str:
    """Write an interval, or nothing."""
    if estimate.low is None or estimate.high is None:
        return ""
    form = "+.3f" if sign else ".3f"
    return f"({estimate.low:{form}} to {estimate.high:{form}})"


def number(value: float | None) -> str:
    """Write a threshold, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def format_p_value(value: float | None) -> str:
    """Write a p value, or a dash."""
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def escape_cell(text: str) -> str:
    """Keep what a user named from ending a cell of a Markdown table."""
    return text.replace("|", "\\|")
