"""Numbers as scanners write them."""

from __future__ import annotations


def positive_number(text: str | None) -> float | None:
    """Read a number that may have a decimal comma; None where it is none, not positive or not finite."""
    try:
        value = float((text or "").replace(",", "."))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
