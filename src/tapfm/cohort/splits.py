"""Which patients are learned from, chosen by and tested on: splits that a table brings, and splits that are made.

A patient is in one split, with all slides. Splits are made by iterative stratification: what is rarest is shared out
first, each patient to the split that lacks it most.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.cohort.manifest import Cohort, SlideRow
from tapfm.errors import CohortError, SettingError
from tapfm.runtime.seeding import rng_for

TRAIN, VALIDATION, TEST = "train", "val", "test"
SPLITS = (TRAIN, VALIDATION, TEST)
ALL = "all"
_SPELLINGS: dict[str, tuple[str, ...]] = {
    TRAIN: ("train", "training"),
    VALIDATION: ("val", "valid", "validation", "tune", "dev"),
    TEST: ("test", "testing", "holdout"),
}
_FOLDS = (3, 20)  # fewest and most: training, validation and test each need a part of their own
_SHOWN = 20  # patients that a message names

Facet = tuple[str, str]  # what is to be balanced, and its value: ("label FGFR3", "1")
_ALL_SLIDES: Facet = ("slides", "all")


def canonical_split(text: str) -> str:
    """Name a split as we do; any case and the usual spellings are understood."""
    for name, spellings in _SPELLINGS.items():
        if text.strip().lower() in spellings:
            return name
    understood = "; ".join(", ".join(spellings) for spellings in _SPELLINGS.values())
    raise CohortError(f"'{text}' is no split.", hint=f"Splits are: {understood}. Empty leaves a slide out.")


def split_of_rows(cohort: Cohort, fold: int | None = None) -> dict[str, str]:
    """Read the split of each slide, from the column `split` or from a fold's; slides without one are left out."""
    column = "split" if fold is None else f"fold_{fold}"
    written = [(row, row.split if fold is None else row.folds.get(column)) for row in cohort.rows]
    placed: list[tuple[SlideRow, str]] = []
    unknown: dict[str, list[str]] = defaultdict(list)
    hint = ""
    for row, text in written:
        if not text:
            continue
        try:
            placed.append((row, canonical_split(text)))
        except CohortError as error:
            unknown[text].append(row.slide_id)
            hint = error.hint
    if unknown:
        listed = [f"'{text}': {list_some(slide_ids, 3)}" for text, slide_ids in unknown.items()]
        raise CohortError(f"The column {column} has values that are no splits:\n  " + "\n  ".join(listed), hint=hint)
    anew = _split_command(cohort) if fold is None else _split_command(cohort, "--folds", "5")
    if not placed:
        found = fold_names(cohort)
        raise CohortError(
            f"The cohort has no {column}: nothing says what to train on.",
            hint=(f"Choose one of {', '.join(found)}, or type: " if found else "Type: ") + anew,
        )
    _check_splits(placed, column, again=f"{anew} --force")
    return {row.slide_id: split for row, split in placed}


def fold_names(cohort: Cohort) -> list[str]:
    """List the folds that any slide has a split in, by their number."""
    found = {name for row in cohort.rows for name, text in row.folds.items() if text}
    return sorted(found, key=lambda name: int(name.removeprefix("fold_")))


def _split_command(cohort: Cohort, *options: str) -> str:
    """Say what to type for splits of this cohort."""
    source = cohort.source or Path("COHORT.csv")
    out = source.with_name(f"{source.stem}-split.csv")
    return shlex.join(["tapfm", "split", str(source), "--out", str(out), *options])


