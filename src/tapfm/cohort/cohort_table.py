"""Read cohort tables: slides, patients, microns per pixel, splits and labels.

The format of tapfm is `slide_id,path[,patient_id][,mpp][,split][,cohort][,fold_0,...][,<labels>...]`. Tables of other
tools are recognised by their columns. Ids are strings (007 stays 007). Paths are relative to the folder of the table.
The problems of all rows are reported in one error.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tapfm.errors import CohortError
from tapfm.slides.opening import SLIDE_SUFFIXES, find_slides, is_slide_name

# Role of a column, and the names that tapfm and other tools use for it, in lower case.
_COLUMN_NAMES: dict[str, tuple[str, ...]] = {
    "slide_id": ("slide_id",),
    "path": ("path", "slide_path", "slide", "wsi", "filename"),
    "patient_id": ("patient_id", "case_id", "patient"),
    "mpp": ("mpp",),
    "split": ("split", "set"),
    "cohort": ("cohort",),
}
# Known layouts and the columns they require; the first match is used.
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "tapfm": ("slide_id", "path"),
    "TAPFM reference": ("slide", "slide_id", "set"),
    "TRIDENT": ("wsi",),
    "STAMP": ("patient", "filename"),
    "Patho-Bench": ("case_id", "slide_id", "fold_0"),
    "CLAM": ("case_id", "slide_id"),
    "nnMIL": ("slide_id", "patient_id"),
    "list of ids": ("slide_id",),
    "list of paths": ("path",),
}
_DUPLICATE_COLUMNS_HINT = "Rename or remove all but one of them."
_MAX_ID_BYTES = 200
_MAX_LISTED = 20  # problems listed in an error message
TABLE_SUFFIXES = (".csv", ".tsv", ".txt")
_FEATURE_SUFFIXES = (".h5", ".pt")  # columns such as FILENAME of STAMP contain feature files instead of slides


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


@dataclass(frozen=True)
class Cohort:
    """The slides of a cohort table, and the layout of the table."""

    rows: tuple[SlideRow, ...]
    layout: str
    label_names: tuple[str, ...] = ()
    table_path: Path | None = None  # None for a folder or a single slide

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


class SlideFinder:
    """Finds slides below a folder by file name or id. Searches on first use.

    explicit: whether the user passed the folder with --slides.
    """

    def __init__(self, folder: Path, *, explicit: bool) -> None:
        self.folder, self.explicit = folder, explicit
        self.row_by_file: dict[Path, int] = {}  # row of the table that uses each file found
        self._found: dict[str, list[Path]] | None = None

    def find(self, name: str) -> list[Path]:
        """Return the slides with this file name, or with this id if the name has no slide suffix."""
        if self._found is None:
            self._found = defaultdict(list)
            for path in find_slides(self.folder):
                for key in {path.name, _slide_id_from_name(path.name)}:
                    self._found[key].append(path)
        # a missing slide must not be replaced by another file with the same id
        return self._found.get(name) or ([] if is_slide_name(name) else self._found.get(_slide_id_from_name(name), []))


def _slide_id_from_name(name: str) -> str:
    """Return a file name without the suffix of a slide or feature file; other dots are part of the id."""
    stem = Path(name).name
    for suffix in (*_FEATURE_SUFFIXES, ".ome.tiff", ".ome.tif", *SLIDE_SUFFIXES):
        if stem.lower().endswith(suffix) and len(stem) > len(suffix):
            return stem[: -len(suffix)]
    return stem


def read_cohort(source: Path, slides_folder: Path | None = None, *, must_exist: bool = True) -> Cohort:
    """Read a cohort table, a folder of slides, or a single slide.

    Raises CohortError with the problems of all rows. must_exist: a slide without a file is a problem.
    """
    if not source.exists():
        raise CohortError(
            f"{source} does not exist.", hint="Pass a cohort table (CSV), a folder of slides, or a slide."
        )
    if source.is_dir() or source.suffix.lower() not in (*TABLE_SUFFIXES, ".xlsx"):
        return _cohort_from_files(source)
    finder = SlideFinder(slides_folder or source.parent, explicit=slides_folder is not None)
    return _read_table(source, finder, must_exist=must_exist)


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
    slide_id = _slide_id_from_name(path.absolute().name)
    return SlideRow(slide_id, path, slide_id)


def _read_table(source: Path, finder: SlideFinder, *, must_exist: bool) -> Cohort:
    header, records = parse_table(source)
    columns = find_columns(source, header)
    label_names = tuple(name for name in header if name not in columns.values() and _is_label_column(name))
    problems: list[str] = []
    rows: list[SlideRow] = []
    row_numbers: dict[str, int] = {}
    for row_number, record in records:
        if len(record) > len(header):
            problems.append(f"row {row_number}: {len(record)} fields, but the header has {len(header)} columns")
            continue
        values = dict(zip(header, [*record, *[""] * (len(header) - len(record))], strict=True))
        row = _parse_row(
            row_number, values, columns, label_names, source.parent, finder, problems, must_exist=must_exist
        )
        if row is None:
            continue
        if row.slide_id in row_numbers:
            problems.append(
                f"row {row_number}: duplicate slide_id '{row.slide_id}', also in row {row_numbers[row.slide_id]}"
            )
            continue
        row_numbers[row.slide_id] = row_number
        rows.append(row)
    if not rows and not problems:
        problems.append("no rows below the header")
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        if len(problems) > _MAX_LISTED:
            problems = [*problems[:_MAX_LISTED], f"... and {len(problems) - _MAX_LISTED:,} more"]
        raise CohortError(
            f"{source} has {count}:\n  " + "\n  ".join(problems),
            hint="Fix the table. Paths are relative to its folder; pass --slides FOLDER to search another folder.",
        )
    return Cohort(tuple(rows), _detect_layout(header), label_names, source)


def parse_table(source: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header of a table, and its records with their row numbers; the header is row 1."""
    hint = "A cohort table is a CSV file in UTF-8 whose first row contains the column names: slide_id,path,..."
    if source.suffix.lower() == ".xlsx":
        raise CohortError(f"{source} is an Excel file.", hint="Save it as CSV (UTF-8) and use that file.")
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CohortError(f"{source} cannot be read ({error}).", hint=hint) from error
    first = text.partition("\n")[0]
    delimiter = max(",\t;", key=first.count)
    try:
        reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
        header = [name.strip() for name in next(reader, [])]
        records = [(reader.line_num, [value.strip() for value in record]) for record in reader if any(record)]
    except csv.Error as error:
        raise CohortError(f"{source}, row {reader.line_num}: not a valid CSV file ({error}).", hint=hint) from error
    if not any(header):
        raise CohortError(f"{source} is empty.", hint=hint)
    if repeated := sorted({name for name in header if name and header.count(name) > 1}):
        raise CohortError(f"{source} has duplicate columns: {', '.join(repeated)}.", hint=_DUPLICATE_COLUMNS_HINT)
    return header, records


