"""A cohort's table: which slides, whose, at which scale, with which labels.

Ours is `slide_id,path[,patient_id][,mpp][,split][,cohort][,fold_0,...][,<labels>...]`. Tables of other tools are known
by their columns. Ids are strings (007 stays 007), relative paths start at the table, every problem is told at once.
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

# What we look for, and what other tools call it, in lower case.
_ROLES: dict[str, tuple[str, ...]] = {
    "slide_id": ("slide_id",),
    "path": ("path", "slide_path", "slide", "wsi", "filename"),
    "patient_id": ("patient_id", "case_id", "patient"),
    "mpp": ("mpp",),
    "split": ("split", "set"),
    "cohort": ("cohort",),
}
# Whose table it is: the first whose columns are all there.
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
_LONGEST_ID = 200
_SHOWN = 20  # problems named
TABLE_SUFFIXES = (".csv", ".tsv", ".txt")
_FEATURE_SUFFIXES = (".h5", ".pt")  # STAMP's FILENAME and others name the file of features, not the slide


@dataclass(frozen=True)
class SlideRow:
    """One slide of a cohort."""

    slide_id: str
    path: Path
    patient_id: str
    mpp: float | None = None
    split: str | None = None
    cohort: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)  # as written; the task gives them a meaning
    folds: Mapping[str, str] = field(default_factory=dict)  # fold_0, fold_1, ...: the split in each, as written


@dataclass(frozen=True)
class Cohort:
    """The slides of a table, and whose layout it has."""

    rows: tuple[SlideRow, ...]
    layout: str
    label_names: tuple[str, ...] = ()
    source: Path | None = None  # the table, for messages that say what to type

    def __len__(self) -> int:
        return len(self.rows)

    def check_ids(self, slide_ids: Sequence[str]) -> None:
        """Refuse ids that no slide has."""
        known = {row.slide_id for row in self.rows}
        if missing := [slide_id for slide_id in slide_ids if slide_id not in known]:
            raise CohortError(
                f"No slide has the id {', '.join(map(repr, missing))}.",
                hint=f"Ids there are: {', '.join(sorted(known)[:8])}{', ...' if len(known) > 8 else ''}",
            )


class SlideFinder:
    """Slides below a folder by name or by id, for tables that name no path; looks only when asked."""

    def __init__(self, folder: Path, *, asked_for: bool) -> None:
        self.folder, self.asked_for = folder, asked_for
        self.given_to: dict[Path, int] = {}  # the line of the table that each found file went to
        self._found: dict[str, list[Path]] | None = None

    def find(self, name: str) -> list[Path]:
        """Find the slides with this file name, or with this id if it has no slide's suffix."""
        if self._found is None:
            self._found = defaultdict(list)
            for path in find_slides(self.folder):
                for key in {path.name, _id_of(path.name)}:
                    self._found[key].append(path)
        # a slide that is missing must not be replaced by another file of that name
        return self._found.get(name) or ([] if is_slide_name(name) else self._found.get(_id_of(name), []))


def _id_of(name: str) -> str:
    """Take a slide's suffix off a file name; other dots belong to the id."""
    stem = Path(name).name
    for suffix in (*_FEATURE_SUFFIXES, ".ome.tiff", ".ome.tif", *SLIDE_SUFFIXES):
        if stem.lower().endswith(suffix) and len(stem) > len(suffix):
            return stem[: -len(suffix)]
    return stem


def read_cohort(source: Path, slides_folder: Path | None = None, *, must_exist: bool = True) -> Cohort:
    """Read a table, a folder of slides, or a single slide; all problems in one error."""
    if not source.exists():
        raise CohortError(f"There is no file {source}.", hint="A cohort is a CSV, a folder of slides, or a slide.")
    if source.is_dir() or source.suffix.lower() not in (*TABLE_SUFFIXES, ".xlsx"):
        return _cohort_of_slides(source)
    finder = SlideFinder(slides_folder or source.parent, asked_for=slides_folder is not None)
    return _read_table(source, finder, must_exist=must_exist)


