"""Split a cohort table by patient, and write the table again with its splits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tapfm.cohort.manifest import TABLE_SUFFIXES, Cohort, SlideRow, fold_of, mpp_of, parse_table, read_cohort, roles_of
from tapfm.cohort.splits import (
    SPLITS,
    Patient,
    assign_folds,
    assign_splits,
    check_folds,
    check_fractions,
    fold_names,
    patients_of,
    split_of_rows,
)
from tapfm.errors import InputError, TapfmError
from tapfm.runtime.cohort_job import run_slides
from tapfm.runtime.csv_files import csv_text
from tapfm.runtime.files import write_atomically
from tapfm.runtime.progress import SlideProgress
from tapfm.slides.opening import open_slide
from tapfm.slides.scale import nominal_mpp, resolve_scale

# The coarsest microns per pixel of what is called 40x and 20x; half-way between the nominal values, or nearly.
_COARSEST = {"40x": 0.35, "20x": 0.75}
_COARSER = "10x"


@dataclass(frozen=True)
class CohortSplit:
    """The splits of a cohort, and what they were made from."""

    cohort: Cohort
    resolutions: Mapping[str, str]  # of the slides where it is known
    splits: Mapping[str, Mapping[str, str]]  # column -> slide -> split
    split_names: tuple[str, ...]  # those with a share above 0


def read_cohort_to_split(
    source: Path, out: Path, slides_folder: Path | None, *, folds: int | None, force: bool
) -> Cohort:
    """Read a table that is to be split; refuse files and earlier splits that would be overwritten."""
    _check_files(source, out, force=force)
    cohort = read_cohort(source, slides_folder, must_exist=False)
    _check_earlier_splits(cohort, making_folds=folds is not None, force=force)
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
    """Make splits (or folds) of a table's patients, balanced in the strata of each row's patient, by target."""
    if folds is None:
        check_fractions(fractions)
    else:
        check_folds(folds, len({row.patient_id for row in cohort.rows}))
    resolutions = _read_resolutions(cohort.rows, workers, console)
    columns = _splits_by_patient(patients_of(cohort, strata, resolutions), fractions, folds, seed)
    splits = {
        column: {row.slide_id: of_patient[row.patient_id] for row in cohort.rows}
        for column, of_patient in columns.items()
    }
    split_names = SPLITS if folds else tuple(name for name, part in zip(SPLITS, fractions, strict=True) if part > 0)
    return CohortSplit(cohort, resolutions, splits, split_names)


def write_split_table(result: CohortSplit, source: Path, out: Path, *, moved: bool) -> None:
    """Write the table again with its splits.

    moved: the slides are elsewhere than the table says.
    """
    try:
        write_atomically(out, _table_with_splits(result.cohort, result.splits, source, out, moved=moved))
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}).", hint="Give another file with --out.") from error


def _splits_by_patient(
    patients: Sequence[Patient], fractions: tuple[float, float, float], folds: int | None, seed: int
) -> dict[str, dict[str, str]]:
    """Return the columns to write, each with the split of every patient."""
    if folds is None:
        return {"split": assign_splits(patients, fractions, seed)}
    return {f"fold_{index}": fold for index, fold in enumerate(assign_folds(patients, folds, seed))}


def _check_files(source: Path, out: Path, *, force: bool) -> None:
    """Refuse a source that is not a table, and an output that would overwrite a file."""
    if source.is_dir() or (source.exists() and source.suffix.lower() not in (*TABLE_SUFFIXES, ".xlsx")):
        command = f"tapfm inspect {shlex.quote(str(source))} --write-cohort cohort.csv"
        raise InputError(f"{source} is not a table.", hint=f"Make one and add patients and labels to it: {command}")
    if out.suffix.lower() not in TABLE_SUFFIXES or out.is_dir():
        raise InputError(f"--out {out} is not the name of a table.", hint="Give a file, for example --out split.csv")
    if out.exists() and not force:
        same = source.exists() and out.samefile(source)
        raise InputError(
            f"{out} {'is the cohort itself' if same else 'already exists'}.",
            hint="Give another name with --out, or overwrite it with --force.",
        )


def _check_earlier_splits(cohort: Cohort, *, making_folds: bool, force: bool) -> None:
    """Check the splits that a table has; those that would be replaced need --force, and are not checked then."""
    split: list[int | None] = [None] if any(row.split for row in cohort.rows) else []
    folds: list[int | None] = [int(name.removeprefix("fold_")) for name in fold_names(cohort)]
    kept, replaced = ([], [*split, *folds]) if making_folds else (folds, split)
    for fold in kept if force else [*kept, *replaced]:
        split_of_rows(cohort, fold)
    if replaced and not force:
        raise InputError(
            f"{cohort.source} already has {'folds' if folds else 'splits'}, and no patient is in two of them.",
            hint="Train on it as it is: "
            f"tapfm config --cohort {shlex.quote(str(cohort.source))} --out run.toml. Or make new ones: --force",
        )


def _read_resolutions(rows: Sequence[SlideRow], workers: int, console: Console) -> dict[str, str]:
    """Return the scan resolution of each slide, from the table or its file; slides without one are left out."""
    found = {row.slide_id: resolution for row in rows if (resolution := _resolution_in_table(row))}
    unread = [row for row in rows if row.slide_id not in found and row.path.exists()]
    if unread:
        console.print(f"Slides to open for their scan resolution: {len(unread):,}")
        jobs = {row.slide_id: row.path for row in unread}
        with SlideProgress(console, "opening", slides=len(jobs)) as progress:
            # worker processes: a damaged header can crash the library that reads it
            for slide_id, result in run_slides(_resolution_in_file, jobs, workers=workers):
                if isinstance(result, str):
                    found[slide_id] = result
                progress.finish_slide(slide_id)
    return found


def _resolution_in_table(row: SlideRow) -> str | None:
    """Return the resolution given by the column `mpp` or `objective`."""
    if row.mpp is not None:
        return _resolution_class(row.mpp)
    written = next((text for name, text in row.labels.items() if name.lower() == "objective"), "")
    try:
        objective = mpp_of(written.lower().removesuffix("x"))
    except ValueError:
        return None
    return _resolution_class(nominal_mpp(objective)) if objective else None


def _resolution_in_file(path: Path) -> str | None:
    """Return the resolution stored in a slide; runs in a worker."""
    try:
        with closing(open_slide(path)) as slide:
            return _resolution_class(resolve_scale(slide.facts).mpp)
    except TapfmError:
        return None


def _resolution_class(mpp: float) -> str:
    """Return the objective that corresponds to microns per pixel."""
    return next((name for name, coarsest in _COARSEST.items() if mpp <= coarsest), _COARSER)


def _table_with_splits(
    cohort: Cohort, splits: Mapping[str, Mapping[str, str]], source: Path, out: Path, *, moved: bool
) -> bytes:
    """Return the table with its splits as CSV; paths are rewritten where the table or its slides moved."""
    header, records = parse_table(source)
    columns = roles_of(source, header)
    table = [record + [""] * (len(header) - len(record)) for _, record in records]
    folder = out.absolute().parent
    if moved or folder.resolve() != source.absolute().parent.resolve():
        path = columns.get("path", "path")
        texts = _read_column(header, table, path)
        paths = [_path_from(folder, row.path, text) for row, text in zip(cohort.rows, texts, strict=True)]
        if any(paths):
            _set_column(header, table, path, paths)
        if "slide_id" in columns:  # beside a path an id is taken as it is, without one a suffix is taken off
            ids = _read_column(header, table, columns["slide_id"])
            known = [row.slide_id if path else text for row, path, text in zip(cohort.rows, paths, ids, strict=True)]
            _set_column(header, table, columns["slide_id"], known)
    if "split" not in splits:  # folds of another number must not stay, nor a split that would be trained on instead
        kept = [i for i, name in enumerate(header) if fold_of(name) is None and name != columns.get("split")]
        header, table = [header[index] for index in kept], [[record[index] for index in kept] for record in table]
    for column, of_slide in splits.items():
        name = columns.get("split", column) if column == "split" else column
        _set_column(header, table, name, [of_slide[row.slide_id] for row in cohort.rows])
    return csv_text(header, table).encode()


def _read_column(header: Sequence[str], table: Sequence[Sequence[str]], name: str) -> list[str]:
    """Return a column of a table; one that does not exist is empty."""
    return [record[header.index(name)] if name in header else "" for record in table]


def _set_column(header: list[str], table: Sequence[list[str]], name: str, values: Sequence[str]) -> None:
    """Set the values of a column; a new column is the last."""
    if name not in header:
        header.append(name)
        for record in table:
            record.append("")
    for record, value in zip(table, values, strict=True):
        record[header.index(name)] = value


def _path_from(folder: Path, path: Path, text: str) -> str:
    """Return a slide's path for a table in this folder; empty where the table had none and no slide was found."""
    if not (text or path.exists()):
        return ""
    return text if Path(text).is_absolute() and path == Path(text) else _relative_path(path, folder)


def _relative_path(path: Path, folder: Path) -> str:
    """Return a path relative to a folder, or absolute where links would make `..` lead elsewhere."""
    absolute = path.absolute()
    try:
        relative = Path(os.path.relpath(absolute, folder))
    except ValueError:  # another drive
        return absolute.as_posix()
    same = (folder / relative).resolve() == absolute.resolve()
    return (relative if same else absolute).as_posix()
