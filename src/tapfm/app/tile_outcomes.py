"""What became of each slide that was tiled, as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What became of a slide."""

    slide_id: str
    status: str  # ok or failed
    reason: str = ""
    mpp: float | None = None
    mpp_source: str = ""
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
TYPES = {each.name: str(each.type) for each in fields(Outcome)}
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


def outcomes_in(folder: Path) -> dict[str, Outcome]:
    """Recall the outcomes of an earlier run; none where there was none, or its tables were edited beyond reading."""
    try:
        advice = {row["slide_id"]: row["what_to_do"] for row in records(folder / "failures.csv")}
        return {
            row["slide_id"]: Outcome(
                **{name: value(name, row[name]) for name in SUMMARY}, what_to_do=advice.get(row["slide_id"], "")
            )
            for row in records(folder / "summary.csv")
        }
    except (OSError, KeyError, ValueError):
        return {}


def records(path: Path) -> list[dict[str, str]]:
    """Read a CSV."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def value(name: str, text: str) -> Any:
    """Give a field of an outcome its type back."""
    kind = TYPES[name]
    if kind == "str":
        return text
    if not text:
        return None
    return int(text) if "int" in kind else float(text)
