"""Many tests at once: p values corrected by Holm's step-down rule."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct p values for their number; a missing one stays missing and does not count."""
    corrected: list[float | None] = [None] * len(p_values)
    defined = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    largest = 0.0  # a larger p is never corrected to less than a smaller one
    for rank, (p, place) in enumerate(defined):
        largest = max(largest, min(1.0, (len(defined) - rank) * p))
        corrected[place] = largest
    return corrected
