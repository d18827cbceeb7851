"""Labels of the slides of an evaluation: of the cohort of the run, or of another cohort with its own texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import find_split_problems
from tapfm.cohort.table_options import TableOptions
from tapfm.errors import InputError
from tapfm.runs.model_folder import ModelFolder
from tapfm.tasks.catalog import ClassTexts, class_texts
from tapfm.tasks.label_columns import TargetRequest, has_number_labels
from tapfm.tasks.labels import LabelledCohort, read_labelled_cohort


def read_evaluation_labels(
    model_folder: ModelFolder,
    cohort_table: Path,
    options: TableOptions,
    external_texts: ClassTexts | None,
    unit: str | None,
) -> LabelledCohort:
    """Read a cohort with the labels of the model's targets that it has.

    external_texts: texts of the classes in the table of an external cohort; without them, those of training are used,
    or 0 and 1 if the table has only these. None: the table is that of the run.
    """
    config, targets = model_folder.config, model_folder.targets
    unit = unit or (config.selection.unit if config is not None else "slide")
    if external_texts is None:
        assert config is not None
        checks = [partial(find_split_problems, fold=config.cohort.fold)]
        request_of_run = TargetRequest(tuple(targets), class_texts(targets))
        return read_labelled_cohort(cohort_table, options, request_of_run, unit=unit, checks=checks)
    if unknown := [name for name in external_texts if name not in targets]:
        raise InputError(
            f"--positive names {unknown[0]}, which the model does not predict.",
            hint=f"The model predicts {', '.join(targets)}.",
        )
    found = read_cohort(cohort_table, options)
    known = tuple(target for target in targets if target in found.label_names) or tuple(targets)
    texts = class_texts(targets)
    for target in set(known) & set(found.label_names):
        if target in external_texts:
            texts[target] = {name: list(each) for name, each in external_texts[target].items()}
        elif has_number_labels(found, target):
            texts.pop(target, None)
    return read_labelled_cohort(cohort_table, options, TargetRequest(known, texts), unit=unit)


def describe_other_texts(model_folder: ModelFolder, labelled: LabelledCohort) -> list[str]:
    """Return a note for each target whose classes have other texts in this table than in training."""
    notes = []
    for target, kind in labelled.targets.items():
        trained = model_folder.targets[target]
        if kind.label_texts != trained.label_texts:
            texts = (f"{kind.format_label(label)} is {trained.format_label(label)}" for label in (1, 0))
            notes.append(f"{target} has other labels than in training: {', '.join(texts)}.")
    return notes