def find_columns(source: Path, header: list[str]) -> dict[str, str]:
    """Return the column name of each role in the table, such as {"slide_id": "Slide_ID"}."""
    lower = {name.lower(): name for name in header}
    known = {name for names in _COLUMN_NAMES.values() for name in names}
    if repeated := sorted(name for name in known if [each.lower() for each in header].count(name) > 1):
        raise CohortError(f"{source} has duplicate columns: {', '.join(repeated)}.", hint=_DUPLICATE_COLUMNS_HINT)
    columns = {}
    for role, names in _COLUMN_NAMES.items():
        for name in names:
            if name in lower:
                columns[role] = lower[name]
                break
    if "slide_id" not in columns and "path" not in columns:
        raise CohortError(
            f"{source} has no column with slides; its columns are {', '.join(header)}.",
            hint="Add slide_id and path. Tables of CLAM, STAMP, TRIDENT, Patho-Bench and nnMIL are also supported.",
        )
    return columns


def _detect_layout(header: list[str]) -> str:
    """Return the name of the layout that matches the columns."""
    lower = {name.lower() for name in header}
    return next((name for name, columns in _LAYOUTS.items() if lower.issuperset(columns)), "table")


def _is_label_column(name: str) -> bool:
    """Return whether a column may contain labels: it has a name and is not a fold."""
    return bool(name) and parse_fold_column(name) is None


