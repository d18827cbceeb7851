"""Read a cohort table with its labels. Problems of the table and of the labels are reported in one error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.cohort.cohort_table import Check, Cohort, SlideRow, find_patient_problems, read_cohort
from tapfm.cohort.columns import list_columns
from tapfm.cohort.splits import TRAIN
from tapfm.cohort.table_options import TableOptions
from tapfm.cohort.table_problems import TableProblem
from tapfm.errors import LabelError
from tapfm.results.table import Cell, Column
from tapfm.tasks.label_columns import TargetRequest, clean_label, describe_target, find_target_kinds
from tapfm.tasks.target import Label, TargetKinds

_MAX_CONTRADICTIONS = 5  # patients listed in a message


@dataclass(frozen=True)
class LabelledCohort:
    """A cohort with its targets and labels."""

    cohort: Cohort
    targets: TargetKinds
    labels: Mapping[str, tuple[Label, ...]]  # by target, in the order of the rows
    is_chosen: bool = False  # nobody named the target; it is the only column with two classes

    def labels_of(self, target: str, rows: Iterable[SlideRow]) -> list[Label]:
        """Return the labels of some rows."""
        label = {row.slide_id: each for row, each in zip(self.cohort.rows, self.labels[target], strict=True)}
        return [label[row.slide_id] for row in rows]

    @property
    def notes(self) -> list[str]:
        """How the table was read: patients, columns, targets, missing values and missing files."""
        cohort = self.cohort
        targets = [describe_target(cohort, target, kind) for target, kind in self.targets.items()]
        if self.is_chosen and (others := [name for name in cohort.label_names if name not in self.targets]):
            targets[0] += f" Chosen because the other columns do not have two classes: {list_columns(others)}."
        return [*filter(None, (cohort.summary, *cohort.notes, *targets, cohort.missing_files_note))]

    @property
    def warnings(self) -> list[str]:
        """Warnings about patients: unknown, or with contradicting labels."""
        contradictions = _find_contradictions(self)
        lines = list(self.cohort.patient_warnings)
        for target, by_patient in contradictions.items():
            listed = [f"{patient} ({described})" for patient, (described, _) in by_patient.items()]
            more = f" and {len(listed) - _MAX_CONTRADICTIONS:,} more" if len(listed) > _MAX_CONTRADICTIONS else ""
            lines.append(
                f"{target}: slides of the same patient have contradicting labels: "
                f"{'; '.join(listed[:_MAX_CONTRADICTIONS])}{more}."
            )
        return lines


def read_labelled_cohort(
    source: Path,
    options: TableOptions,
    request: TargetRequest | Callable[[Cohort], TargetRequest],
    *,
    unit: str = "slide",
    checks: Sequence[Check] = (),
    no_target_hint: str = "",
) -> LabelledCohort:
    """Read a cohort table and the labels of the requested targets. The request may depend on the table.

    unit: with "patient", contradicting labels of one patient are a problem. checks: more checks of the table.
    no_target_hint: what else the user can do if no target can be chosen.
    """

    def find_request(cohort: Cohort) -> TargetRequest:
        return request if isinstance(request, TargetRequest) else request(cohort)

    def find_label_problems(cohort: Cohort) -> Iterable[TableProblem]:
        targets, problems = find_target_kinds(cohort, find_request(cohort), no_target_hint)
        yield from problems
        if unit == "patient" and not problems:
            yield from _contradiction_problems(_add_labels(cohort, targets))

    cohort = read_cohort(source, options, checks=[find_patient_problems, find_label_problems, *checks])
    targets, _ = find_target_kinds(cohort, find_request(cohort))
    return replace(_add_labels(cohort, targets), is_chosen=not find_request(cohort).targets)


def _add_labels(cohort: Cohort, targets: TargetKinds) -> LabelledCohort:
    return LabelledCohort(cohort, targets, read_labels(cohort, targets))


def read_labels(cohort: Cohort, targets: TargetKinds) -> dict[str, tuple[Label, ...]]:
    """Return the label of each row for each target. Raises LabelError for values that are not labels."""
    try:
        return {
            target: tuple(kind.parse_label(clean_label(cohort, row.labels[target], kind)) for row in cohort.rows)
            for target, kind in targets.items()
        }
    except (KeyError, ValueError) as error:
        raise LabelError(f"{cohort.table_path}: {error}.", hint="Correct the label columns of the table.") from error


def _find_contradictions(labelled: LabelledCohort) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Return, by target and patient, the different labels of a patient's slides, and their rows."""
    found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for target, labels in labelled.labels.items():
        kind = labelled.targets[target]
        by_patient: dict[str, dict[Label, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
        for row, label in zip(labelled.cohort.rows, labels, strict=True):
            if label is not None:
                by_patient[row.patient_id][label].append((row.slide_id, row.row))
        for patient, slides in by_patient.items():
            if len(slides) > 1:
                described = "; ".join(
                    f"{kind.format_label(label)}: {', '.join(slide_id for slide_id, _ in same[:3])}"
                    for label, same in slides.items()
                )
                rows = tuple(sorted(row for same in slides.values() for _, row in same))
                found.setdefault(target, {})[patient] = (described, rows)
    return found


def _contradiction_problems(labelled: LabelledCohort) -> Iterable[TableProblem]:
    for target, by_patient in _find_contradictions(labelled).items():
        for patient, (described, rows) in by_patient.items():
            yield TableProblem(
                f"patient {patient} has contradicting labels of {target} ({described})",
                rows,
                "With the unit patient, all slides of a patient need the same label. Correct the labels, or use the "
                "unit slide.",
            )


def patient_strata(
    cohort: Cohort, labels: Mapping[str, Sequence[Label]], targets: TargetKinds
) -> dict[str, list[str | None]]:
    """Return the stratum of each row's patient, by target."""
    strata = {}
    for target, row_labels in labels.items():
        labels_by_patient: dict[str, list[Label]] = {}
        for row, label in zip(cohort.rows, row_labels, strict=True):
            labels_by_patient.setdefault(row.patient_id, []).append(label)
        kind = targets[target]
        stratum = {patient: kind.stratum(kind.pool_labels(each)) for patient, each in labels_by_patient.items()}
        strata[target] = [stratum[row.patient_id] for row in cohort.rows]
    return strata


def label_count_columns(targets: TargetKinds) -> list[Column]:
    """Return the columns of a table of label counts, one per target."""
    return [Column(f"{target} {kind.label_count_title}") for target, kind in targets.items()]


def label_count_cells(rows: Sequence[Mapping[str, str]], targets: TargetKinds) -> list[Cell]:
    """Return the label counts of each target; the rows contain labels as text."""
    return [
        kind.label_count_cell([kind.parse_label(row.get(target, "")) for row in rows])
        for target, kind in targets.items()
    ]


def check_training_labels(
    cohort: Cohort,
    splits: Mapping[str, str],
    labels: Mapping[str, Sequence[Label]],
    targets: TargetKinds,
    column: str = "split",
) -> None:
    """Raise LabelError if a target does not have both classes in the training split."""
    problems = []
    for target, row_labels in labels.items():
        training_labels = [
            label for row, label in zip(cohort.rows, row_labels, strict=True) if splits.get(row.slide_id) == TRAIN
        ]
        if targets[target].missing_class(training_labels):
            problems.append(f"{target}: {targets[target].describe_counts(training_labels, 'slide')}")
    if problems:
        raise LabelError(
            f"These targets do not have both classes in the training split (column {column}):\n  "
            + "\n  ".join(problems),
            hint="Label more patients of the missing class, change the splits (tapfm split with another --seed, or "
            "without --folds), or omit the target.",
        )
