"""Join tables of other tools that do not have one row per slide: STAMP's clini table and CLAM's splits.

Problems of the joined files have the row number 0, because the row numbers of a table refer to the table of slides.
Their texts name the file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.cohort.columns import PATIENT_COLUMN_EXAMPLES, find_columns, normalise_column_name
from tapfm.cohort.patients import normalise_id
from tapfm.cohort.slide_search import slide_id_from_name
from tapfm.cohort.table_files import TextTable
from tapfm.cohort.table_text import list_some, read_csv_rows
from tapfm.errors import CohortError
from tapfm.runtime.messages import format_count

_OTHER_FILE = 0  # row number of a problem that is not about a row of the table of slides
_CLAM_SPLITS = ("train", "val", "test")
_CLAM_HINT = "Pass splits_0.csv of CLAM, or the folder that contains splits_0.csv, splits_1.csv, ..."


def join_clini(slide_table: TextTable, clini: TextTable, patient_column: str = "") -> TextTable:
    """Add the columns of a table of patients, such as STAMP's clini table, to each slide of the patient.

    patient_column: used instead of the recognised one, in each of the two tables that has it. Slides whose patient is
    not in the clini table are problems.
    """
    slide_patients = _find_patient_column(slide_table, patient_column)
    clini_patients = _find_patient_column(clini, patient_column)
    by_patient: dict[str, list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for row, cells in clini.records:
        by_patient[cells[clini_patients]].append((row, cells))
    same_names = {normalise_column_name(name): name for name in slide_table.columns}
    shared = {
        name: same_names[normalise_column_name(name)]
        for name in clini.columns
        if name != clini_patients and normalise_column_name(name) in same_names
    }
    added = [name for name in clini.columns if name != clini_patients and name not in shared]
    used = {cells[slide_patients] for _, cells in slide_table.records} - {""}
    if used and used.isdisjoint(by_patient):
        raise _no_common_patient(slide_table, slide_patients, clini, clini_patients)
    problems = list(slide_table.problems)
    problems += [(_OTHER_FILE, f"{clini.source}, row {row}: {text}") for row, text in clini.problems]
    problems += _differing_entries(clini, by_patient, used)
    records = []
    for row, cells in slide_table.records:
        entries = by_patient.get(cells[slide_patients]) if cells[slide_patients] else None
        if not entries:
            problems.append((row, _describe_unknown_patient(cells[slide_patients], clini.source, by_patient)))
            continue
        joined = cells | {name: entries[0][1][name] for name in added}
        for name, slide_name in shared.items():
            text = entries[0][1][name]
            if cells[slide_name] and text and cells[slide_name] != text:
                place = f"'{cells[slide_name]}' in {slide_table.source.name} and '{text}' in {clini.source.name}"
                problems.append((row, f"{slide_name} is {place}"))
            joined[slide_name] = cells[slide_name] or text
        records.append((row, joined))
    with_slides = {cells[slide_patients] for _, cells in records}
    joined_by = f"{slide_table.source} (column '{slide_patients}') with {clini.source} (column '{clini_patients}')"
    notes = [f"Joined {joined_by}: {format_count(len(with_slides), 'patient')}."]
    if without := [patient for patient in by_patient if patient and patient not in with_slides]:
        notes.append(
            f"Without a slide: {format_count(len(without), 'patient')} of {clini.source}: {list_some(without)}."
        )
    return replace(
        slide_table,
        columns=(*slide_table.columns, *added),
        records=tuple(records),
        notes=(*slide_table.notes, *clini.notes, *notes),
        problems=tuple(sorted(problems)),
    )


def _find_patient_column(table: TextTable, requested: str) -> str:
    """Return the column of patients. Raises CohortError if there is none."""
    known = {normalise_column_name(name) for name in table.columns}
    requested = requested if normalise_column_name(requested) in known else ""
    columns = find_columns(table.columns, [cells for _, cells in table.records], requested)
    if found := columns.by_role.get("patient_id"):
        return found
    raise CohortError(
        f"{table.source} has no column of patients to join the tables; its columns are {', '.join(table.columns)}.",
        hint=f"Name it with --patient-column NAME. Recognised names: {PATIENT_COLUMN_EXAMPLES}",
    )


def _differing_entries(
    clini: TextTable, by_patient: Mapping[str, Sequence[tuple[int, Mapping[str, str]]]], used: set[str]
) -> list[tuple[int, str]]:
    """Return a problem for each patient with slides that has several rows with different values."""
    problems = []
    for patient, entries in by_patient.items():
        differing = [name for name in clini.columns if len({cells[name] for _, cells in entries}) > 1]
        if patient in used and differing:
            rows = list_some([str(row) for row, _ in entries])
            names = list_some(differing)
            text = f"{clini.source}, rows {rows}: patient '{patient}' has different values in {names}"
            problems.append((_OTHER_FILE, text))
    return problems


def _describe_unknown_patient(patient: str, source: Path, known: Mapping[str, object]) -> str:
    if not patient:
        return "no patient"
    similar = next((each for each in known if each and normalise_id(each) == normalise_id(patient)), "")
    return f"patient '{patient}' is not in {source}" + (f", which has '{similar}'" if similar else "")


def _no_common_patient(
    slide_table: TextTable, slide_patients: str, clini: TextTable, clini_patients: str
) -> CohortError:
    examples = [
        f"'{name}' has {list_some(list(dict.fromkeys(cells[name] for _, cells in table.records)))}"
        for table, name in ((slide_table, slide_patients), (clini, clini_patients))
    ]
    return CohortError(
        f"No patient of {slide_table.source} is in {clini.source}: {'; '.join(examples)}.",
        hint="Use the same ids in both tables, or name the column of patients with --patient-column NAME.",
    )


@dataclass(frozen=True)
class _ClamSplits:
    """The splits of CLAM's files: by column (`split`, or `fold_0`, ...) the split of each slide id."""

    by_column: Mapping[str, Mapping[str, str]]
    files: Mapping[str, Path]  # by column
    problems: tuple[tuple[int, str], ...] = ()


