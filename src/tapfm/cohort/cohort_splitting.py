"""Split a cohort table by patient, and write it with the new splits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tapfm.cohort.cohort_table import (
    TABLE_SUFFIXES,
    Cohort,
    SlideRow,
    find_columns,
    parse_fold_column,
    parse_mpp,
    parse_table,
    read_cohort,
)
from tapfm.cohort.splits import (
    SPLITS,
    Patient,
    assign_folds,
    assign_splits,
    check_folds,
    check_fractions,
    fold_names,
    group_patients,
    read_splits,
)
from tapfm.errors import InputError, TapfmError
from tapfm.runtime.cohort_job import process_slides
from tapfm.runtime.csv_files import csv_text
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_count
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import open_slide
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


def read_cohort_to_split(
    source: Path, out: Path, slides_folder: Path | None, *, folds: int | None, force: bool
) -> Cohort:
    """Read the cohort table to split; raise InputError if files or existing splits would be overwritten."""
    _check_files(source, out, force=force)
    cohort = read_cohort(source, slides_folder, must_exist=False)
    _check_existing_splits(cohort, for_folds=folds is not None, force=force)
    return cohort


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


def write_split_table(result: CohortSplit, source: Path, out: Path, *, moved: bool) -> None:
    """Write the cohort table with its new splits.

    moved: the slides may not be at the paths in the source table.
    """
    try:
        write_atomically(out, _format_split_table(result.cohort, result.splits, source, out, moved=moved))
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}).", hint="Choose another file with --out.") from error


def _assign_split_columns(
    patients: Sequence[Patient], fractions: tuple[float, float, float], folds: int | None, seed: int
) -> dict[str, dict[str, str]]:
    """Return the columns to write, each with the split of every patient."""
    if folds is None:
        return {"split": assign_splits(patients, fractions, seed)}
    return {f"fold_{index}": fold for index, fold in enumerate(assign_folds(patients, folds, seed))}


def _check_files(source: Path, out: Path, *, force: bool) -> None:
    """Raise InputError if the source is not a table or the output would overwrite a file."""
    if source.is_dir() or (source.exists() and source.suffix.lower() not in (*TABLE_SUFFIXES, ".xlsx")):
        command = f"tapfm inspect {shlex.quote(str(source))} --write-cohort cohort.csv"
        raise InputError(
            f"{source} is not a cohort table.",
            hint=f"Create a table with this command, then add patients and labels to the table: {command}",
        )
    if out.suffix.lower() not in TABLE_SUFFIXES or out.is_dir():
        raise InputError(f"--out {out} is not the name of a CSV file.", hint="Pass a file, for example --out split.csv")
    if out.exists() and not force:
        same = source.exists() and out.samefile(source)
        raise InputError(
            f"{out} {'is the cohort table itself' if same else 'already exists'}.",
            hint="Choose another name with --out. --force would replace your cohort table."
            if same
            else "Choose another name with --out, or overwrite the file with --force.",
        )


def _check_existing_splits(cohort: Cohort, *, for_folds: bool, force: bool) -> None:
    """Raise an error if the table has invalid splits, or valid ones that would be replaced.

    With `force`, splits may be replaced, and those that will be replaced are not checked.
    """
    split: list[int | None] = [None] if any(row.split for row in cohort.rows) else []
    folds: list[int | None] = [int(name.removeprefix("fold_")) for name in fold_names(cohort)]
    kept, replaced = ([], [*split, *folds]) if for_folds else (folds, split)
    for fold in kept if force else [*kept, *replaced]:
        read_splits(cohort, fold)
    if replaced and not force:
        raise InputError(
            f"{cohort.table_path} already has valid {'folds' if for_folds and folds else 'splits'}.",
            hint="Replace them with --force, or use them: "
            f"tapfm config --cohort {shlex.quote(str(cohort.table_path))} --out run.toml",
        )


def _read_resolutions(rows: Sequence[SlideRow], workers: int, console: Console) -> dict[str, str]:
    """Return the scan resolution (40x, 20x or 10x) by slide id, from the table or the slide file, where it is known."""
    found = {row.slide_id: resolution for row in rows if (resolution := _read_resolution_from_row(row))}
    unread = [row for row in rows if row.slide_id not in found and row.path.exists()]
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
    written = next((text for name, text in row.labels.items() if name.lower() == "objective"), "")
    try:
        objective = parse_mpp(written.lower().removesuffix("x"))
    except ValueError:
        return None
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


def _format_split_table(
    cohort: Cohort, splits: Mapping[str, Mapping[str, str]], source: Path, out: Path, *, moved: bool
) -> bytes:
    """Return the table with its splits as CSV. Paths are rewritten if the table or its slides moved."""
    header, records = parse_table(source)
    columns = find_columns(source, header)
    table = [record + [""] * (len(header) - len(record)) for _, record in records]
    folder = out.absolute().parent
    if moved or folder.resolve() != source.absolute().parent.resolve():
        path = columns.get("path", "path")
        texts = _read_column(header, table, path)
        paths = [_format_slide_path(folder, row.path, text) for row, text in zip(cohort.rows, texts, strict=True)]
        if any(paths):
            _set_column(header, table, path, paths)
        if "slide_id" in columns:  # with a path an id is read unchanged, without one its suffix is removed
            ids = _read_column(header, table, columns["slide_id"])
            known = [row.slide_id if path else text for row, path, text in zip(cohort.rows, paths, ids, strict=True)]
            _set_column(header, table, columns["slide_id"], known)
    if "split" not in splits:  # remove old folds, and a split that training would use instead
        kept = [i for i, name in enumerate(header) if parse_fold_column(name) is None and name != columns.get("split")]
        header, table = [header[index] for index in kept], [[record[index] for index in kept] for record in table]
    for column, split_by_slide in splits.items():
        name = columns.get("split", column) if column == "split" else column
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


def _format_slide_path(folder: Path, path: Path, text: str) -> str:
    """Return a slide's path for a table in this folder; empty if the table had none and no slide was found."""
    if not (text or path.exists()):
        return ""
    return text if Path(text).is_absolute() and path == Path(text) else _relative_path(path, folder)


def _relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to a folder, or absolute if `..` would lead elsewhere because of symbolic links."""
    absolute = path.absolute()
    try:
        relative = Path(os.path.relpath(absolute, folder))
    except ValueError:  # another drive
        return absolute.as_posix()
    same = (folder / relative).resolve() == absolute.resolve()
    return (relative if same else absolute).as_posix()