def _check_splits(
    placed: Iterable[tuple[SlideRow, str]],
    column: str = "split",
    again: str = "tapfm split COHORT.csv --out SPLIT.csv --force",
) -> None:
    """Refuse a patient whose slides are in two splits: a test would be of what was learned."""
    slides: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row, split in placed:
        slides[row.patient_id][split].append(row.slide_id)
    torn = {patient: by_split for patient, by_split in slides.items() if len(by_split) > 1}
    if not torn:
        return
    lines = [
        f"{patient}: " + "; ".join(f"{split} has {list_some(by_split[split])}" for split in SPLITS if split in by_split)
        for patient, by_split in list(torn.items())[:_SHOWN]
    ]
    if len(torn) > _SHOWN:
        lines.append(f"... and {len(torn) - _SHOWN:,} more patients")
    count = "1 patient is" if len(torn) == 1 else f"{len(torn):,} patients are"
    raise CohortError(
        f"{count} in more than one split (column {column}):\n  " + "\n  ".join(lines),
        hint=f"Put all slides of a patient into one split, or make new splits: {again}",
    )


def list_some(names: Sequence[str], count: int = _SHOWN) -> str:
    """List names, the first few of many."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


@dataclass(frozen=True)
class Patient:
    """What is to be balanced of a patient: strata of the labels, scan resolutions, number of slides."""

    patient_id: str
    slides: int
    strata: Mapping[str, str]  # by target, where the label is known
    resolutions: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[Facet, ...]:
        """The patient's stratum for each target; a tuple, as sums over a set would differ from run to run."""
        return tuple((f"label {target}", stratum) for target, stratum in sorted(self.strata.items()))

    @property
    def facets(self) -> tuple[Facet, ...]:
        """All that is to be balanced; slides are counted as 1, 2, 3 to 4, 5 to 8, ..."""
        resolutions = tuple(("resolution", each) for each in sorted(self.resolutions))
        return (*self.classes, *resolutions, ("slides", str((self.slides - 1).bit_length())))

    @property
    def amounts(self) -> dict[Facet, int]:
        """How much of what is to be balanced a split gets with this patient."""
        return dict.fromkeys(self.facets, 1) | {_ALL_SLIDES: self.slides}


def patients_of(
    cohort: Cohort, strata: Mapping[str, Sequence[str | None]], resolutions: Mapping[str, str]
) -> list[Patient]:
    """Gather the slides of each patient.

    strata: by target, that of each row's patient; None where the label is unknown.
    resolutions: the scan resolution of the slides where it is known.
    """
    rows: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(cohort.rows):
        rows[row.patient_id].append(index)
    patients = []
    for patient_id, indices in rows.items():
        known = {target: stratum for target, of_rows in strata.items() if (stratum := of_rows[indices[0]]) is not None}
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
    """Refuse shares of training, validation and test that are none, or leave nothing to train on."""
    in_range = all(0 <= each <= 1 for each in fractions) and fractions[0] > 0
    if not in_range or not abs(sum(fractions) - 1) <= 1e-6:
        raise SettingError(
            f"The fractions {' '.join(f'{each:g}' for each in fractions)} are no split.",
            hint="Give training (above 0), validation and test, adding up to 1: --fractions 0.8 0.1 0.1",
        )


def check_folds(folds: int, patients: int) -> None:
    """Refuse a number of folds that cannot be made."""
    if not _FOLDS[0] <= folds <= _FOLDS[1]:
        raise SettingError(
            f"{folds} folds cannot be made.",
            hint=f"From {_FOLDS[0]} (training, validation and test need a part each) to {_FOLDS[1]}: --folds 5",
        )
    if patients < folds:
        raise SettingError(
            f"{patients:,} patients are too few for {folds} folds.",
            hint="Each fold tests patients of its own: make fewer folds, or one split with --fractions.",
        )


def assign_splits(patients: Sequence[Patient], fractions: tuple[float, float, float], seed: int) -> dict[str, str]:
    """Give each patient a split: training, validation and test in these fractions."""
    check_fractions(fractions)
    parts = _distribute(patients, fractions, seed, "splits", in_turn=True)
    return {patient_id: SPLITS[part] for patient_id, part in parts.items()}