def _read_clam_splits(path: Path, encoding: str | None) -> _ClamSplits:
    """Read one file of CLAM as the column `split`, or the files of a folder as `fold_0`, `fold_1`, ..."""
    files = _find_split_files(path)
    problems: list[tuple[int, str]] = []
    by_column: dict[str, dict[str, str]] = {}
    for column, file in files.items():
        splits = by_column.setdefault(column, {})
        for split, slide_id in _read_split_file(file, encoding):
            if splits.setdefault(slide_id, split) != split:
                problems.append((_OTHER_FILE, f"{file}: slide '{slide_id}' is in {splits[slide_id]} and in {split}"))
    return _ClamSplits(by_column, files, tuple(problems))


def add_clam_splits(dataset: TextTable, path: Path, encoding: str | None = None) -> TextTable:
    """Add the column `split` (one file of CLAM), or `fold_0`, `fold_1`, ... (a folder), to a table of slides.

    Slides that are in no split have an empty cell. The ids may have the suffix of a slide in one of the two.
    """
    splits = _read_clam_splits(path, encoding)
    columns = find_columns(dataset.columns, [cells for _, cells in dataset.records]).by_role
    id_column = columns.get("slide_id") or columns.get("path")
    if id_column is None:
        raise CohortError(
            f"{dataset.source} has no column with slides; its columns are {', '.join(dataset.columns)}.",
            hint="CLAM's table has the columns case_id, slide_id and label.",
        )
    names = {normalise_column_name(name): name for name in dataset.columns}
    if repeated := [names[key] for key in map(normalise_column_name, splits.by_column) if key in names]:
        raise CohortError(
            f"{dataset.source} already has the column {', '.join(repeated)}.",
            hint="Remove the column from the table, or do not pass CLAM's splits.",
        )
    records = [(row, dict(cells)) for row, cells in dataset.records]
    problems, notes = list(splits.problems), []
    for column, split_by_id in splits.by_column.items():
        cells_by_id: dict[str, list[dict[str, str]]] = defaultdict(list)
        for _, cells in records:
            cells[column] = ""
            for key in {cells[id_column], slide_id_from_name(cells[id_column])}:
                cells_by_id[key].append(cells)
        unknown = []
        for slide_id, split in split_by_id.items():
            matches = cells_by_id.get(slide_id) or cells_by_id.get(slide_id_from_name(slide_id), [])
            for cells in matches:
                cells[column] = split
            if not matches:
                unknown.append(slide_id)
            elif len(several := sorted({cells[id_column] for cells in matches})) > 1:
                problems.append((_OTHER_FILE, f"{splits.files[column]}: slide '{slide_id}' is {list_some(several)}"))
        file = splits.files[column]
        if unknown:
            text = f"{file}: {format_count(len(unknown), 'slide')} not in {dataset.source}: {list_some(unknown)}"
            problems.append((_OTHER_FILE, text))
        counts = Counter(cells[column] for _, cells in records)
        listed = ", ".join(f"{counts[split]:,} {split}" for split in _CLAM_SPLITS)
        excluded = f"; in none of them: {format_count(counts[''], 'slide')}" if counts[""] else ""
        notes.append(f"Read {column} from {file}: {listed}{excluded}.")
    return replace(
        dataset,
        columns=(*dataset.columns, *splits.by_column),
        records=tuple(records),
        notes=(*dataset.notes, *notes),
        problems=tuple(sorted([*dataset.problems, *problems])),
    )


