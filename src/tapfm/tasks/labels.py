"""Read and check the labels of a cohort table. Unknown values raise an error; they are never guessed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from tapfm.cohort.cohort_table import Cohort
from tapfm.cohort.splits import TRAIN
from tapfm.errors import LabelError, UnknownNameError
from tapfm.results.table import Cell, Column
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.target import Label, TargetKind, TargetKinds

_MAX_EXAMPLES = 3  # invalid values shown per column
_BINARY = BinaryTarget()


def read_labels(cohort: Cohort, targets: TargetKinds) -> dict[str, tuple[Label, ...]]:
    """Return the label of each row for each target. Raises one LabelError for all columns with invalid labels."""
    if missing := [target for target in targets if target not in cohort.label_names]:
        raise _unknown_target_error(cohort, missing)
    if problems := [
        problem for target, kind in targets.items() if (problem := _describe_invalid(cohort, target, kind))
    ]:
        usable = ", ".join(find_binary_columns(cohort)) or "none"
        raise LabelError(
            "Labels must be 0, 1 or empty, but:\n  " + "\n  ".join(problems),
            hint=f"Write 1 or 0, or leave the field empty if the label is unknown. Usable columns: {usable}",
        )
    return {
        target: tuple(kind.parse_label(row.labels[target]) for row in cohort.rows) for target, kind in targets.items()
    }


def find_binary_columns(cohort: Cohort) -> tuple[str, ...]:
    """Return the columns that contain both 0 and 1, and otherwise only empty fields."""
    return tuple(
        name
        for name in cohort.label_names
        if _has_both_classes(cohort, name) and not _describe_invalid(cohort, name, _BINARY)
    )


def find_binary_columns_with_invalid_values(cohort: Cohort) -> dict[str, str]:
    """Return the columns that contain 0, 1 and also invalid values, with a description of these values."""
    found = {
        name: _describe_invalid(cohort, name, _BINARY) for name in cohort.label_names if _has_both_classes(cohort, name)
    }
    return {name: problem for name, problem in found.items() if problem}


def patient_strata(
    cohort: Cohort, labels: Mapping[str, Sequence[Label]], targets: TargetKinds
) -> dict[str, list[str | None]]:
    """Return the stratum of each row's patient, by target."""
    strata = {}
    for target, row_labels in labels.items():
        labels_by_patient: dict[str, list[Label]] = {}
        for row, label in zip(cohort.rows, row_labels, strict=True):
            labels_by_patient.setdefault(row.patient_id, []).append(label)
        kind = targets[target]
        stratum = {patient: kind.stratum(kind.pool_labels(each)) for patient, each in labels_by_patient.items()}
        strata[target] = [stratum[row.patient_id] for row in cohort.rows]
    return strata


def label_count_columns(targets: TargetKinds) -> list[Column]:
    """Return the columns of a table of label counts, one per target."""
    return [Column(f"{target} {kind.label_count_title}") for target, kind in targets.items()]


def label_count_cells(rows: Sequence[Mapping[str, str]], targets: TargetKinds) -> list[Cell]:
    """Return the label counts of each target; the rows contain labels as text."""
    return [
        kind.label_count_cell([kind.parse_label(row.get(target, "")) for row in rows])
        for target, kind in targets.items()
    ]


def check_training_labels(
    cohort: Cohort,
    splits: Mapping[str, str],
    labels: Mapping[str, Sequence[Label]],
    targets: TargetKinds,
    column: str = "split",
) -> None:
    """Raise LabelError if a target does not have both classes in the training split."""
    problems = []
    for target, row_labels in labels.items():
        training_labels = [
            label for row, label in zip(cohort.rows, row_labels, strict=True) if splits.get(row.slide_id) == TRAIN
        ]
        if targets[target].missing_class(training_labels):
            problems.append(f"{target}: {targets[target].describe_counts(training_labels, 'slide')}")
    if problems:
        raise LabelError(
            f"These targets do not have both classes in the training split (column {column}):\n  "
            + "\n  ".join(problems),
            hint="Label more patients of the missing class, change the splits (tapfm split with another --seed, or "
            "without --folds), or omit the target.",
        )


def _has_both_classes(cohort: Cohort, name: str) -> bool:
    """Return whether a column contains both 0 and 1, whatever else it contains."""
    texts = {row.labels[name] for row in cohort.rows}
    return not _BINARY.missing_class([_BINARY.parse_label(text) for text in texts if not _is_invalid(text, _BINARY)])


def _describe_invalid(cohort: Cohort, name: str, kind: TargetKind) -> str:
    """Return which values of a column are not labels, with examples; empty if there are none."""
    texts = {row.labels[name] for row in cohort.rows}
    invalid = {text for text in texts if _is_invalid(text, kind)}
    if not invalid:
        return ""
    rows = [row for row in cohort.rows if row.labels[name] in invalid]
    first: dict[str, str] = {}  # first slide with each value
    for row in rows:
        first.setdefault(row.labels[name], row.slide_id)
    shown = ", ".join(f"'{value}' ({slide_id})" for value, slide_id in list(first.items())[:_MAX_EXAMPLES])
    more = ", ..." if len(first) > _MAX_EXAMPLES else ""
    return f"{name} has {shown}{more} in {len(rows):,} of {len(cohort):,} rows"


def _is_invalid(text: str, kind: TargetKind) -> bool:
    try:
        kind.parse_label(text)
    except ValueError:
        return True
    return False


def _unknown_target_error(cohort: Cohort, missing: Sequence[str]) -> UnknownNameError:
    """Return the error for targets that are not columns, with similar column names (ignoring case) as suggestions."""
    names = {name.lower(): name for name in cohort.label_names}
    near = [names[each] for name in missing for each in difflib.get_close_matches(name.lower(), names, cutoff=0.5)]
    suggestion = f"Did you mean: {', '.join(dict.fromkeys(near))}? " if near else ""
    return UnknownNameError(
        f"{cohort.table_path or 'The cohort'} has no label column named "
        f"{', '.join(map(repr, dict.fromkeys(missing)))}.",
        hint=f"{suggestion}Available: {', '.join(cohort.label_names) or 'none'}",
    )
