"""Numbers as scanners write them."""

from __future__ import annotations

_SQUARE_TOLERANCE = 0.02  # pixels that differ by more across and down are not square on the glass


def positive_number(text: str | None) -> float | None:
    """Read a number that may have a decimal comma; None where it is none, not positive or not finite."""
    try:
        value = float((text or "").replace(",", "."))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def one_mpp(across: float | None, down: float | None) -> tuple[float | None, str]:
    """Make one value of two, with a note where they differ."""
    known = [mpp for mpp in (across, down) if mpp is not None]
    if not known:
        return None, ""
    mean = sum(known) / len(known)
    if max(known) / min(known) - 1 <= _SQUARE_TOLERANCE:
        return mean, ""
    return mean, f"pixels are not square: {across:g} um across, {down:g} um down; their mean is used"
