"""Correction of p values for multiple tests, by Holm's step-down method."""

from __future__ import annotations

from collections.abc import Sequence


def holm_correction(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm-corrected p values; None stays None and does not count as a test."""
    corrected: list[float | None] = [None] * len(p_values)
    defined = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    largest = 0.0  # corrected values keep the order of the p values
    for rank, (p, index) in enumerate(defined):
        largest = max(largest, min(1.0, (len(defined) - rank) * p))
        corrected[index] = largest
    return corrected
