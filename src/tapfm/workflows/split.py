"""`tapfm split`: split a cohort by patient into training, validation and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import SlidesFolder

if TYPE_CHECKING:
    from tapfm.cohort.cohort_splitting import CohortSplit
    from tapfm.tasks.target import Label, TargetKinds

_FRACTIONS = (0.8, 0.1, 0.1)


@options
class SplitOptions:
    """Options of `tapfm split`."""

    cohort: Annotated[Path, Argument("A table with slides, patients and labels (0, 1 or empty).", metavar="COHORT.csv")]
    _: KW_ONLY
    out: Annotated[Path, Option("The table to write, with splits.", metavar="SPLIT.csv")]
    targets: Annotated[
        tuple[str, ...],
        Option("Label column to balance; repeatable.", metavar="NAME", default="all that hold both 0 and 1"),
    ] = ()
    fractions: Annotated[
        tuple[float, float, float] | None,
        Option(
            "Share of the patients in each split.",
            metavar="TRAIN VAL TEST",
            default=" ".join(map(str, _FRACTIONS)),
        ),
    ] = None
    folds: Annotated[int | None, Option("Columns fold_0 to fold_K-1 instead of one split; 3 to 20.", metavar="K")] = (
        None
    )
    seed: Annotated[int, Option("The same seed makes the same splits.")] = 0
    slides: SlidesFolder = None
    force: Annotated[bool, Option("Replace splits that the table has, and SPLIT.csv if it exists.")] = False

    def check(self) -> None:
        """Refuse options that do not go together."""
        if self.folds is not None and self.fractions is not None:
            raise InputError(
                "--folds and --fractions were both given.", hint="Folds have equal sizes: leave --fractions out."
            )


@dataclass(frozen=True)
class SplitResult:
    """A cohort that was split, with its labels."""

    out: Path  # the table that was written
    split: CohortSplit
    targets: TargetKinds
    labels: Mapping[str, Sequence[Label]]  # of each row, by target

    def labels_in(self, target: str, of_slide: Mapping[str, str], split: str) -> list[Label]:
        """Return the labels of the slides of a split."""
        rows_and_labels = zip(self.split.cohort.rows, self.labels[target], strict=True)
        return [label for row, label in rows_and_labels if of_slide[row.slide_id] == split]


@command_function(SplitOptions)
def split(options: SplitOptions, console: Console) -> SplitResult:
    """Split a cohort by patient, balanced in labels and scan resolution, and write the table with its splits."""
    from tapfm.cohort.cohort_splitting import read_cohort_to_split, split_cohort, write_split_table
    from tapfm.tasks.catalog import target_kinds
    from tapfm.tasks.labels import check_training_labels, find_binary_columns, patient_strata, read_labels

    cohort = read_cohort_to_split(options.cohort, options.out, options.slides, folds=options.folds, force=options.force)
    targets = target_kinds(options.targets or find_binary_columns(cohort))
    labels = read_labels(cohort, targets)
    made = split_cohort(
        cohort,
        patient_strata(cohort, labels, targets),
        fractions=options.fractions or _FRACTIONS,
        folds=options.folds,
        seed=options.seed,
        workers=count_workers(None),
        console=console,
    )
    for column, of_slide in made.splits.items():
        check_training_labels(cohort, of_slide, labels, targets, column)
    write_split_table(made, options.cohort, options.out, moved=options.slides is not None)
    return SplitResult(options.out, made, targets, labels)


def split_notes(result: SplitResult) -> list[str]:
    """Return warnings: splits with one class, columns that were not balanced, unknown scan resolutions."""
    from tapfm.tasks.labels import find_unusable_columns

    made, lines = result.split, []
    if not result.labels:
        lines.append("No column holds both 0 and 1, so no label was balanced.")
    for name, problem in find_unusable_columns(made.cohort).items():
        if name not in result.labels:
            lines.append(f"Not balanced, as labels are 0, 1 or empty: {problem}.")
    if unknown := len(made.cohort) - len(made.resolutions):
        lines.append(
            f"The scan resolution of {unknown:,} slides is unknown: missing or unreadable files, or none in the file."
        )
    for column, of_slide in made.splits.items():
        for split in made.split_names:
            where = split if column == "split" else f"{split} of {column}"
            if split not in of_slide.values():
                lines.append(f"{where} is empty: there are too few patients.")
                continue
            for target, kind in result.targets.items():
                if lacking := kind.missing_class(result.labels_in(target, of_slide, split)):
                    lines.append(f"{where} has no {lacking} slide of {target}: its metric will be empty there.")
    return lines