def _cohort_of_slides(source: Path) -> Cohort:
    """Make a cohort of a folder (or of one slide), with file names as ids."""
    rows = slides_below(source) if source.is_dir() else [_row_of_file(source)]
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
            "Several slides have the same name:\n  " + "\n  ".join(problems),
            hint="Give each an id of its own in a CSV: tapfm inspect FOLDER --write-cohort cohort.csv",
        )
    return Cohort(tuple(rows), "folder")


def slides_below(folder: Path) -> list[SlideRow]:
    """List the slides of a folder, by their file names."""
    paths = find_slides(folder)
    if not paths:
        raise CohortError(
            f"There is no slide below {folder}.", hint=f"Slides are files with {', '.join(SLIDE_SUFFIXES)}."
        )
    return [_row_of_file(path) for path in paths]


def _row_of_file(path: Path) -> SlideRow:
    """Name a slide, and its patient, by its file."""
    slide_id = _id_of(path.absolute().name)
    return SlideRow(slide_id, path, slide_id)


def _read_table(source: Path, finder: SlideFinder, *, must_exist: bool) -> Cohort:
    """Read a CSV or TSV."""
    header, records = parse_table(source)
    columns = roles_of(source, header)
    label_names = tuple(name for name in header if name not in columns.values() and _is_label(name))
    problems: list[str] = []
    rows: list[SlideRow] = []
    lines: dict[str, int] = {}
    for line, record in records:
        if len(record) > len(header):
            problems.append(f"line {line}: {len(record)} fields, but {len(header)} columns")
            continue
        values = dict(zip(header, [*record, *[""] * (len(header) - len(record))], strict=True))
        row = _row_of(line, values, columns, label_names, source.parent, finder, problems, must_exist=must_exist)
        if row is None:
            continue
        if row.slide_id in lines:
            problems.append(f"line {line}: slide_id '{row.slide_id}' is also on line {lines[row.slide_id]}")
            continue
        lines[row.slide_id] = line
        rows.append(row)
    if not rows and not problems:
        problems.append("no slide below the header")
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        if len(problems) > _SHOWN:
            problems = [*problems[:_SHOWN], f"... and {len(problems) - _SHOWN:,} more"]
        raise CohortError(
            f"{source} has {count}:\n  " + "\n  ".join(problems),
            hint="Mend the table; relative paths start at its own folder, and --slides FOLDER says where else to look.",
        )
    return Cohort(tuple(rows), _layout_of(header), label_names, source)


