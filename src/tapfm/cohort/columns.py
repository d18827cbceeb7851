"""Recognise the columns of a cohort table by their names, regardless of case, spaces, `_`, `-` and `.`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapfm.cohort.table_problems import TableProblem

# Names that are used for slides only if no other column contains slides
_GENERAL_NAMES = ("slidename", "wsiname", "wsiid", "image", "imageid", "imagename", "imagefile", "imagepath", "file")
# Role of a column, and its names in tables of tapfm and of other tools, normalised. Earlier names are preferred.
_COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "slide_id": ("slideid",),
    "path": (
        *("path", "slidepath", "slide", "wsi", "wsipath", "filename", "filepath", "slidefile", "slidefilename"),
        *_GENERAL_NAMES,
    ),
    "patient_id": (
        *("patientid", "patient", "patientidentifier", "patientnumber", "patientno", "patientnr", "patid"),
        *("caseid", "case", "subjectid", "subject", "participantid", "participant"),
        *("bcrpatientbarcode", "patientbarcode", "casesubmitterid", "casessubmitterid", "submitterid"),
    ),
    "mpp": ("mpp",),
    "split": ("split", "set"),
    "cohort": ("cohort",),
}
# Layouts and the columns that they require, normalised; the first match is used.
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "tapfm": ("slideid", "path"),
    "TAPFM reference": ("slide", "slideid", "set"),
    "TRIDENT": ("wsi",),
    "STAMP": ("patient", "filename"),
    "Patho-Bench": ("caseid", "slideid", "fold0"),
    "CLAM": ("caseid", "slideid"),
    "nnMIL": ("slideid", "patientid"),
    "list of ids": ("slideid",),
    "list of paths": ("path",),
}
_MAX_LISTED = 20  # columns listed in a message
PATIENT_COLUMN_EXAMPLES = "patient_id, Patient ID, case_id, subject_id, bcr_patient_barcode, ..."

SLIDE_COLUMN_EXAMPLES = "slide_id, Slide ID, slide, wsi, path, filename, slide_path, image, ..."


def normalise_column_name(name: str) -> str:
    """Return a column name without case, spaces, `_`, `-` and `.`, so that "Patient ID" equals "patient_id"."""
    return re.sub(r"[\s_.\-]+", "", name).casefold()


def is_known_column(name: str) -> bool:
    """Return whether a column is recognised by its name."""
    return any(normalise_column_name(name) in names for names in _COLUMN_NAMES.values())


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table by role, its label columns and its fold columns."""

    by_role: Mapping[str, str]
    labels: tuple[str, ...]
    folds: Mapping[str, str]  # column by normalised name, such as fold_0
    splits: tuple[str, ...]  # all columns with the name of a split; the first is used
    layout: str
    notes: tuple[str, ...] = ()  # choices between several columns
    problems: tuple[TableProblem, ...] = ()
    patient_problems: tuple[TableProblem, ...] = ()  # of the choice of the column of patients


def find_columns(
    columns: Sequence[str], records: Sequence[Mapping[str, str]], patient_column: str = ""
) -> TableColumns:
    """Find the column of each role.

    records: needed to compare several columns of patients. patient_column: used instead of the recognised one.
    """
    candidates = {role: _find_named(columns, names) for role, names in _COLUMN_NAMES.items()}
    specific = [name for name in candidates["path"] if normalise_column_name(name) not in _GENERAL_NAMES]
    if candidates["slide_id"] or specific:
        candidates["path"] = specific
    by_role, notes, problems = {}, [], []
    for role, found in candidates.items():
        if role == "patient_id":
            continue
        if repeated := [name for name in found[1:] if normalise_column_name(name) == normalise_column_name(found[0])]:
            problems.append(
                TableProblem(
                    f"duplicate columns: {', '.join([found[0], *repeated])}",
                    hint="Rename or remove all but one of them.",
                )
            )
        if found:
            by_role[role] = found[0]
        if len(found) > 1 and not repeated:
            notes.append(f"Using the column '{found[0]}' for {_describe_role(role)}, not {_quote(found[1:])}.")
    chosen, patient_notes, patient_problems = _choose_patient_column(
        columns, records, candidates["patient_id"], patient_column
    )
    if others := [role for role, name in by_role.items() if name == chosen and role != "slide_id"]:
        patient_problems.append(_column_with_two_meanings(chosen, _describe_role(others[0])))
    elif _parse_fold_column(chosen):
        patient_problems.append(_column_with_two_meanings(chosen, "a fold"))
    if chosen:
        by_role["patient_id"] = chosen
    folds = {fold: name for name in columns if (fold := _parse_fold_column(name))}
    if len(folds) < sum(_parse_fold_column(name) is not None for name in columns):
        problems.append(TableProblem("several columns have the same fold number", hint="Remove all but one of them."))
    used = {*by_role.values(), *candidates["patient_id"], *candidates["split"]}
    normalised = {normalise_column_name(name) for name in columns}
    return TableColumns(
        by_role,
        tuple(name for name in columns if name and name not in used and _parse_fold_column(name) is None),
        folds,
        tuple(candidates["split"]),
        next((layout for layout, required in _LAYOUTS.items() if normalised.issuperset(required)), "table"),
        tuple(notes + patient_notes),
        tuple(problems),
        tuple(patient_problems),
    )