def _find_split_files(path: Path) -> dict[str, Path]:
    """Return the split files by the name of their column."""
    if not path.is_dir():
        return {"split": path}
    for pattern in (r"splits_(\d+)\.csv", r"splits_(\d+)_bool\.csv"):
        found = {int(match[1]): file for file in path.iterdir() if (match := re.fullmatch(pattern, file.name))}
        if found:
            return {f"fold_{number}": found[number] for number in sorted(found)}
    raise CohortError(f"{path} contains no file splits_0.csv of CLAM.", hint=_CLAM_HINT)


def _read_split_file(path: Path, encoding: str | None) -> list[tuple[str, str]]:
    """Return the split and the id of each slide of a file with lists of ids, or with True and False for each id."""
    try:
        table = read_csv_rows(path, path.read_bytes(), encoding)
    except OSError as error:
        raise CohortError(f"{path} cannot be read ({error.strerror}).", hint=_CLAM_HINT) from error
    header = [name.lower() for name in table.rows[0][1]] if table.rows else []
    if "train" not in header or {*header} - {"", *_CLAM_SPLITS} or header.index("train") > 1:
        raise CohortError(
            f"{path} is not a split file of CLAM; its columns are {', '.join(header)}.",
            hint=f"The columns are train, val and test, each with a list of slide ids. {_CLAM_HINT}",
        )
    named_rows = [dict(zip(header, [*cells, *[""] * len(header)], strict=False)) for _, cells in table.rows[1:]]
    cells = {row[split].lower() for row in named_rows for split in header if split}
    first_cells = [row.get("", "") for row in named_rows]
    if cells <= {"true", "false", ""} and "" in header:
        return [(split, row[""]) for row in named_rows for split in header if split and row[split].lower() == "true"]
    if any(first_cells) and first_cells != [str(number) for number in range(len(first_cells))]:
        raise CohortError(
            f"{path} does not contain slide ids. It describes a split: the number of slides of each class.",
            hint=f"Pass the file without '_descriptor'. {_CLAM_HINT}",
        )
    return [(split, row[split]) for split in header if split for row in named_rows if row[split]]
