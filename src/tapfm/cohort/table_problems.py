"""Problems of a cohort table. All problems of a table are reported in one error, in the order of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tapfm.errors import CohortError
from tapfm.runtime.messages import format_count

_MAX_LISTED = 50  # problems listed in an error message
_MAX_NOTES = 5  # missing slide files listed with them
_MAX_ROWS_NAMED = 3  # row numbers named for one problem


@dataclass(frozen=True)
class TableProblem:
    """A problem of a cohort table, the rows that have it (none: the whole table), and how to fix it."""

    text: str
    rows: tuple[int, ...] = ()
    hint: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{_format_rows(self.rows)}: {self.text}" if self.rows else self.text


def _format_rows(rows: Sequence[int]) -> str:
    """Return row numbers as text, such as "row 3", "rows 3 and 5" or "rows 3, 5, 6 and 10 more"."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    named = [str(row) for row in rows[:_MAX_ROWS_NAMED]]
    if len(rows) > _MAX_ROWS_NAMED:
        return f"rows {', '.join(named)} and {len(rows) - _MAX_ROWS_NAMED:,} more"
    return f"rows {', '.join(named[:-1])} and {named[-1]}"


def raise_problems(source: Path, problems: Iterable[TableProblem], notes: Iterable[TableProblem] = ()) -> None:
    """Raise one CohortError with all problems, if there are any.

    notes: slides without a file, which are no errors on their own; listed after the problems.
    """
    errors = list(dict.fromkeys(problems))
    if not errors:
        return
    errors.sort(key=lambda each: each.rows[:1] or (0,))
    also = list(notes)
    lines = [str(each) for each in errors[:_MAX_LISTED]]
    if len(errors) > _MAX_LISTED:
        lines.append(f"... and {len(errors) - _MAX_LISTED:,} more")
    lines += [str(each) for each in also[:_MAX_NOTES]]
    if len(also) > _MAX_NOTES:
        lines.append(f"... and {format_count(len(also) - _MAX_NOTES, 'more slide')} without a file")
    hints = dict.fromkeys(each.hint for each in [*errors, *also] if each.hint)
    count = len(errors) + len(also)
    raise CohortError(
        f"{source} has {format_count(count, 'problem')}:\n  " + "\n  ".join(lines),
        hint="\n".join(hints) or "Fix the table, then run the command again.",
    )
