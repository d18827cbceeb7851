"""Split a cohort table by patient, and write it with the new splits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from rich.console import Console

from tapfm.cohort.cohort_table import Cohort, SlideRow, find_table_columns, read_source_table
from tapfm.cohort.columns import normalise_column_name
from tapfm.cohort.split_layouts import SplitSlide, format_split_layout
from tapfm.cohort.splits import (
    SPLITS,
    Patient,
    assign_folds,
    assign_splits,
    check_folds,
    check_fractions,
    find_split_problems,
    fold_names,
    group_patients,
)
from tapfm.cohort.table_files import TABLE_SUFFIXES
from tapfm.cohort.table_problems import TableProblem
from tapfm.errors import InputError, TapfmError
from tapfm.runtime.cohort_job import process_slides
from tapfm.runtime.csv_files import csv_text
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import open_slide
from tapfm.slides.readers.parsing import parse_positive_number
from tapfm.slides.scale import nominal_mpp, resolve_scale

# Largest microns per pixel that count as 40x and 20x, about half-way between the nominal values.
_MAX_MPP = {"40x": 0.35, "20x": 0.75}
_LOWEST_RESOLUTION = "10x"


@dataclass(frozen=True)
class CohortSplit:
    """The splits of a cohort, and the data they were created from."""

    cohort: Cohort
    resolutions: Mapping[str, str]  # by slide id; only known ones
    splits: Mapping[str, Mapping[str, str]]  # column -> slide -> split
    split_names: tuple[str, ...]  # those with a fraction above 0


_CSV_SUFFIXES = (".csv", ".tsv", ".txt")  # of the table that is written


def check_split_files(source: Path, out: Path, layout: str, *, force: bool) -> None:
    """Raise InputError if the source is not a table, or if files would be overwritten without `force`."""
    if source.is_dir() or (source.exists() and source.suffix.lower() not in TABLE_SUFFIXES):
        command = f"tapfm inspect {shlex.quote(str(source))} --write-cohort cohort.csv"
        raise InputError(
            f"{source} is not a cohort table.",
            hint=f"Create a table with this command, then add patients and labels to the table: {command}",
        )
    if layout != "tapfm":
        if out.is_file():
            raise InputError(f"--out {out} is a file; the layout {layout} needs a folder.", hint="Choose a new folder.")
        return
    if out.suffix.lower() not in _CSV_SUFFIXES or out.is_dir():
        raise InputError(f"--out {out} is not the name of a CSV file.", hint="Pass a file, for example --out split.csv")
    if out.exists() and not force:
        same = source.exists() and out.samefile(source)
        raise InputError(
            f"{out} {'is the cohort table itself' if same else 'already exists'}.",
            hint="Choose another name with --out. --force would replace your cohort table."
            if same
            else "Choose another name with --out, or overwrite the file with --force.",
        )


def find_existing_splits(cohort: Cohort, *, for_folds: bool, force: bool) -> list[TableProblem]:
    """Return the problems of the splits that the table already has, or one problem if they would be replaced.

    With `force`, splits may be replaced, and those that will be replaced are not checked.
    """
    split: list[int | None] = [None] if any(row.split for row in cohort.rows) else []
    folds: list[int | None] = [int(name.removeprefix("fold_")) for name in fold_names(cohort)]
    kept, replaced = ([], [*split, *folds]) if for_folds else (folds, split)
    checked = kept if force else [*kept, *replaced]
    problems = [problem for fold in checked for problem in find_split_problems(cohort, fold)]
    if replaced and not force and not problems:
        problems.append(
            TableProblem(
                f"the table already has valid {'folds' if for_folds and folds else 'splits'}",
                hint="Replace them with --force, or use them: "
                f"tapfm config --cohort {shlex.quote(str(cohort.table_path))} --out run.toml",
            )
        )
    return problems


def split_cohort(
    cohort: Cohort,
    strata: Mapping[str, Sequence[str | None]],
    *,
    fractions: tuple[float, float, float],
    folds: int | None,
    seed: int,
    workers: int,
    console: Console,
) -> CohortSplit:
    """Create splits or folds by patient, balanced by scan resolution, number of slides and `strata`.

    strata: for each target, the stratum of each row's patient; None if the label is unknown.
    """
    if folds is None:
        check_fractions(fractions)
    else:
        check_folds(folds, len({row.patient_id for row in cohort.rows}))
    resolutions = _read_resolutions(cohort.rows, workers, console)
    columns = _assign_split_columns(group_patients(cohort, strata, resolutions), fractions, folds, seed)
    splits = {
        column: {row.slide_id: split_by_patient[row.patient_id] for row in cohort.rows}
        for column, split_by_patient in columns.items()
    }
    split_names = SPLITS if folds else tuple(name for name, part in zip(SPLITS, fractions, strict=True) if part > 0)
    return CohortSplit(cohort, resolutions, splits, split_names)


def write_split_table(
    result: CohortSplit,
    out: Path,
    labels: Mapping[str, Sequence[str]],
    *,
    classes: Mapping[str, Sequence[str]],
    layout: str,
    force: bool,
) -> list[Path]:
    """Write the cohort table with its new splits, or the files of another tool's layout. Returns the paths.

    labels: text of each row's label by target, empty if missing. classes: texts of both classes by target.
    """
    if layout == "tapfm":
        files = {out: _format_split_table(result.cohort, result.splits, out)}
    else:
        slides = _list_split_slides(result, labels, out)
        contents = format_split_layout(layout, slides, list(labels), out.name, classes)
        files = {out / name: content for name, content in contents.items()}
        if existing := [path for path in files if path.exists() and not force]:
            raise InputError(
                f"{existing[0]} already exists.", hint="Choose another folder with --out, or overwrite with --force."
            )
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}).", hint="Choose another place with --out.") from error
    return list(files)


def _list_split_slides(result: CohortSplit, labels: Mapping[str, Sequence[str]], out: Path) -> list[SplitSlide]:
    """Return the slides as the layouts of other tools need them. Paths are relative to the folder `out`."""
    return [
        SplitSlide(
            row.slide_id,
            "" if row.missing else _relative_path(row.path, out.absolute()),
            row.patient_id,
            {target: texts[index] for target, texts in labels.items()},
            {column: splits[row.slide_id] for column, splits in result.splits.items()},
        )
        for index, row in enumerate(result.cohort.rows)
    ]


def _assign_split_columns(
    patients: Sequence[Patient], fractions: tuple[float, float, float], folds: int | None, seed: int
) -> dict[str, dict[str, str]]:
    """Return the columns to write, each with the split of every patient."""
    if folds is None:
        return {"split": assign_splits(patients, fractions, seed)}
    return {f"fold_{index}": fold for index, fold in enumerate(assign_folds(patients, folds, seed))}


def _read_resolutions(rows: Sequence[SlideRow], workers: int, console: Console) -> dict[str, str]:
    """Return the scan resolution (40x, 20x or 10x) by slide id, from the table or the slide file, where it is known."""
    found = {row.slide_id: resolution for row in rows if (resolution := _read_resolution_from_row(row))}
    unread = [row for row in rows if row.slide_id not in found and not row.missing]
    if unread:
        console.print(f"Reading the scan resolution of {format_count(len(unread), 'slide')}.")
        jobs = {row.slide_id: row.path for row in unread}
        with SlideProgress(console, "opening", slides=len(jobs)) as progress:
            # in worker processes, because a damaged header can crash the library that reads it
            for slide_id, result in process_slides(_read_resolution_from_file, jobs, workers=workers):
                if isinstance(result, str):
                    found[slide_id] = result
                progress.finish_slide(slide_id)
    return found


def _read_resolution_from_row(row: SlideRow) -> str | None:
    """Return the scan resolution given by the column `mpp` or `objective`; None if both are missing or invalid."""
    if row.mpp is not None:
        return _resolution_from_mpp(row.mpp)
    written = next((text for name, text in row.labels.items() if normalise_column_name(name) == "objective"), "")
    objective = parse_positive_number(written.lower().removesuffix("x"))
    return _resolution_from_mpp(nominal_mpp(objective)) if objective else None


def _read_resolution_from_file(path: Path) -> str | None:
    """Return the scan resolution stored in a slide file; None if it is unknown. Runs in a worker."""
    try:
        with closing(open_slide(path)) as slide:
            return _resolution_from_mpp(resolve_scale(slide.metadata).mpp)
    except TapfmError:
        return None


def _resolution_from_mpp(mpp: float) -> str:
    """Return the scan resolution as an objective power: 40x, 20x or 10x."""
    return next((name for name, coarsest in _MAX_MPP.items() if mpp <= coarsest), _LOWEST_RESOLUTION)


def _format_split_table(cohort: Cohort, splits: Mapping[str, Mapping[str, str]], out: Path) -> bytes:
    """Return the table with its splits as CSV. Paths are rewritten if the table or its slides moved."""
    source = cohort.table_path
    assert source is not None
    text = read_source_table(source, cohort.options)
    columns = find_table_columns(text, cohort.options)
    roles = columns.by_role
    header, table = list(text.columns), [[cells[name] for name in text.columns] for _, cells in text.records]
    folder = out.absolute().parent
    if cohort.options.slides is not None or folder.resolve() != source.absolute().parent.resolve():
        path = roles.get("path", "path")
        texts = _read_column(header, table, path)
        paths = [_format_slide_path(folder, row, text) for row, text in zip(cohort.rows, texts, strict=True)]
        if any(paths):
            _set_column(header, table, path, paths)
        if "slide_id" in roles:  # with a path an id is read unchanged, without one its suffix is removed
            ids = _read_column(header, table, roles["slide_id"])
            known = [row.slide_id if path else text for row, path, text in zip(cohort.rows, paths, ids, strict=True)]
            _set_column(header, table, roles["slide_id"], known)
    if "split" not in splits:  # remove old folds, and a split that training would use instead
        old = {*columns.folds.values(), *columns.splits}
        kept = [i for i, name in enumerate(header) if name not in old]
        header, table = [header[index] for index in kept], [[record[index] for index in kept] for record in table]
    for column, split_by_slide in splits.items():
        name = roles.get("split", column) if column == "split" else column
        _set_column(header, table, name, [split_by_slide[row.slide_id] for row in cohort.rows])
    return csv_text(header, table).encode()


def _read_column(header: Sequence[str], table: Sequence[Sequence[str]], name: str) -> list[str]:
    """Return the values of a column; empty strings if it does not exist."""
    return [record[header.index(name)] if name in header else "" for record in table]


def _set_column(header: list[str], table: Sequence[list[str]], name: str, values: Sequence[str]) -> None:
    """Set the values of a column; a new column is added at the end."""
    if name not in header:
        header.append(name)
        for record in table:
            record.append("")
    for record, value in zip(table, values, strict=True):
        record[header.index(name)] = value


def _format_slide_path(folder: Path, row: SlideRow, text: str) -> str:
    """Return a slide's path for a table in this folder; unchanged if the slide file was not found."""
    if row.missing and (not text or Path(text).is_absolute() or PureWindowsPath(text).drive):
        return text
    return text if Path(text).is_absolute() and row.path == Path(text) else _relative_path(row.path, folder)


def _relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to a folder, or absolute if `..` would lead elsewhere because of symbolic links."""
    absolute = path.absolute()
    try:
        relative = Path(os.path.relpath(absolute, folder))
    except ValueError:  # another drive
        return absolute.as_posix()
    same = (folder / relative).resolve() == absolute.resolve()
    return (relative if same else absolute).as_posix()
