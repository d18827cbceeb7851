"""`tapfm split`: split a cohort by patient into train, validation and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.messages import format_count
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.shared_options import SlidesFolder

if TYPE_CHECKING:
    from tapfm.cohort.cohort_splitting import CohortSplit
    from tapfm.tasks.target import Label, TargetKinds

_FRACTIONS = (0.8, 0.1, 0.1)


@options
class SplitOptions:
    """Options of `tapfm split`."""

    cohort: Annotated[
        Path,
        Argument("Cohort table with slides, patients and label columns (0, 1 or empty).", metavar="COHORT.csv"),
    ]
    _: KW_ONLY
    out: Annotated[Path, Option("File for the table with the splits.", metavar="SPLIT.csv")]
    target: Annotated[
        tuple[str, ...],
        Option(
            "Label column to stratify by. Repeatable.",
            metavar="NAME",
            show_default="all label columns that contain both 0 and 1",
        ),
    ] = ()
    fractions: Annotated[
        tuple[float, float, float] | None,
        Option(
            "Fractions of the patients in train, validation and test. They sum to 1.",
            metavar="TRAIN VAL TEST",
            show_default=" ".join(map(str, _FRACTIONS)),
        ),
    ] = None
    folds: Annotated[
        int | None,
        Option(
            "Create K folds for cross-validation, 3 to 20, in the columns fold_0, fold_1, ... instead of one split.",
            metavar="K",
        ),
    ] = None
    seed: Annotated[int, Option("Random seed. The same seed creates the same splits.")] = 0
    slides: SlidesFolder = None
    force: Annotated[bool, Option("Create new splits even if COHORT.csv has splits, and overwrite SPLIT.csv.")] = False

    def check(self) -> None:
        """Raise InputError for options that contradict each other."""
        if self.folds is not None and self.fractions is not None:
            raise InputError(
                "--folds and --fractions cannot be combined.", hint="Folds have equal sizes: remove --fractions."
            )


@dataclass(frozen=True)
class SplitResult:
    """The splits of a cohort, with its labels."""

    out: Path  # the table that was written
    split: CohortSplit
    targets: TargetKinds
    labels: Mapping[str, Sequence[Label]]  # by target, in the order of the rows

    def labels_of_split(self, target: str, split_of_slide: Mapping[str, str], split: str) -> list[Label]:
        """Return the labels of the slides of a split."""
        rows_and_labels = zip(self.split.cohort.rows, self.labels[target], strict=True)
        return [label for row, label in rows_and_labels if split_of_slide[row.slide_id] == split]


@command_function(SplitOptions)
def split(options: SplitOptions, console: Console) -> SplitResult:
    """Split a cohort by patient, stratified by labels and scan resolution, and write the table with its splits."""
    from tapfm.cohort.cohort_splitting import read_cohort_to_split, split_cohort, write_split_table
    from tapfm.tasks.catalog import target_kinds
    from tapfm.tasks.labels import check_training_labels, find_binary_columns, patient_strata, read_labels

    cohort = read_cohort_to_split(options.cohort, options.out, options.slides, folds=options.folds, force=options.force)
    targets = target_kinds(options.target or find_binary_columns(cohort))
    labels = read_labels(cohort, targets)
    cohort_split = split_cohort(
        cohort,
        patient_strata(cohort, labels, targets),
        fractions=options.fractions or _FRACTIONS,
        folds=options.folds,
        seed=options.seed,
        workers=choose_worker_count(None),
        console=console,
    )
    for column, split_of_slide in cohort_split.splits.items():
        check_training_labels(cohort, split_of_slide, labels, targets, column)
    write_split_table(cohort_split, options.cohort, options.out, moved=options.slides is not None)
    return SplitResult(options.out, cohort_split, targets, labels)


def split_warnings(result: SplitResult) -> list[str]:
    """Return warnings about splits with one class, columns that cannot be used, and unknown scan resolutions."""
    from tapfm.tasks.labels import find_binary_columns_with_invalid_values

    cohort_split, lines = result.split, []
    if not result.labels:
        lines.append("No column contains both 0 and 1, so the splits are not stratified by labels.")
    for name, problem in find_binary_columns_with_invalid_values(cohort_split.cohort).items():
        if name not in result.labels:
            lines.append(f"Not stratified by a column, because labels must be 0, 1 or empty: {problem}.")
    if unknown := len(cohort_split.cohort) - len(cohort_split.resolutions):
        lines.append(
            f"The scan resolution of {format_count(unknown, 'slide')} is unknown: the file is missing, cannot be read "
            "or does not contain it."
        )
    for column, split_of_slide in cohort_split.splits.items():
        for split in cohort_split.split_names:
            name = split if column == "split" else f"{split} of {column}"
            if split not in split_of_slide.values():
                lines.append(f"{name} is empty: there are too few patients.")
                continue
            for target, kind in result.targets.items():
                if missing := kind.missing_class(result.labels_of_split(target, split_of_slide, split)):
                    lines.append(f"{name} has no {missing} slide for {target}, so its AUC cannot be computed.")
    return lines