def parse_table(source: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Split a table into its header and its records with their line numbers."""
    hint = "A cohort is a CSV in UTF-8 whose first line names its columns: slide_id,path,..."
    if source.suffix.lower() == ".xlsx":
        raise CohortError(f"{source} is an Excel file.", hint="Save it as CSV (UTF-8) and give that.")
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
        raise CohortError(f"{source}, line {reader.line_num}: not a table ({error}).", hint=hint) from error
    if not any(header):
        raise CohortError(f"{source} is empty.", hint=hint)
    if repeated := sorted({name for name in header if name and header.count(name) > 1}):
        raise CohortError(f"{source} has several columns called {', '.join(repeated)}.", hint=hint)
    return header, records


def roles_of(source: Path, header: list[str]) -> dict[str, str]:
    """Find which column is which."""
    lower = {name.lower(): name for name in header}
    known = {name for names in _ROLES.values() for name in names}
    if repeated := sorted(name for name in known if [each.lower() for each in header].count(name) > 1):
        raise CohortError(f"{source} has several columns called {', '.join(repeated)}.", hint="Keep one of each.")
    columns = {}
    for role, names in _ROLES.items():
        for name in names:
            if name in lower:
                columns[role] = lower[name]
                break
    if "slide_id" not in columns and "path" not in columns:
        raise CohortError(
            f"{source} names no slides: its columns are {', '.join(header)}.",
            hint="It needs slide_id and path; the tables of CLAM, STAMP, TRIDENT, Patho-Bench and nnMIL are known too.",
        )
    return columns


def _layout_of(header: list[str]) -> str:
    """Name the tool whose columns these are."""
    lower = {name.lower() for name in header}
    return next((name for name, columns in _LAYOUTS.items() if lower.issuperset(columns)), "table")


def _is_label(name: str) -> bool:
    """Tell a label from an index (no name) and from the folds of Patho-Bench."""
    return bool(name) and fold_of(name) is None


def fold_of(name: str) -> str | None:
    """Name the fold that a column holds, such as fold_0; other columns hold none."""
    return f"fold_{int(name[5:])}" if name.lower().startswith("fold_") and name[5:].isdecimal() else None


def _row_of(
    line: int,
    values: dict[str, str],
    columns: dict[str, str],
    label_names: tuple[str, ...],
    base: Path,
    finder: SlideFinder,
    problems: list[str],
    *,
    must_exist: bool,
) -> SlideRow | None:
    """Read one record; what is wrong with it is added to `problems`."""
    given = {role: values[column] for role, column in columns.items()}
    named = given.get("slide_id") or given.get("path", "")
    if not named:
        problems.append(f"line {line}: neither a slide_id nor a path")
        return None
    # beside a path an id is taken as it is; without one it may be a file name, as in CLAM's process_list_autogen.csv
    slide_id = named if given.get("slide_id") and given.get("path") else _id_of(named)
    if "/" in given.get("slide_id", "") or not _is_file_name(slide_id):
        rule = f"no / or \\, no line ends, no dot in front, {_LONGEST_ID} bytes at most"
        problems.append(f"line {line}: slide_id {named!r} cannot be a file name ({rule})")
        return None
    path = _path_of(line, given.get("path", ""), named, base, finder, problems, must_exist=must_exist)
    try:
        mpp = mpp_of(given.get("mpp", ""))
    except ValueError:
        problems.append(f"line {line}: mpp '{given['mpp']}' is not a number of microns per pixel, such as 0.25")
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
        folds={fold: text for name, text in values.items() if (fold := fold_of(name))},
    )


def _is_file_name(slide_id: str) -> bool:
    """Say whether files can be named by an id."""
    short = len(slide_id.encode()) <= _LONGEST_ID
    return short and slide_id.isprintable() and "\\" not in slide_id and not slide_id.startswith(".")


def _path_of(
    line: int, text: str, named: str, base: Path, finder: SlideFinder, problems: list[str], *, must_exist: bool
) -> Path | None:
    """Find a slide's file: where the table says, or by its name below the slides folder.

    A path that the table states is not replaced by another file of that name, which may be another patient's: only a
    bare name is looked for, or the name of a path when the user says where the slides are.
    """
    stated = base / text if text else None
    if text and not text.lower().endswith(_FEATURE_SUFFIXES):
        for path in (base / text, finder.folder / text):
            if path.exists():
                return path
    found: list[Path] = []
    if not text or finder.asked_for or Path(text).name == text or text.lower().endswith(_FEATURE_SUFFIXES):
        found = finder.find(Path(text or named).name)
    if len(found) == 1:
        if (first := finder.given_to.setdefault(found[0], line)) != line:
            problems.append(f"line {line}: {found[0]} is the only file of that name, and line {first} has it")
            return None
        return found[0]
    if len(found) > 1:
        problems.append(f"line {line}: several files for {named}: {', '.join(map(str, found))}")
        return None
    if not must_exist:
        return stated or base / named
    where = f"no file {stated}" if stated is not None else f"no slide {named}.* below {finder.folder}"
    problems.append(f"line {line}: {where}")
    return None


def mpp_of(text: str) -> float | None:
    """Read a number of microns per pixel; nothing is None, anything else a ValueError."""
    if text.lower() in ("", "na", "nan", "none"):
        return None
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value
