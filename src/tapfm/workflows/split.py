"""`tapfm split`: split a cohort by patient into train, validation and test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError, UnknownNameError
from tapfm.runtime.messages import format_command, format_count
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.shared_options import (
    ClamSplits,
    Clini,
    Encoding,
    Missing,
    Negative,
    PatientColumn,
    Positive,
    SlidesArePatients,
    SlidesFolder,
    SlideTable,
    choose_table,
    print_table_notes,
    read_table_options,
    read_target_request,
)

if TYPE_CHECKING:
    from tapfm.cohort.cohort_splitting import CohortSplit
    from tapfm.cohort.table_options import TableOptions
    from tapfm.tasks.label_columns import TargetRequest
    from tapfm.tasks.target import Label, TargetKinds

_FRACTIONS = (0.8, 0.1, 0.1)


@options
class SplitOptions:
    """Options of `tapfm split`."""

    cohort: Annotated[
        Path | None,
        Argument("Cohort table (CSV, TSV, Excel or JSON) with slides, patients and labels.", metavar="COHORT.csv"),
    ] = None
    _: KW_ONLY
    out: Annotated[
        Path, Option("File for the table with the splits; with --layout of another tool a folder.", metavar="SPLIT.csv")
    ]
    target: Annotated[
        tuple[str, ...],
        Option(
            "Label column to stratify by. Repeatable.",
            metavar="NAME",
            show_default="the only column with two classes",
        ),
    ] = ()
    positive: Positive = ()
    negative: Negative = ()
    no_stratify: Annotated[bool, Option("Do not stratify by labels.", flag="--no-stratify")] = False
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
    patient_column: PatientColumn = None
    slides_are_patients: SlidesArePatients = False
    missing: Missing = ()
    encoding: Encoding = None
    clini: Clini = None
    slide_table: SlideTable = None
    splits: ClamSplits = None
    slides: SlidesFolder = None
    layout: Annotated[
        str,
        Option(
            "Layout of the output: tapfm (a copy of COHORT.csv with splits), or the files of clam, patho-bench, nnmil "
            "or stamp.",
            metavar="NAME",
        ),
    ] = "tapfm"
    force: Annotated[bool, Option("Create new splits even if COHORT.csv has splits, and overwrite SPLIT.csv.")] = False

    @property
    def table(self) -> Path:
        """Table of slides."""
        table = choose_table(self.cohort, self.slide_table, self.clini, "COHORT.csv")
        if table is None:
            raise InputError("No cohort table is given.", hint="For example: tapfm split cohort.csv --out split.csv")
        return table

    def check(self) -> None:
        """Raise InputError for options that contradict each other."""
        _ = self.table
        if self.folds is not None and self.fractions is not None:
            raise InputError(
                "--folds and --fractions cannot be combined.", hint="Folds have equal sizes: remove --fractions."
            )
        if self.no_stratify and (self.target or self.positive or self.negative):
            raise InputError(
                "--no-stratify and --target, --positive or --negative cannot be combined.", hint="Remove one of them."
            )


@dataclass(frozen=True)
class SplitResult:
    """The splits of a cohort, with its labels."""

    options: SplitOptions
    files: tuple[Path, ...]  # the table that was written, or the files of another tool's layout
    split: CohortSplit
    targets: TargetKinds
    labels: Mapping[str, Sequence[Label]]  # by target, in the order of the rows

    @property
    def out(self) -> Path:
        """The table that was written, or the folder of another tool's files."""
        return self.options.out

    @property
    def config_command(self) -> str:
        """The command that creates a configuration for these splits; empty if there is no target or no table."""
        options = self.options
        if not self.targets or options.layout != "tapfm":
            return ""
        from tapfm.tasks.catalog import target_arguments

        cohort = self.split.cohort
        # the written table is joined, in UTF-8, and has paths
        patient_column = cohort.patient_column if options.patient_column else ""
        rest = replace(
            cohort.options, slides=None, encoding=None, clini=None, clam_splits=None, patient_column=patient_column
        )
        arguments = [*target_arguments(self.targets), *rest.command_arguments()]
        return format_command("config", "--cohort", self.out, "--out", "run.toml", *arguments)

    def labels_of_split(self, target: str, split_of_slide: Mapping[str, str], split: str) -> list[Label]:
        """Return the labels of the slides of a split."""
        rows_and_labels = zip(self.split.cohort.rows, self.labels[target], strict=True)
        return [label for row, label in rows_and_labels if split_of_slide[row.slide_id] == split]


@command_function(SplitOptions)
def split(options: SplitOptions, console: Console) -> SplitResult:
    """Split a cohort by patient, stratified by labels and scan resolution, and write the table with its splits."""
    return create_splits(options, read_table_options(options), read_target_request(options), console)


def create_splits(
    options: SplitOptions, table_options: TableOptions, request: TargetRequest, console: Console
) -> SplitResult:
    """Split a cohort. The table, its targets and labels are read with `table_options` and `request`."""
    from tapfm.cohort.cohort_splitting import (
        check_split_files,
        find_existing_splits,
        split_cohort,
        write_split_table,
    )
    from tapfm.cohort.cohort_table import find_patient_problems, read_cohort
    from tapfm.cohort.split_layouts import LAYOUTS
    from tapfm.tasks.labels import LabelledCohort, check_training_labels, patient_strata, read_labelled_cohort

    if options.layout not in LAYOUTS:
        raise UnknownNameError.with_suggestions("layout", options.layout, LAYOUTS, see=", ".join(LAYOUTS))
    check_split_files(options.table, options.out, options.layout, force=options.force)
    checks = [partial(find_existing_splits, for_folds=options.folds is not None, force=options.force)]
    if options.no_stratify:
        cohort = read_cohort(options.table, table_options, checks=[find_patient_problems, *checks])
        labelled = LabelledCohort(cohort, {}, {})
    else:
        labelled = read_labelled_cohort(
            options.table,
            table_options,
            request,
            checks=checks,
            no_target_hint="To split without labels: --no-stratify",
        )
    print_table_notes(console, labelled.notes, labelled.warnings)
    cohort, targets, labels = labelled.cohort, labelled.targets, labelled.labels
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
    files = write_split_table(
        cohort_split,
        options.out,
        {target: [kind.format_label(label) for label in labels[target]] for target, kind in targets.items()},
        classes={target: [kind.format_label(label) for label in (0, 1)] for target, kind in targets.items()},
        layout=options.layout,
        force=options.force,
    )
    return SplitResult(options, tuple(files), cohort_split, targets, labels)


def split_warnings(result: SplitResult) -> list[str]:
    """Return warnings about splits with one class or without slides, and unknown scan resolutions."""
    cohort_split, lines = result.split, []
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
