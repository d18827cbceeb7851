"""Read cohort tables: slides, patients, microns per pixel, splits and labels.

The format of tapfm is `slide_id,path[,patient_id][,mpp][,split][,cohort][,fold_0,...][,<labels>...]`. Tables of other
tools are recognised by their columns. Ids are strings (007 stays 007). Paths are relative to the folder of the table.
The problems of all rows are reported in one error. A missing slide file is not one of them: only that slide fails.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tapfm.cohort.columns import (
    SLIDE_COLUMN_EXAMPLES,
    TableColumns,
    find_columns,
    list_columns,
    normalise_column_name,
)
from tapfm.cohort.file_copies import find_copies
from tapfm.cohort.patients import describe_doubtful_patients
from tapfm.cohort.slide_search import SlideFinder, find_slide_path, slide_id_from_name
from tapfm.cohort.table_files import TABLE_SUFFIXES, TextTable, read_text_table
from tapfm.cohort.table_layouts import add_clam_splits, join_clini
from tapfm.cohort.table_options import DEFAULT_TABLE_OPTIONS, TableOptions
from tapfm.cohort.table_problems import TableProblem, raise_problems
from tapfm.errors import CohortError, UnreadableSlideError
from tapfm.runtime.messages import format_count
from tapfm.slides.opening import SLIDE_SUFFIXES, find_slides
from tapfm.slides.readers.parsing import parse_positive_number

_MAX_ID_BYTES = 200
_MISSING_FILE_HINT = "Paths are relative to the folder of the table; pass --slides FOLDER to search another folder."
_SLIDE_ROLES = ("slide_id", "path")


@dataclass(frozen=True)
class SlideRow:
    """One slide of a cohort."""

    slide_id: str
    path: Path
    patient_id: str
    mpp: float | None = None
    split: str | None = None
    cohort: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)  # text of the cells; parsed by the task
    folds: Mapping[str, str] = field(default_factory=dict)  # text of the columns fold_0, fold_1, ...
    row: int = 0  # number in the table; the header is row 1
    missing: str = ""  # why the slide file is missing; empty if there is one
    has_patient: bool = True  # False: the table names no patient, and patient_id is the slide_id

    def check_file(self) -> None:
        """Raise UnreadableSlideError if the table was read without finding the slide file."""
        if self.missing:
            raise UnreadableSlideError(f"{self.missing}.", hint=_MISSING_FILE_HINT)


@dataclass(frozen=True)
class Cohort:
    """The slides of a cohort table, and how the table was read."""

    rows: tuple[SlideRow, ...]
    layout: str
    label_names: tuple[str, ...] = ()
    table_path: Path | None = None  # None for a folder or a single slide
    options: TableOptions = DEFAULT_TABLE_OPTIONS
    columns: tuple[str, ...] = ()  # all columns of the table
    patient_column: str = ""  # empty: every slide counts as its own patient
    notes: tuple[str, ...] = ()  # choices made when reading
    patient_warnings: tuple[str, ...] = ()  # for commands that split or evaluate
    patient_problems: tuple[TableProblem, ...] = ()  # errors of commands that split or evaluate

    def __len__(self) -> int:
        return len(self.rows)

    def check_ids(self, slide_ids: Sequence[str]) -> None:
        """Raise CohortError if an id is not in the cohort."""
        known = {row.slide_id for row in self.rows}
        if missing := [slide_id for slide_id in slide_ids if slide_id not in known]:
            raise CohortError(
                f"No slide in the cohort has the id {', '.join(map(repr, missing))}.",
                hint=f"Available ids: {', '.join(sorted(known)[:8])}{', ...' if len(known) > 8 else ''}",
            )

    def is_missing(self, text: str) -> bool:
        """Return whether the text of a cell means that the value is missing."""
        return not text or text.casefold() in self._missing_values or _without_brackets(text) in self._missing_values

    @cached_property
    def _missing_values(self) -> frozenset[str]:
        return frozenset(each.casefold() for each in self.options.missing_values)

    @property
    def summary(self) -> str:
        """One sentence: number of slides and patients, and where patients come from."""
        patients = len({row.patient_id for row in self.rows})
        by = f"column '{self.patient_column}'" if self.patient_column else "every slide is its own patient"
        return f"Read {len(self):,} slides of {patients:,} patients ({by}) from {self.table_path}."

    @property
    def missing_files_note(self) -> str:
        """One sentence about slides without a file; empty if there are none."""
        missing = [row for row in self.rows if row.missing]
        if not missing:
            return ""
        first, count = missing[0], f"{len(missing):,} of {len(self):,} slide files were not found"
        search = (
            "" if self.options.slides else " To search another folder: --slides FOLDER (in RUN.toml: cohort.slides)"
        )
        return f"{count}, for example {first.slide_id} ({first.missing}).{search}"

    @property
    def reading_notes(self) -> tuple[str, ...]:
        """How the table was read, and missing files, for commands that do not use patients."""
        return tuple(filter(None, (*self.notes, self.missing_files_note)))


Check = Callable[[Cohort], Iterable[TableProblem]]


def find_patient_problems(cohort: Cohort) -> Sequence[TableProblem]:
    """Return the problems of the patients; a check of commands that split or evaluate."""
    return cohort.patient_problems


def read_cohort(source: Path, options: TableOptions = DEFAULT_TABLE_OPTIONS, *, checks: Sequence[Check] = ()) -> Cohort:
    """Read a cohort table, a folder of slides, or a single slide.

    checks: functions that find more problems, for example of the labels. Raises one CohortError with the problems of
    the table, of all rows and of all checks.
    """
    if not source.exists():
        raise CohortError(
            f"{source} does not exist.", hint="Pass a cohort table (CSV or Excel), a folder of slides, or a slide."
        )
    if options.slides is not None and not options.slides.is_dir():
        raise CohortError(
            f"There is no folder {options.slides}.", hint="Pass the folder of the slides: --slides FOLDER"
        )
    if source.is_dir() or source.suffix.lower() not in TABLE_SUFFIXES:
        cohort = _cohort_from_files(source)
        raise_problems(source, [problem for check in checks for problem in check(cohort)])
        return cohort
    cohort, problems = _parse_table(read_source_table(source, options), options)
    problems += [problem for check in checks for problem in check(cohort)]
    if problems:
        missing = [TableProblem(row.missing, (row.row,), _MISSING_FILE_HINT) for row in cohort.rows if row.missing]
        raise_problems(source, problems, missing)
    return cohort


def read_source_table(source: Path, options: TableOptions) -> TextTable:
    """Return a table as text, joined with the tables of other tools that the options name."""
    table = read_text_table(source, options.encoding)
    if options.clini is not None:
        table = join_clini(table, read_text_table(options.clini, options.encoding), options.patient_column)
    if options.clam_splits is not None:
        table = add_clam_splits(table, options.clam_splits, options.encoding)
    return table


def find_table_columns(table: TextTable, options: TableOptions) -> TableColumns:
    """Find the column of each role. In joined tables, --patient-column may be a column of the table of patients."""
    name = normalise_column_name(options.patient_column)
    joined = options.clini is not None and name not in map(normalise_column_name, table.columns)
    return find_columns(table.columns, [cells for _, cells in table.records], "" if joined else options.patient_column)


def _cohort_from_files(source: Path) -> Cohort:
    """Return a cohort of the slides in a folder, or of one slide, with file names without suffix as ids."""
    rows = list_folder_slides(source) if source.is_dir() else [_row_from_file(source)]
    by_id: dict[str, list[Path]] = defaultdict(list)
    for row in rows:
        by_id[row.slide_id].append(row.path)
    problems = [
        f"{slide_id}: {', '.join(str(path.relative_to(source)) for path in same)}"
        for slide_id, same in by_id.items()
        if len(same) > 1
    ]
    if problems:
        raise CohortError(
            "Several slides have the same file name without suffix, so their ids are not unique:\n  "
            + "\n  ".join(problems),
            hint="Write a cohort table with unique ids: tapfm inspect FOLDER --write-cohort cohort.csv",
        )
    return Cohort(tuple(rows), "folder")


def list_folder_slides(folder: Path) -> list[SlideRow]:
    """Return the slides below a folder, with file names without suffix as ids."""
    paths = find_slides(folder)
    if not paths:
        raise CohortError(f"No slides found below {folder}.", hint=f"Supported suffixes: {', '.join(SLIDE_SUFFIXES)}.")
    return [_row_from_file(path) for path in paths]


def _row_from_file(path: Path) -> SlideRow:
    slide_id = slide_id_from_name(path.absolute().name)
    return SlideRow(slide_id, path, slide_id)


def _parse_table(table: TextTable, options: TableOptions) -> tuple[Cohort, list[TableProblem]]:
    """Return the valid rows of a table as a cohort, and the problems of the others."""
    source = table.source
    columns = find_table_columns(table, options)
    if "slide_id" not in columns.by_role and "path" not in columns.by_role:
        skipped = "".join(f"\n  {note}" for note in table.notes)
        raise CohortError(
            f"{source} has no column with slides; its columns are {list_columns(table.columns)}.{skipped}",
            hint="The first row must contain the column names. Rename the column with the file names or ids of the "
            f"slides; recognised names: {SLIDE_COLUMN_EXAMPLES}",
        )
    problems = [TableProblem(text, (row,) if row else ()) for row, text in table.problems] + list(columns.problems)
    empty = Cohort((), columns.layout, columns.labels, source, options, table.columns)
    finder = SlideFinder(options.slides or source.parent, explicit=options.slides is not None)
    rows = [
        row for number, record in table.records if (row := _parse_row(number, record, columns, empty, finder, problems))
    ]
    if not rows and not problems:
        problems.append(TableProblem("no rows below the header"))
    problems += _find_repeated_slides(rows)
    rows = list({row.slide_id: row for row in reversed(rows)}.values())[::-1]
    patients, patient_problems = _check_patients(rows, columns, options, table.columns)
    cohort = replace(
        empty,
        rows=tuple(rows),
        patient_column=columns.by_role.get("patient_id", ""),
        notes=(*table.notes, *columns.notes),
        patient_warnings=patients,
        patient_problems=(*columns.patient_problems, *patient_problems),
    )
    return cohort, problems


def _find_repeated_slides(rows: Sequence[SlideRow]) -> list[TableProblem]:
    """Return a problem for each slide_id, and for each slide file, that is listed more than once."""
    problems = []
    by_id: dict[str, list[SlideRow]] = defaultdict(list)
    for row in rows:
        by_id[row.slide_id].append(row)
    for slide_id, same in by_id.items():
        if len(same) > 1:
            numbers = tuple(row.row for row in same)
            problems.append(TableProblem(f"duplicate slide_id '{slide_id}'", numbers, "List each slide once."))
    first = {same[0].row: same[0] for same in by_id.values()}
    for copies, what in find_copies({number: row.path for number, row in first.items()}):
        named = ", ".join(f"{first[number].slide_id} ({first[number].path.name})" for number in copies[:3])
        patients = list(dict.fromkeys(first[number].patient_id for number in copies))
        under = f", listed under {len(patients)} patients: {', '.join(patients[:3])}" if len(patients) > 1 else ""
        problems.append(
            TableProblem(
                f"{named} are {what}{under}", tuple(copies), "List each slide file once, under the right patient."
            )
        )
    return problems


def _check_patients(
    rows: Sequence[SlideRow], columns: TableColumns, options: TableOptions, all_columns: Sequence[str]
) -> tuple[tuple[str, ...], list[TableProblem]]:
    """Return warnings about patients for commands that split or evaluate, and problems."""
    column = columns.by_role.get("patient_id", "")
    patients = {row.slide_id: row.patient_id for row in rows}
    problems = [
        TableProblem(
            f"no patient in column '{column}'",
            (row.row,),
            "Write the patient of every slide; for a patient with one slide, any id that no other patient has.",
        )
        for row in rows
        if column and not row.has_patient
    ]
    problems += [
        _spreadsheet_error(row.row, columns, "patient_id", row.patient_id) for row in rows if _is_error(row.patient_id)
    ]
    if options.slides_are_patients:
        shared = [patient for patient, count in Counter(patients.values()).items() if count > 1]
        if column and shared:
            problems += [
                TableProblem(
                    f"{format_count(len(shared), 'patient')} in column '{column}' "
                    f"{'has' if len(shared) == 1 else 'have'} several slides, such as {shared[0]}",
                    hint="Omit --slides-are-patients.",
                )
            ]
        return (), problems
    return describe_doubtful_patients(patients, column, all_columns), problems


def _is_error(text: str) -> bool:
    """Return whether a cell has an error of a spreadsheet, such as #REF! or #NAME?, in any language."""
    return re.fullmatch(r"#[A-ZÄÖÜ/0-9]+[!?]", text) is not None