def _find_named(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that have one of the names, in the order of the names."""
    found = [name for name in columns if normalise_column_name(name) in names]
    return sorted(found, key=lambda name: names.index(normalise_column_name(name)))


def _describe_role(role: str) -> str:
    names = {"slide_id": "slide ids", "path": "slide files", "split": "the splits", "cohort": "the cohort"}
    return names.get(role, role)


def _column_with_two_meanings(name: str, other: str) -> TableProblem:
    return TableProblem(
        f"the column '{name}' cannot contain the patients (--patient-column), because its name means {other}",
        hint="Rename the column in the table, for example to patient_id.",
    )


def _quote(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _choose_patient_column(
    columns: Sequence[str], records: Sequence[Mapping[str, str]], recognised: Sequence[str], requested: str
) -> tuple[str, list[str], list[TableProblem]]:
    """Return the column of patients (empty: none), notes about the choice, and problems."""
    if requested:
        exact = [name for name in columns if name == requested]
        same = [name for name in columns if normalise_column_name(name) == normalise_column_name(requested)]
        if len(exact or same) == 1:
            return (exact or same)[0], [], []
        return "", [], [unknown_column_problem("--patient-column", requested, columns)]
    filled = [name for name in recognised if any(record[name] for record in records)]
    if len(filled) < 2:
        return (filled or [""])[0], [], []
    first = filled[0]
    if differing := [name for name in filled[1:] if not _groups_alike(records, first, name)]:
        return (
            first,
            [],
            [
                TableProblem(
                    f"the columns {_quote([first, *differing])} can be the patient, but group the slides differently",
                    hint=f"Choose one of them: --patient-column {_quote([first])}",
                )
            ],
        )
    return first, [f"Using the column '{first}' for patients; {_quote(filled[1:])} groups the slides alike."], []


def _groups_alike(records: Sequence[Mapping[str, str]], first: str, second: str) -> bool:
    """Return whether two columns group the rows in the same way."""
    pairs = {(record[first], record[second]) for record in records}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def unknown_column_problem(option: str, name: str, columns: Sequence[str]) -> TableProblem:
    """Return the problem for an option that names a column that the table does not have."""
    by_lowercase = {each.lower(): each for each in columns if each}
    near = difflib.get_close_matches(name.lower(), by_lowercase, n=3, cutoff=0.5)
    suggestion = f"Did you mean: {', '.join(by_lowercase[each] for each in near)}? " if near else ""
    return TableProblem(
        f"no column '{name}' ({option})", hint=f"{suggestion}Available columns: {list_columns(columns)}"
    )


def list_columns(columns: Sequence[str]) -> str:
    """Return the names of columns as text, shortened if there are many."""
    more = f", and {len(columns) - _MAX_LISTED:,} more" if len(columns) > _MAX_LISTED else ""
    return ", ".join(columns[:_MAX_LISTED]) + more


def _parse_fold_column(name: str) -> str | None:
    """Return the normalised name of a fold column, such as fold_0; None for other columns."""
    match = re.fullmatch(r"fold[_ .-]?(\d{1,6})", name.strip(), re.IGNORECASE | re.ASCII)
    return f"fold_{int(match[1])}" if match else None
