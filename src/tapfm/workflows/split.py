"""`tapfm split`: splits by patient for a table, written beside everything the table has."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tapfm.cohort.labels import binary_columns, has_both, problem_of, read_labels
from tapfm.cohort.manifest import TABLE_SUFFIXES, Cohort, SlideRow, fold_of, mpp_of, parse, read_cohort, roles_of
from tapfm.cohort.splits import (
    SPLITS,
    Patient,
    assign_folds,
    assign_splits,
    check_folds,
    check_fractions,
    check_training_labels,
    fold_names,
    patients_of,
    split_of_rows,
)
from tapfm.errors import InputError, TapfmError
from tapfm.runtime.files import write_atomically
from tapfm.runtime.progress import progress_bar
from tapfm.runtime.workers import run_isolated
from tapfm.slides.opening import open_slide
from tapfm.slides.scale import nominal_mpp, resolve_scale

# The coarsest microns per pixel of what is called 40x and 20x; half-way between the nominal values, or nearly.
COARSEST = {"40x": 0.35, "20x": 0.75}
COARSER = "10x"

Labels = Mapping[str, Sequence[int | None]]


@dataclass(frozen=True)
class Made:
    """The splits that were made, and what they were made from."""

    out: Path
    cohort: Cohort
    labels: Labels
    resolutions: Mapping[str, str]  # of the slides where it is known
    splits: Mapping[str, Mapping[str, str]]  # column -> slide -> split
    asked_for: tuple[str, ...]  # splits with a share above 0


def split_cohort(
    source: Path,
    out: Path,
    *,
    slides_folder: Path | None,
    targets: Sequence[str] | None,
    fractions: tuple[float, float, float],
    folds: int | None,
    seed: int,
    force: bool,
    workers: int,
    console: Console,
) -> Made:
    """Make splits (or folds) of a table's patients and write the table with them."""
    check_files(source, out, force=force)
    cohort = read_cohort(source, slides_folder, must_exist=False)
    check_earlier(cohort, making_folds=folds is not None, force=force)
    labels = read_labels(cohort, targets or binary_columns(cohort))
    if folds is None:
        check_fractions(fractions)
    else:
        check_folds(folds, len({row.patient_id for row in cohort.rows}))
    resolutions = resolutions_of(cohort.rows, workers, console)
    columns = by_patient(patients_of(cohort, labels, resolutions), fractions, folds, seed)
    splits = {
        column: {row.slide_id: of_patient[row.patient_id] for row in cohort.rows}
        for column, of_patient in columns.items()
    }
    for column, of_slide in splits.items():
        check_training_labels(cohort, of_slide, labels, column)
    try:
        write_atomically(out, table_with(cohort, splits, source, out, moved=slides_folder is not None))
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error}).", hint="Give another file with --out.") from error
    asked_for = SPLITS if folds else tuple(name for name, part in zip(SPLITS, fractions, strict=True) if part > 0)
    return Made(out, cohort, labels, resolutions, splits, asked_for)


def by_patient(
    patients: Sequence[Patient], fractions: tuple[float, float, float], folds: int | None, seed: int
) -> dict[str, dict[str, str]]:
    """Make the columns to write, each with the split of every patient."""
    if folds is None:
        return {"split": assign_splits(patients, fractions, seed)}
    return {f"fold_{index}": fold for index, fold in enumerate(assign_folds(patients, folds, seed))}


def check_files(source: Path, out: Path, *, force: bool) -> None:
    """Refuse what is no table, and a file that would be lost."""
    if source.is_dir() or (source.exists() and source.suffix.lower() not in (*TABLE_SUFFIXES, ".xlsx")):
        command = f"tapfm inspect {shlex.quote(str(source))} --write-cohort cohort.csv"
        raise InputError(f"{source} is no table.", hint=f"Make one, and write patients and labels into it: {command}")
    if out.suffix.lower() not in TABLE_SUFFIXES or out.is_dir():
        raise InputError(f"--out {out} is no name of a table.", hint="Give a file, for example --out split.csv")
    if out.exists() and not force:
        same = source.exists() and out.samefile(source)
        raise InputError(
            f"{out} is {'the cohort itself' if same else 'there already'}.",
            hint="Give another name to --out, or --force to write over it.",
        )


