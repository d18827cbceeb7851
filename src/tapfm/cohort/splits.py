"""Splits and folds: read them from a cohort table, or create them by patient.

All slides of a patient are in the same split. New splits are created by iterative stratification: the rarest class is
distributed first, and each patient goes to the split that needs the class most.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.cohort.cohort_table import Cohort, SlideRow
from tapfm.cohort.table_problems import TableProblem, raise_problems
from tapfm.errors import CohortError, InputError, SettingError
from tapfm.runtime.seeding import make_rng

TRAIN, VALIDATION, TEST = "train", "val", "test"
SPLITS = (TRAIN, VALIDATION, TEST)
ALL = "all"
_SPELLINGS: dict[str, tuple[str, ...]] = {
    TRAIN: ("train", "training"),
    VALIDATION: ("val", "valid", "validation", "tune", "dev"),
    TEST: ("test", "testing", "holdout"),
}
_FOLD_RANGE = (3, 20)  # minimum and maximum; training, validation and test need at least one part each
_MAX_LISTED = 20  # names listed in a message

Category = tuple[str, str]  # a property to balance, and its value: ("label FGFR3", "1")
_ALL_SLIDES: Category = ("slides", "all")


def parse_split(text: str) -> str:
    """Return train, val or test for a common name of the split, ignoring case. Raises CohortError for other names."""
    for name, spellings in _SPELLINGS.items():
        if text.strip().lower() in spellings:
            return name
    understood = "; ".join(", ".join(spellings) for spellings in _SPELLINGS.values())
    raise CohortError(f"'{text}' is not a split.", hint=f"Use one of: {understood}.")


def parse_split_option(text: str, valid: Sequence[str] = SPLITS) -> str:
    """Return the split that was passed to --split. Raises InputError if it is not in `valid`."""
    try:
        split = ALL if text.strip().lower() == ALL else parse_split(text)
    except CohortError:
        split = ""
    if split not in valid:
        raise InputError(f"--split cannot be '{text}'.", hint=f"Use one of: {', '.join(valid)}.")
    return split


def read_splits(cohort: Cohort, fold: int | None = None) -> dict[str, str]:
    """Return the split of each slide, from the column `split` or from a fold's column.

    Slides without a split are excluded. Raises CohortError if no slide has one, and for unknown splits and patients in
    several splits.
    """
    raise_problems(cohort.table_path or Path("The cohort"), find_split_problems(cohort, fold))
    return {row.slide_id: parse_split(text) for row in cohort.rows if (text := _split_text(row, fold))}


def _split_text(row: SlideRow, fold: int | None) -> str:
    return (row.split if fold is None else row.folds.get(f"fold_{fold}")) or ""


def find_split_problems(cohort: Cohort, fold: int | None = None) -> list[TableProblem]:
    """Return the problems of the column `split` or of a fold: no splits, unknown splits, patients in several splits."""
    column = "split" if fold is None else f"fold_{fold}"
    assigned: list[tuple[SlideRow, str]] = []
    unknown: dict[str, list[int]] = defaultdict(list)
    hint = ""
    for row in cohort.rows:
        if not (text := _split_text(row, fold)):
            continue
        try:
            assigned.append((row, parse_split(text)))
        except CohortError as error:
            unknown[text].append(row.row)
            hint = f"{error.hint} Leave the cell empty to exclude the slide."
    problems = [
        TableProblem(f"'{text}' in column {column} is not a split", tuple(rows), hint) for text, rows in unknown.items()
    ]
    command = _split_command(cohort) if fold is None else _split_command(cohort, "--folds", "5")
    if cohort.rows and not assigned and not unknown:
        found = [name.removeprefix("fold_") for name in fold_names(cohort)]
        if fold is not None and (found or any(row.split for row in cohort.rows)):
            command += " --force"  # tapfm split replaces existing splits only with this option
        use_fold = f"Set cohort.fold to a fold of the table ({', '.join(found)}), or create splits: " if found else ""
        problems.append(
            TableProblem(
                f"there is no column {column}, so the slides for training are unknown",
                hint=f"{use_fold or 'Create splits: '}{command}",
            )
        )
    return [*problems, *_find_patient_overlap(assigned, column, command=f"{command} --force")]


def fold_names(cohort: Cohort) -> list[str]:
    """Return the names of the folds in a cohort table, in numeric order."""
    found = {name for row in cohort.rows for name, text in row.folds.items() if text}
    return sorted(found, key=lambda name: int(name.removeprefix("fold_")))


def _split_command(cohort: Cohort, *options: str) -> str:
    """Return the command that creates splits for this cohort."""
    source = cohort.table_path or Path("COHORT.csv")
    out = source.with_name(f"{source.stem}-split.csv")
    return shlex.join(["tapfm", "split", str(source), "--out", str(out), *options])


def _find_patient_overlap(
    assigned: Iterable[tuple[SlideRow, str]],
    column: str = "split",
    command: str = "tapfm split COHORT.csv --out SPLIT.csv --force",
) -> list[TableProblem]:
    """Return a problem for each patient whose slides are in several splits (data leakage)."""
    rows_by_patient: dict[str, dict[str, list[SlideRow]]] = defaultdict(lambda: defaultdict(list))
    for row, split in assigned:
        rows_by_patient[row.patient_id][split].append(row)
    problems = []
    for patient, by_split in rows_by_patient.items():
        if len(by_split) > 1:
            listed = "; ".join(
                f"{split} has {format_names([row.slide_id for row in by_split[split]])}"
                for split in SPLITS
                if split in by_split
            )
            problems.append(
                TableProblem(
                    f"patient {patient} is in more than one split (column {column}): {listed}",
                    tuple(sorted(row.row for rows in by_split.values() for row in rows)),
                    f"Put all slides of a patient into one split, or create new splits: {command}",
                )
            )
    return problems


def format_names(names: Sequence[str], count: int = _MAX_LISTED) -> str:
    """Return names as text, shortened to the first `count`."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


