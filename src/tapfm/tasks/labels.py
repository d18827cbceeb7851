"""Labels of a cohort, as the kind of each target reads them. Any other value is refused rather than guessed at."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from tapfm.cohort.manifest import Cohort
from tapfm.cohort.splits import TRAIN
from tapfm.errors import LabelError, UnknownNameError
from tapfm.results.table import Cell, Column
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.target import Label, TargetKind, TargetKinds

_EXAMPLES = 3  # bad values shown for each column
_BINARY = BinaryTarget()


def read_labels(cohort: Cohort, targets: TargetKinds) -> dict[str, tuple[Label, ...]]:
    """Read the label of each row for each target; all columns that cannot be used in one error."""
    if missing := [target for target in targets if target not in cohort.label_names]:
        raise _unknown_targets(cohort, missing)
    if problems := [problem for target, kind in targets.items() if (problem := _problem_of(cohort, target, kind))]:
        usable = ", ".join(binary_columns(cohort)) or "none"
        raise LabelError(
            "Labels are 0, 1 or empty, but:\n  " + "\n  ".join(problems),
            hint=f"Write 1, 0, or nothing where it is not known. Columns that can be used as they are: {usable}",
        )
    return {
        target: tuple(kind.parse_label(row.labels[target]) for row in cohort.rows) for target, kind in targets.items()
    }


def binary_columns(cohort: Cohort) -> tuple[str, ...]:
    """List the columns that hold both 0 and 1, and nothing else but empty fields."""
    return tuple(
        name for name in cohort.label_names if _has_both(cohort, name) and not _problem_of(cohort, name, _BINARY)
    )


def unusable_columns(cohort: Cohort) -> dict[str, str]:
    """Return the columns that hold both 0 and 1 among other values, and which those are."""
    found = {name: _problem_of(cohort, name, _BINARY) for name in cohort.label_names if _has_both(cohort, name)}
    return {name: problem for name, problem in found.items() if problem}


def patient_strata(
    cohort: Cohort, labels: Mapping[str, Sequence[Label]], targets: TargetKinds
) -> dict[str, list[str | None]]:
    """Return the stratum of each row's patient, by target."""
    strata = {}
    for target, of_rows in labels.items():
        of_patients: dict[str, list[Label]] = {}
        for row, label in zip(cohort.rows, of_rows, strict=True):
            of_patients.setdefault(row.patient_id, []).append(label)
        kind = targets[target]
        stratum = {patient: kind.stratum(kind.patient_label(each)) for patient, each in of_patients.items()}
        strata[target] = [stratum[row.patient_id] for row in cohort.rows]
    return strata


def count_columns(targets: TargetKinds) -> list[Column]:
    """Return the columns of a table that counts labels, one for each target."""
    return [Column(f"{target} {kind.counted}") for target, kind in targets.items()]


def count_cells(rows: Sequence[Mapping[str, str]], targets: TargetKinds) -> list[Cell]:
    """Return the counts of labels, for each target, in rows of a table that hold labels as text."""
    return [
        kind.count_cell([kind.parse_label(row.get(target, "")) for row in rows]) for target, kind in targets.items()
    ]


def check_training_labels(
    cohort: Cohort,
    splits: Mapping[str, str],
    labels: Mapping[str, Sequence[Label]],
    targets: TargetKinds,
    column: str = "split",
) -> None:
    """Refuse targets that the training slides show only one class of, or none."""
    lacking = []
    for target, of_rows in labels.items():
        known = [label for row, label in zip(cohort.rows, of_rows, strict=True) if splits.get(row.slide_id) == TRAIN]
        if targets[target].lacking(known):
            lacking.append(f"{target}: {targets[target].describe_counts(known, 'slide')}")
    if lacking:
        raise LabelError(
            f"The training split (column {column}) cannot teach:\n  " + "\n  ".join(lacking),
            hint="A target needs slides of both classes to learn from: label more patients, or leave the target out.",
        )


def _has_both(cohort: Cohort, name: str) -> bool:
    """Say whether a column holds both 0 and 1, whatever else it holds."""
    texts = {row.labels[name] for row in cohort.rows}
    return not _BINARY.lacking([_BINARY.parse_label(text) for text in texts if not _is_bad(text, _BINARY)])


def _problem_of(cohort: Cohort, name: str, kind: TargetKind) -> str:
    """Say which values of a column are no labels, with examples; nothing where all are."""
    texts = {row.labels[name] for row in cohort.rows}
    bad = {text for text in texts if _is_bad(text, kind)}
    if not bad:
        return ""
    rows = [row for row in cohort.rows if row.labels[name] in bad]
    first: dict[str, str] = {}  # slide with each value
    for row in rows:
        first.setdefault(row.labels[name], row.slide_id)
    shown = ", ".join(f"'{value}' ({slide_id})" for value, slide_id in list(first.items())[:_EXAMPLES])
    more = ", ..." if len(first) > _EXAMPLES else ""
    return f"{name} has {shown}{more} in {len(rows):,} of {len(cohort):,} rows"


def _is_bad(text: str, kind: TargetKind) -> bool:
    """Say whether a text is no label of a kind."""
    try:
        kind.parse_label(text)
    except ValueError:
        return True
    return False


def _unknown_targets(cohort: Cohort, missing: Sequence[str]) -> UnknownNameError:
    """Make the error for targets that are no columns; names of genes are compared in any case."""
    names = {name.lower(): name for name in cohort.label_names}
    near = [names[each] for name in missing for each in difflib.get_close_matches(name.lower(), names, cutoff=0.5)]
    nearest = f"Nearest: {', '.join(dict.fromkeys(near))}. " if near else ""
    return UnknownNameError(
        f"There is no label column called {', '.join(map(repr, dict.fromkeys(missing)))}.",
        hint=f"{nearest}All of them: {', '.join(cohort.label_names) or 'none'}",
    )
