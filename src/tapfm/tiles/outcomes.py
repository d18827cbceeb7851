"""What became of each slide that was tiled, as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Outcome:
    """What became of a slide."""

    slide_id: str
    status: str  # ok, failed, or "not tiled" where --only left it out
    reason: str = ""
    mpp: float | None = None
    mpp_source: str = ""
    tissue: str = ""  # how it was found: a method, or drawn
    achieved_mpp: float | None = None
    tiles: int = 0
    tissue_mm2: float | None = None
    removed_background: int | None = None
    removed_padding: int | None = None
    removed_pen: int | None = None
    removed_blur: int | None = None
    removed_unreadable: int | None = None
    warnings: str = ""
    seconds: float | None = None
    what_to_do: str = ""


SUMMARY = tuple(each.name for each in fields(Outcome) if each.name != "what_to_do")
FAILURES = ("slide_id", "reason", "what_to_do")


def table(names: Sequence[str], outcomes: Sequence[Outcome]) -> bytes:
    """Write outcomes as CSV."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for outcome in outcomes:
        values = asdict(outcome)
        writer.writerow([round(v, 4) if isinstance(v := values[name], float) else v for name in names])
    return buffer.getvalue().encode()
