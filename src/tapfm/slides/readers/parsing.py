"""Parse numeric metadata as scanners write it."""

from __future__ import annotations

_SQUARE_TOLERANCE = 0.02  # relative difference of the x and y values above which pixels are not square


def parse_positive_number(text: str | None) -> float | None:
    """Parse a number that may have a decimal comma; return None unless it is positive and finite."""
    try:
        value = float((text or "").replace(",", "."))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def combine_mpp(mpp_x: float | None, mpp_y: float | None) -> tuple[float | None, str]:
    """Return the mean of the x and y values that are known, and a note if they differ."""
    known = [mpp for mpp in (mpp_x, mpp_y) if mpp is not None]
    if not known:
        return None, ""
    mean = sum(known) / len(known)
    if max(known) / min(known) - 1 <= _SQUARE_TOLERANCE:
        return mean, ""
    return mean, f"pixels are not square ({mpp_x:g} um horizontally, {mpp_y:g} um vertically); using the mean"