def parse_fold_column(name: str) -> str | None:
    """Return the normalised name of a fold column, such as fold_0; None for other columns."""
    return f"fold_{int(name[5:])}" if name.lower().startswith("fold_") and name[5:].isdecimal() else None


def _parse_row(
    row_number: int,
    values: dict[str, str],
    columns: dict[str, str],
    label_names: tuple[str, ...],
    base: Path,
    finder: SlideFinder,
    problems: list[str],
    *,
    must_exist: bool,
) -> SlideRow | None:
    """Return the slide of one record, or None after adding its problems to `problems`."""
    given = {role: values[column] for role, column in columns.items()}
    slide_name = given.get("slide_id") or given.get("path", "")
    if not slide_name:
        problems.append(f"row {row_number}: neither slide_id nor path is given")
        return None
    # With a path, the id is used unchanged. Without one it may be a file name, as in CLAM's process_list_autogen.csv.
    slide_id = slide_name if given.get("slide_id") and given.get("path") else _slide_id_from_name(slide_name)
    if "/" in given.get("slide_id", "") or not _is_valid_file_name(slide_id):
        rule = f"no / or \\, only printable characters, no leading dot, at most {_MAX_ID_BYTES} bytes"
        problems.append(f"row {row_number}: slide_id {slide_name!r} cannot be used as a file name ({rule})")
        return None
    path = _find_slide_path(
        row_number, given.get("path", ""), slide_name, base, finder, problems, must_exist=must_exist
    )
    try:
        mpp = parse_mpp(given.get("mpp", ""))
    except ValueError:
        problems.append(
            f"row {row_number}: mpp '{given['mpp']}' is not a positive number of microns per pixel, such as 0.25"
        )
        return None
    if path is None:
        return None
    return SlideRow(
        slide_id=slide_id,
        path=path,
        patient_id=given.get("patient_id") or slide_id,
        mpp=mpp,
        split=given.get("split") or None,
        cohort=given.get("cohort") or None,
        labels={name: values[name] for name in label_names},
        folds={fold: text for name, text in values.items() if (fold := parse_fold_column(name))},
    )


def _is_valid_file_name(slide_id: str) -> bool:
    """Return whether an id without "/" can be used as a file name."""
    short = len(slide_id.encode()) <= _MAX_ID_BYTES
    return short and slide_id.isprintable() and "\\" not in slide_id and not slide_id.startswith(".")


def _find_slide_path(
    row_number: int,
    text: str,
    slide_name: str,
    base: Path,
    finder: SlideFinder,
    problems: list[str],
    *,
    must_exist: bool,
) -> Path | None:
    """Return a slide's file: at the path in the table, or by its name below the slides folder.

    If the table contains a slide path with folders, another file of that name is used only if the user passed the
    slides folder, because it may belong to another patient.
    """
    expected = base / text if text else None
    is_slide_path = bool(text) and not text.lower().endswith(_FEATURE_SUFFIXES)
    name = Path(text or slide_name).name
    if is_slide_path:
        for path in (base / text, finder.folder / text):
            if path.exists():
                return path
    found: list[Path] = []
    if not is_slide_path or finder.explicit or name == text:
        found = finder.find(name)
    if len(found) == 1:
        if (first := finder.row_by_file.setdefault(found[0], row_number)) != row_number:
            problems.append(
                f"row {row_number}: the only file found for {name} is {found[0]}, which row {first} already uses"
            )
            return None
        return found[0]
    if len(found) > 1:
        problems.append(f"row {row_number}: several files match {name}: {', '.join(map(str, found))}")
        return None
    if not must_exist:
        return expected or base / slide_name
    searched_name = name if is_slide_name(name) else f"{_slide_id_from_name(name)}.*"
    missing = f"{expected} does not exist" if is_slide_path else f"no slide {searched_name} below {finder.folder}"
    problems.append(f"row {row_number}: {missing}")
    return None


def parse_mpp(text: str) -> float | None:
    """Parse microns per pixel; None if the text is empty, NA, NaN or None. Raises ValueError if it is invalid."""
    if text.lower() in ("", "na", "nan", "none"):
        return None
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value