def _spreadsheet_error(number: int, columns: TableColumns, role: str, text: str) -> TableProblem:
    problem = f"'{text}' in column '{columns.by_role[role]}' is an error of a spreadsheet"
    return TableProblem(problem, (number,), "Correct the formula of this cell.")


def _parse_row(
    number: int,
    record: Mapping[str, str],
    columns: TableColumns,
    cohort: Cohort,
    finder: SlideFinder,
    problems: list[TableProblem],
) -> SlideRow | None:
    """Return the slide of one record, after adding its problems to `problems`; None if no slide is given."""
    given = {role: record[column] for role, column in columns.by_role.items()}
    slides = {role: "" if cohort.is_missing(text) else text for role, text in given.items() if role in _SLIDE_ROLES}
    slide_name = slides.get("slide_id") or slides.get("path", "")
    if not slide_name:
        names = " and ".join(f"'{columns.by_role[role]}'" for role in _SLIDE_ROLES if role in columns.by_role)
        hint = "Write the id or the file name of the slide, or remove the row."
        problems.append(TableProblem(f"no slide in column {names}", (number,), hint))
        return None
    # With a path, the id is used unchanged. Without one it may be a file name, as in CLAM's process_list_autogen.csv.
    slide_id = slide_name if slides.get("slide_id") and slides.get("path") else slide_id_from_name(slide_name)
    if "/" in slides.get("slide_id", "") or not _is_valid_file_name(slide_id):
        rule = f"no / or \\, only printable characters, no leading dot, at most {_MAX_ID_BYTES} bytes"
        text = f"slide_id {slide_name!r} cannot be used as a file name ({rule})"
        problems.append(TableProblem(text, (number,), "If a column contains paths, name it path, not slide_id."))
    text = given.get("mpp", "")
    mpp = None if cohort.is_missing(text) else parse_positive_number(text)
    if mpp is None and not cohort.is_missing(text):
        problem = f"mpp '{text}' is not a positive number of microns per pixel, such as 0.25"
        problems.append(TableProblem(problem, (number,), "Leave mpp empty to use the scale of the slide file."))
    patient_id = given.get("patient_id", "")
    if "patient_id" in given and cohort.is_missing(patient_id):
        patient_id = ""
    problems += [_spreadsheet_error(number, columns, role, text) for role, text in slides.items() if _is_error(text)]
    path, missing, problem = find_slide_path(number, slides.get("path", ""), slide_name, _cohort_folder(cohort), finder)
    if problem:
        hint = (
            "Write the file of each slide in a column path, or search a folder with one file per slide: --slides FOLDER"
        )
        problems.append(TableProblem(problem, (number,), hint))
    split = given.get("split", "")
    return SlideRow(
        slide_id=slide_id,
        path=path,
        patient_id=patient_id or slide_id,
        has_patient=bool(patient_id),
        mpp=mpp,
        split=None if cohort.is_missing(split) else split,
        cohort=given.get("cohort") or None,
        labels={name: record[name] for name in columns.labels},
        folds={fold: "" if cohort.is_missing(record[name]) else record[name] for fold, name in columns.folds.items()},
        row=number,
        missing=missing,
    )


def _cohort_folder(cohort: Cohort) -> Path:
    """Return the folder that relative paths of the table refer to."""
    return cohort.table_path.parent if cohort.table_path is not None else Path()


def _without_brackets(text: str) -> str:
    """Return a text in lower case, without square brackets around it."""
    return text.removeprefix("[").removesuffix("]").casefold()


def _is_valid_file_name(slide_id: str) -> bool:
    """Return whether an id without "/" can be used as a file name."""
    short = len(slide_id.encode()) <= _MAX_ID_BYTES
    return short and slide_id.isprintable() and "\\" not in slide_id and not slide_id.startswith(".")
