"""Labels of a cohort: 0, 1 or unknown. Any other value is refused rather than guessed at."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tapfm.cohort.manifest import Cohort
from tapfm.errors import LabelError, UnknownNameError

# 0.0 and 1.0 are what a column of numbers becomes when some of them are missing
_MEANINGS: dict[str, int | None] = {"": None, "0": 0, "1": 1, "0.0": 0, "1.0": 1}
_EXAMPLES = 3  # bad values shown for each column


def read_labels(cohort: Cohort, targets: Sequence[str]) -> dict[str, tuple[int | None, ...]]:
    """Read the label of each row for each target; all columns that cannot be used in one error."""
    if missing := [target for target in targets if target not in cohort.label_names]:
        raise _unknown_targets(cohort, missing)
    if problems := [problem for target in dict.fromkeys(targets) if (problem := problem_of(cohort, target))]:
        usable = ", ".join(binary_columns(cohort)) or "none"
        raise LabelError(
            "Labels are 0, 1 or empty, but:\n  " + "\n  ".join(problems),
            hint=f"Write 1, 0, or nothing where it is not known. Columns that can be used as they are: {usable}",
        )
    return {target: tuple(_MEANINGS[row.labels[target]] for row in cohort.rows) for target in targets}


def binary_columns(cohort: Cohort) -> tuple[str, ...]:
    """List the columns that hold both 0 and 1, and nothing else but empty fields."""
    return tuple(name for name in cohort.label_names if has_both(cohort, name) and not problem_of(cohort, name))


def has_both(cohort: Cohort, name: str) -> bool:
    """Say whether a column holds both 0 and 1, whatever else it holds."""
    return {0, 1} <= {_MEANINGS.get(row.labels[name]) for row in cohort.rows}


def problem_of(cohort: Cohort, name: str) -> str:
    """Say which values of a column are no labels, with examples; nothing where all are."""
    bad = [row for row in cohort.rows if row.labels[name] not in _MEANINGS]
    if not bad:
        return ""
    first: dict[str, str] = {}  # slide with each value
    for row in bad:
        first.setdefault(row.labels[name], row.slide_id)
    shown = ", ".join(f"'{value}' ({slide_id})" for value, slide_id in list(first.items())[:_EXAMPLES])
    more = ", ..." if len(first) > _EXAMPLES else ""
    return f"{name} has {shown}{more} in {len(bad):,} of {len(cohort):,} rows"


def _unknown_targets(cohort: Cohort, missing: Sequence[str]) -> UnknownNameError:
    """Make the error for targets that are no columns; names of genes are compared in any case."""
    names = {name.lower(): name for name in cohort.label_names}
    near = [names[each] for name in missing for each in difflib.get_close_matches(name.lower(), names, cutoff=0.5)]
    nearest = f"Nearest: {', '.join(dict.fromkeys(near))}. " if near else ""
    return UnknownNameError(
        f"There is no label column called {', '.join(map(repr, dict.fromkeys(missing)))}.",
        hint=f"{nearest}All of them: {', '.join(cohort.label_names) or 'none'}",
    )