def check_earlier(cohort: Cohort, *, making_folds: bool, force: bool) -> None:
    """Check the splits that a table brings; those that would be replaced need --force, and then need not be sound."""
    split: list[int | None] = [None] if any(row.split for row in cohort.rows) else []
    folds: list[int | None] = [int(name.removeprefix("fold_")) for name in fold_names(cohort)]
    kept, replaced = ([], [*split, *folds]) if making_folds else (folds, split)
    for fold in kept if force else [*kept, *replaced]:
        split_of_rows(cohort, fold)
    if replaced and not force:
        raise InputError(
            f"{cohort.source} has {'folds' if folds else 'splits'} already, and no patient is in two of them.",
            hint="Train on it as it is: "
            f"tapfm config --cohort {shlex.quote(str(cohort.source))} --out run.toml. Or make new ones: --force",
        )


def resolutions_of(rows: Sequence[SlideRow], workers: int, console: Console) -> dict[str, str]:
    """Find the scan resolution of each slide, in the table or in its file; slides that do not say are left out."""
    found = {row.slide_id: resolution for row in rows if (resolution := resolution_in_table(row))}
    unread = [row for row in rows if row.slide_id not in found and row.path.exists()]
    if unread:
        console.print(f"Slides to open for their scan resolution: {len(unread):,}")
        with progress_bar(console) as bar:
            task = bar.add_task("opening", total=len(unread), speed="")
            # processes of their own: a damaged header can kill the library that reads it
            for index, answer in run_isolated(resolution_in_file, [row.path for row in unread], workers):
                if isinstance(answer, str):
                    found[unread[index].slide_id] = answer
                bar.advance(task)
    return found


def resolution_in_table(row: SlideRow) -> str | None:
    """Name the resolution that the column `mpp` or `objective` says."""
    if row.mpp is not None:
        return resolution_class(row.mpp)
    written = next((text for name, text in row.labels.items() if name.lower() == "objective"), "")
    try:
        objective = mpp_of(written.lower().removesuffix("x"))
    except ValueError:
        return None
    return resolution_class(nominal_mpp(objective)) if objective else None


def resolution_in_file(path: Path) -> str | None:
    """Name the resolution that a slide itself says; runs in a worker."""
    try:
        with closing(open_slide(path)) as slide:
            return resolution_class(resolve_scale(slide.facts).mpp)
    except TapfmError:
        return None


def resolution_class(mpp: float) -> str:
    """Name the objective that a slide's microns per pixel stand for."""
    return next((name for name, coarsest in COARSEST.items() if mpp <= coarsest), COARSER)


def table_with(
    cohort: Cohort, splits: Mapping[str, Mapping[str, str]], source: Path, out: Path, *, moved: bool
) -> bytes:
    """Write the table again with its splits; where it moves, or its slides did, paths are made to lead to them."""
    header, records = parse(source)
    columns = roles_of(source, header)
    table = [record + [""] * (len(header) - len(record)) for _, record in records]
    folder = out.absolute().parent
    if moved or folder.resolve() != source.absolute().parent.resolve():
        path = columns.get("path", "path")
        texts = column_of(header, table, path)
        paths = [path_from(folder, row.path, text) for row, text in zip(cohort.rows, texts, strict=True)]
        if any(paths):
            set_column(header, table, path, paths)
        if "slide_id" in columns:  # beside a path an id is taken as it is, without one a suffix is taken off
            ids = column_of(header, table, columns["slide_id"])
            known = [row.slide_id if path else text for row, path, text in zip(cohort.rows, paths, ids, strict=True)]
            set_column(header, table, columns["slide_id"], known)
    if "split" not in splits:  # folds of another number must not stay, nor a split that would be trained on instead
        kept = [i for i, name in enumerate(header) if fold_of(name) is None and name != columns.get("split")]
        header, table = [header[index] for index in kept], [[record[index] for index in kept] for record in table]
    for column, of_slide in splits.items():
        name = columns.get("split", column) if column == "split" else column
        set_column(header, table, name, [of_slide[row.slide_id] for row in cohort.rows])
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows([header, *table])
    return buffer.getvalue().encode()


def column_of(header: Sequence[str], table: Sequence[Sequence[str]], name: str) -> list[str]:
    """Take a column out of a table; one that is not there is empty."""
    return [record[header.index(name)] if name in header else "" for record in table]


