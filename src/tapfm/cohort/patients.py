"""Find slides that may belong to the same patient although the table does not say so. Nothing is merged."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tapfm.cohort.columns import PATIENT_COLUMN_EXAMPLES, list_columns

_TCGA_PATIENT = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)
_TCGA_LENGTH = 12  # of the part of a barcode that identifies the patient
_MAX_SHARING = 20  # slides that share the beginning of their ids; more are a project or a scanner, not a patient
_MIN_FRACTION = 0.5  # of all slides must share the beginning of their ids with another slide
_NOT_MERGED = "They are not merged: check the patients."
_MAX_LISTED = 3  # groups named in a message


def _tcga_patient(slide_id: str) -> str:
    """Return the part of a TCGA barcode that identifies the patient; empty for other ids."""
    return slide_id[:_TCGA_LENGTH].upper() if _TCGA_PATIENT.match(slide_id) else ""


def _beginning(slide_id: str) -> str:
    """Return the part of an id before the last `_`, `-` or `.`; empty if there is none."""
    return re.sub(r"[_.\-][^_.\-]*$", "", slide_id) if re.search(r"[_.\-]", slide_id) else ""


def _find_patients_in_ids(patients: Mapping[str, str], *, has_patient_column: bool) -> tuple[str, dict[str, list[str]]]:
    """Return what ids share ("TCGA barcode" or "beginning"), and the slides by shared part; empty if nothing is found.

    Only shared parts whose slides have different patients are returned. The beginning of ids is compared only if the
    table has no column of patients, and reported only if at least half of all slides share theirs.

    patients: patient of each slide, by slide_id.
    """
    barcodes = _group(patients, _tcga_patient)
    if barcodes:
        return "TCGA barcode", barcodes
    if has_patient_column:
        return "", {}
    beginnings = {part: same for part, same in _group(patients, _beginning).items() if len(same) <= _MAX_SHARING}
    if sum(map(len, beginnings.values())) < _MIN_FRACTION * len(patients):
        return "", {}
    return "beginning", beginnings


def _group(patients: Mapping[str, str], shared_part: Callable[[str], str]) -> dict[str, list[str]]:
    """Return the slides by the shared part of their ids, where they are listed under more than one patient."""
    groups: dict[str, list[str]] = defaultdict(list)
    for slide_id in patients:
        if part := shared_part(slide_id):
            groups[part].append(slide_id)
    return {part: same for part, same in groups.items() if len({patients[each] for each in same}) > 1}


def _find_similar_patients(patients: Iterable[str]) -> list[list[str]]:
    """Return groups of patient ids that differ only in case, spaces, leading zeros, or `_` instead of `-` or `.`."""
    groups: dict[str, list[str]] = defaultdict(list)
    for patient in dict.fromkeys(patients):
        groups[normalise_id(patient)].append(patient)
    return [same for same in groups.values() if len(same) > 1]


def normalise_id(text: str) -> str:
    """Return an id without differences that typing and spreadsheets introduce, such as leading zeros or .0."""
    text = re.sub(r"\s+", "", text).casefold().removesuffix(".0")
    return re.sub(r"[_.\-]", "-", re.sub(r"\d+", lambda number: number[0].lstrip("0") or "0", text))


def _describe_similar_patients(groups: Sequence[Sequence[str]]) -> str:
    """Return one sentence about patient ids that may mean the same patient."""
    listed = "; ".join(" and ".join(f"'{each}'" for each in same[:_MAX_LISTED]) for same in groups[:_MAX_LISTED])
    more = f"; and {len(groups) - _MAX_LISTED:,} more" if len(groups) > _MAX_LISTED else ""
    return f"Some patient ids differ only in case, spaces, leading zeros or punctuation: {listed}{more}."


def _describe_shared_ids(kind: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return one sentence about slides that seem to belong to the same patient."""
    slides = sum(map(len, groups.values()))
    examples = [f"{part}: {', '.join(same[:3])}{', ...' if len(same) > 3 else ''}" for part, same in groups.items()]
    more = f"; and {len(groups) - _MAX_LISTED:,} more groups" if len(groups) > _MAX_LISTED else ""
    shared = "their TCGA patient barcode" if kind == "TCGA barcode" else "the beginning of their ids"
    return (
        f"{slides:,} slides share {shared} with another slide, but are listed as different patients "
        f"({'; '.join(examples[:_MAX_LISTED])}{more})."
    )


def describe_doubtful_patients(patients: Mapping[str, str], column: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Return warnings if the patients are unknown, or if several of them may be the same.

    patients: patient of each slide. column: the column of patients; empty if there is none. columns: all columns.
    """
    warnings = []
    own_patients = not column or all(slide_id == patient for slide_id, patient in patients.items())
    if own_patients:
        found = f"The column '{column}' repeats the slide ids" if column else "No column of patients"
        warnings.append(
            f"{found}: every slide counts as its own patient. If a patient has several slides, they can be in training "
            "and in test, which makes test results too good, and confidence intervals are too narrow. Name the column "
            "with --patient-column NAME, or pass --slides-are-patients if every slide is from another patient. "
            f"Recognised names: {PATIENT_COLUMN_EXAMPLES}. Columns of the table: {list_columns(columns)}."
        )
    kind, groups = _find_patients_in_ids(patients, has_patient_column=not own_patients)
    if groups:
        warnings.append(f"{_describe_shared_ids(kind, groups)} {_NOT_MERGED}")
    if similar := _find_similar_patients(patients.values()):
        warnings.append(f"{_describe_similar_patients(similar)} {_NOT_MERGED}")
    return tuple(warnings)