def assign_folds(patients: Sequence[Patient], folds: int, seed: int) -> list[dict[str, str]]:
    """Give each patient a split in each fold: part i is fold i's test, the part after it its validation."""
    check_folds(folds, len(patients))
    parts = _distribute(patients, [1 / folds] * folds, seed, "folds", folds, in_turn=False)
    names = {0: TEST, 1: VALIDATION}
    return [{each: names.get((part - fold) % folds, TRAIN) for each, part in parts.items()} for fold in range(folds)]


def _distribute(
    patients: Sequence[Patient], fractions: Sequence[float], *address: int | str, in_turn: bool
) -> dict[str, int]:
    """Share patients out to parts of these sizes, alike in all that is balanced; the table's order is no matter.

    A class that is too rare for all parts is in the first ones if they take their turn, else in any.
    """
    by_id = sorted(patients, key=lambda each: each.patient_id)
    waiting = {by_id[i].patient_id: by_id[i] for i in rng_for(*address).permutation(len(by_id))}
    parts: list[list[Patient]] = [[] for _ in fractions]
    used = [part for part, fraction in zip(parts, fractions, strict=True) if fraction > 0]
    for group in [[part] for part in used] if in_turn else [used]:
        _place_both_classes(waiting, group)
    _place_the_rest(waiting, parts, _sizes_of(parts, fractions, len(waiting)))
    return {patient.patient_id: index for index, part in enumerate(parts) for patient in part}


def _place_both_classes(waiting: dict[str, Patient], parts: Sequence[list[Patient]]) -> None:
    """Give each part a patient of each stratum of each target, as long as there are any."""
    counts = Counter(facet for patient in waiting.values() for facet in patient.classes)
    for facet in sorted(counts, key=lambda each: (counts[each], each)):
        for part in sorted(parts, key=len):
            has = {each for patient in part for each in patient.classes}
            candidates = [patient for patient in waiting.values() if facet in patient.classes]
            if facet in has or not candidates:
                continue
            # most of what is rare and lacking here, least of what is rare and may be lacking elsewhere
            worth = [sum((-1 if each in has else 1) / counts[each] for each in one.classes) for one in candidates]
            best = candidates[worth.index(max(worth))]
            part.append(waiting.pop(best.patient_id))


def _sizes_of(parts: Sequence[list[Patient]], fractions: Sequence[float], waiting: int) -> list[int]:
    """Say how many patients each part gets in all: no fewer than it has, one at least while they last."""
    total = waiting + sum(map(len, parts))
    sizes = [len(part) for part in parts]
    for index, fraction in enumerate(fractions):
        if fraction > 0 and not sizes[index] and sum(sizes) < total:
            sizes[index] = 1
    while sum(sizes) < total:
        short = [round(fraction * total - size, 9) for fraction, size in zip(fractions, sizes, strict=True)]
        sizes[short.index(max(short))] += 1
    return sizes


def _place_the_rest(waiting: dict[str, Patient], parts: Sequence[list[Patient]], sizes: Sequence[int]) -> None:
    """Share out the rarest facet first, each patient to the part that lacks it most, then by the other facets."""
    placed = [Counter[Facet]() for _ in parts]
    for counter, part in zip(placed, parts, strict=True):
        for patient in part:
            counter.update(patient.amounts)
    in_all = sum(placed, Counter[Facet]())
    for patient in waiting.values():
        in_all.update(patient.amounts)
    total = sum(sizes)
    while waiting:
        left = Counter(facet for patient in waiting.values() for facet in patient.facets)
        rarest = min(left, key=lambda facet: (left[facet], facet))
        for patient in [each for each in waiting.values() if rarest in each.facets]:
            wanted = [*sorted(patient.facets, key=lambda facet: (left[facet], facet)), _ALL_SLIDES]
            lacks = {
                index: [round(size / total * in_all[facet] - placed[index][facet], 9) for facet in wanted]
                for index, size in enumerate(sizes)
                if len(parts[index]) < size
            }
            chosen = max(lacks, key=lambda index: lacks[index])
            parts[chosen].append(waiting.pop(patient.patient_id))
            placed[chosen].update(patient.amounts)