@dataclass(frozen=True)
class Patient:
    """The properties of a patient that are balanced between splits: labels, scan resolutions, number of slides."""

    patient_id: str
    slide_count: int
    strata: Mapping[str, str]  # by target; only known labels
    resolutions: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[Category, ...]:
        """The label categories of the patient. A tuple, because the order of a set changes sums from run to run."""
        return tuple((f"label {target}", stratum) for target, stratum in sorted(self.strata.items()))

    @property
    def categories(self) -> tuple[Category, ...]:
        """All categories of the patient. The number of slides is grouped as 1, 2, 3 to 4, 5 to 8, ..."""
        resolutions = tuple(("resolution", each) for each in sorted(self.resolutions))
        return (*self.classes, *resolutions, ("slides", str((self.slide_count - 1).bit_length())))

    @property
    def added_counts(self) -> dict[Category, int]:
        """What this patient adds to the counts of a split: 1 for each category, and the number of slides."""
        return dict.fromkeys(self.categories, 1) | {_ALL_SLIDES: self.slide_count}


def group_patients(
    cohort: Cohort, strata: Mapping[str, Sequence[str | None]], resolutions: Mapping[str, str]
) -> list[Patient]:
    """Return the patients of a cohort.

    strata: for each target, the stratum of each row's patient; None if the label is unknown.
    resolutions: scan resolution by slide id; only known ones.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(cohort.rows):
        rows[row.patient_id].append(index)
    patients = []
    for patient_id, indices in rows.items():
        first = indices[0]
        known = {target: stratum for target, by_row in strata.items() if (stratum := by_row[first]) is not None}
        scans = {resolutions[cohort.rows[i].slide_id] for i in indices if cohort.rows[i].slide_id in resolutions}
        patients.append(
            Patient(
                patient_id,
                len(indices),
                known,
                tuple(sorted(scans)),
            )
        )
    return patients


def check_fractions(fractions: tuple[float, float, float]) -> None:
    """Raise SettingError unless the fractions of training, validation and test are valid and add up to 1."""
    in_range = all(0 <= each <= 1 for each in fractions) and fractions[0] > 0
    if not in_range or not abs(sum(fractions) - 1) <= 1e-6:
        raise SettingError(
            f"The fractions {' '.join(f'{each:g}' for each in fractions)} are not valid.",
            hint="Pass fractions of training (above 0), validation and test that add up to 1: --fractions 0.8 0.1 0.1",
        )


def check_folds(folds: int, patients: int) -> None:
    """Raise SettingError if the number of folds is out of range or exceeds the number of patients."""
    if not _FOLD_RANGE[0] <= folds <= _FOLD_RANGE[1]:
        raise SettingError(
            f"The number of folds is {folds}; it must be from {_FOLD_RANGE[0]} to {_FOLD_RANGE[1]}.",
            hint="For example: --folds 5",
        )
    if patients < folds:
        raise SettingError(
            f"{patients:,} patients are too few for {folds} folds.",
            hint="Each fold needs its own test patients. Use fewer folds, or a single split with --fractions.",
        )


def assign_splits(patients: Sequence[Patient], fractions: tuple[float, float, float], seed: int) -> dict[str, str]:
    """Return a split for each patient, with these fractions of training, validation and test."""
    check_fractions(fractions)
    parts = _distribute(patients, fractions, seed, "splits", rare_classes_to_first_parts=True)
    return {patient_id: SPLITS[part] for patient_id, part in parts.items()}


def assign_folds(patients: Sequence[Patient], folds: int, seed: int) -> list[dict[str, str]]:
    """Return a split for each patient in each fold. Fold i tests on part i and validates on the next part."""
    check_folds(folds, len(patients))
    parts = _distribute(patients, [1 / folds] * folds, seed, "folds", folds, rare_classes_to_first_parts=False)
    names = {0: TEST, 1: VALIDATION}
    return [{each: names.get((part - fold) % folds, TRAIN) for each, part in parts.items()} for fold in range(folds)]


def _distribute(
    patients: Sequence[Patient], fractions: Sequence[float], *rng_key: int | str, rare_classes_to_first_parts: bool
) -> dict[str, int]:
    """Distribute patients to parts with these fractions, balanced by category and independent of the table order.

    rare_classes_to_first_parts: a class with fewer patients than parts goes to the first parts; if false, to any parts.
    """
    by_id = sorted(patients, key=lambda each: each.patient_id)
    unassigned = {by_id[i].patient_id: by_id[i] for i in make_rng(*rng_key).permutation(len(by_id))}
    parts: list[list[Patient]] = [[] for _ in fractions]
    used = [part for part, fraction in zip(parts, fractions, strict=True) if fraction > 0]
    for group in [[part] for part in used] if rare_classes_to_first_parts else [used]:
        _assign_each_class(unassigned, group)
    _assign_remaining(unassigned, parts, _compute_part_sizes(parts, fractions, len(unassigned)))
    return {patient.patient_id: index for index, part in enumerate(parts) for patient in part}


def _assign_each_class(unassigned: dict[str, Patient], parts: Sequence[list[Patient]]) -> None:
    """Assign one patient of each class to each part, if there are enough."""
    counts = Counter(category for patient in unassigned.values() for category in patient.classes)
    for category in sorted(counts, key=lambda each: (counts[each], each)):
        for part in sorted(parts, key=len):
            present = {each for patient in part for each in patient.classes}
            candidates = [patient for patient in unassigned.values() if category in patient.classes]
            if category in present or not candidates:
                continue
            # prefer patients with rare classes that this part lacks, and without rare classes that it already has
            scores = [sum((-1 if each in present else 1) / counts[each] for each in one.classes) for one in candidates]
            best = candidates[scores.index(max(scores))]
            part.append(unassigned.pop(best.patient_id))


def _compute_part_sizes(parts: Sequence[list[Patient]], fractions: Sequence[float], unassigned: int) -> list[int]:
    """Return how many patients each part will have: at least those already assigned, and at least one if possible."""
    total = unassigned + sum(map(len, parts))
    sizes = [len(part) for part in parts]
    for index, fraction in enumerate(fractions):
        if fraction > 0 and not sizes[index] and sum(sizes) < total:
            sizes[index] = 1
    while sum(sizes) < total:
        shortfall = [round(fraction * total - size, 9) for fraction, size in zip(fractions, sizes, strict=True)]
        sizes[shortfall.index(max(shortfall))] += 1
    return sizes


def _assign_remaining(unassigned: dict[str, Patient], parts: Sequence[list[Patient]], sizes: Sequence[int]) -> None:
    """Assign the rarest category first. Each patient goes to the part that needs the patient's categories most."""
    part_counts = [Counter[Category]() for _ in parts]
    for counter, part in zip(part_counts, parts, strict=True):
        for patient in part:
            counter.update(patient.added_counts)
    totals = sum(part_counts, Counter[Category]())
    for patient in unassigned.values():
        totals.update(patient.added_counts)
    total = sum(sizes)
    while unassigned:
        remaining = Counter(category for patient in unassigned.values() for category in patient.categories)
        rarest = min(remaining, key=lambda category: (remaining[category], category))
        for patient in [each for each in unassigned.values() if rarest in each.categories]:
            by_rarity = [*sorted(patient.categories, key=lambda category: (remaining[category], category)), _ALL_SLIDES]
            shortfalls = {
                index: [
                    round(size / total * totals[category] - part_counts[index][category], 9) for category in by_rarity
                ]
                for index, size in enumerate(sizes)
                if len(parts[index]) < size
            }
            chosen = max(shortfalls, key=lambda index: shortfalls[index])
            parts[chosen].append(unassigned.pop(patient.patient_id))
            part_counts[chosen].update(patient.added_counts)
