"""Labels of the slides of an evaluation: of the cohort of the run, or of another cohort with its own texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tapfm.cohort.cohort_table import Check, Cohort
from tapfm.cohort.columns import unknown_column_problem
from tapfm.cohort.splits import find_split_problems
from tapfm.cohort.table_options import TableOptions
from tapfm.cohort.table_problems import TableProblem
from tapfm.errors import InputError
from tapfm.runs.data import OPTIONAL_COHORT_COLUMNS
from tapfm.runs.model_folder import ModelFolder
from tapfm.tasks.catalog import ClassTexts, class_texts
from tapfm.tasks.label_columns import TargetRequest, needs_number_labels
from tapfm.tasks.labels import LabelledCohort, read_labelled_cohort
from tapfm.tasks.target import TargetKinds


def read_evaluation_labels(
    model_folder: ModelFolder,
    cohort_table: Path,
    options: TableOptions,
    external_texts: ClassTexts | None,
    *,
    unit: str | None,
    by: Sequence[str],
) -> LabelledCohort:
    """Read a cohort with the labels of the model's targets that it has.

    external_texts: texts of the classes in the table of an external cohort; without them, those of training are used,
    or 0 and 1 if the table has only these. None: the table is that of the run. by: columns of subgroups.
    """
    config, targets = model_folder.config, model_folder.targets
    unit = unit or (config.selection.unit if config is not None else "slide")
    checks: list[Check] = [partial(_find_unknown_columns, names=by)]
    if external_texts is None:
        assert config is not None
        checks.append(partial(find_split_problems, fold=config.cohort.fold))
        request = TargetRequest(tuple(targets), class_texts(targets))
        return read_labelled_cohort(cohort_table, options, request, unit=unit, checks=checks)
    if unknown := [name for name in external_texts if name not in targets]:
        raise InputError(
            f"--positive names {unknown[0]}, which the model does not predict.",
            hint=f"The model predicts {', '.join(targets)}.",
        )
    external_request = partial(_choose_external_targets, targets=targets, external_texts=external_texts)
    return read_labelled_cohort(cohort_table, options, external_request, unit=unit, checks=checks)


def _choose_external_targets(cohort: Cohort, targets: TargetKinds, external_texts: ClassTexts) -> TargetRequest:
    """Return the targets of the model that the table of another cohort has (if none, all), and their texts there."""
    found = tuple(target for target in targets if target in cohort.label_names)
    texts = class_texts(targets)
    for target in found:
        if target in external_texts:
            texts[target] = {name: list(each) for name, each in external_texts[target].items()}
        elif needs_number_labels(cohort, target, targets[target]):
            texts.pop(target, None)
    return TargetRequest(found or tuple(targets), texts)


def _find_unknown_columns(cohort: Cohort, names: Sequence[str]) -> list[TableProblem]:
    """Return a problem for each column of --by that the table does not have."""
    known = (*OPTIONAL_COHORT_COLUMNS, *cohort.label_names)
    return [unknown_column_problem("--by", name, known) for name in names if name not in known]


def describe_other_texts(model_folder: ModelFolder, labelled: LabelledCohort) -> list[str]:
    """Return a note for each target whose classes have other texts in this table than in training."""
    notes = []
    for target, kind in labelled.targets.items():
        trained = model_folder.targets[target]
        if kind.label_texts != trained.label_texts:
            texts = (f"{kind.format_label(label)} is {trained.format_label(label)}" for label in (1, 0))
            notes.append(f"{target} has other labels than in training: {', '.join(texts)}.")
    return notes