def set_column(header: list[str], table: Sequence[list[str]], name: str, values: Sequence[str]) -> None:
    """Fill a column of a table in its place; a new one comes last."""
    if name not in header:
        header.append(name)
        for record in table:
            record.append("")
    for record, value in zip(table, values, strict=True):
        record[header.index(name)] = value


def path_from(folder: Path, path: Path, text: str) -> str:
    """Write a slide's path for a table in this folder; nothing where none was written and no slide was found."""
    if not (text or path.exists()):
        return ""
    return text if Path(text).is_absolute() and path == Path(text) else leading_to(path, folder)


def leading_to(path: Path, folder: Path) -> str:
    """Write a path so that it starts at a folder, if it still leads there; links can make `..` lead elsewhere."""
    absolute = path.absolute()
    try:
        relative = Path(os.path.relpath(absolute, folder))
    except ValueError:  # another drive
        return absolute.as_posix()
    same = (folder / relative).resolve() == absolute.resolve()
    return (relative if same else absolute).as_posix()


def show(made: Made, console: Console) -> None:
    """Print how often each target is positive in each split, what is lacking, and what to type next."""
    rows = made.cohort.rows
    table = Table(box=None, pad_edge=False, header_style="bold")
    fold = ["fold"] if "split" not in made.splits else []
    for name in (*fold, "split", "patients", "slides", "40x", *(f"{target} positive" for target in made.labels)):
        table.add_column(Text(name), justify="left" if name in ("fold", "split") else "right")
    for column, of_slide in made.splits.items():
        for split in made.asked_for:
            members = [row for row in rows if of_slide[row.slide_id] == split]
            scans = [made.resolutions[row.slide_id] for row in members if row.slide_id in made.resolutions]
            table.add_row(
                *([column] if fold else []),
                split,
                f"{len({row.patient_id for row in members}):,}",
                f"{len(members):,}",
                share(sum(scan == "40x" for scan in scans), len(scans)),
                *(share(*classes_in(made, target, of_slide, split)) for target in made.labels),
            )
    console.print(table)
    for note in notes(made):
        console.print(Text(note, "yellow"), soft_wrap=True)
    written = shlex.quote(str(made.out))
    console.print(Text(f"Written: {made.out}. Next: tapfm config --cohort {written} --out run.toml"), soft_wrap=True)
    if fold:
        console.print(
            "It begins with fold 0; the others: tapfm train run.toml --out runs/fold-1 --set cohort.fold=1, ..."
        )


def share(part: int, whole: int) -> str:
    """Write a part of a whole, with its percentage."""
    return f"{part:,}/{whole:,} ({part / whole:.0%})" if whole else "-"


def classes_in(made: Made, target: str, of_slide: Mapping[str, str], split: str) -> tuple[int, int]:
    """Count the positive and the labelled slides of a split."""
    rows_and_labels = zip(made.cohort.rows, made.labels[target], strict=True)
    labels = [label for row, label in rows_and_labels if label is not None and of_slide[row.slide_id] == split]
    return sum(labels), len(labels)


def notes(made: Made) -> list[str]:
    """Say what the user would want to know: splits with one class, columns not used, scans that are not known."""
    said = []
    if not made.labels:
        said.append("No column holds both 0 and 1, so no label was balanced.")
    for name in made.cohort.label_names:
        if name not in made.labels and has_both(made.cohort, name) and (problem := problem_of(made.cohort, name)):
            said.append(f"Not balanced, as labels are 0, 1 or empty: {problem}.")
    if unknown := len(made.cohort) - len(made.resolutions):
        said.append(f"The scan resolution of {unknown:,} slides is not known: missing, unreadable, or they do not say.")
    for column, of_slide in made.splits.items():
        for split in made.asked_for:
            where = split if column == "split" else f"{split} of {column}"
            if split not in of_slide.values():
                said.append(f"{where} is empty: there are too few patients.")
                continue
            for target in made.labels:
                positive, labelled = classes_in(made, target, of_slide, split)
                if positive in (0, labelled):
                    lacking = "labelled" if not labelled else "negative" if positive else "positive"
                    said.append(f"{where} has no {lacking} slide of {target}: its metric will be empty there.")
    return said
