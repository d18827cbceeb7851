"""Predictions of models that are compared: read from runs, evaluations or tables, and matched by patient."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.cohort.splits import TEST, TRAIN, VALIDATION, canonical_split
from tapfm.errors import InputError
from tapfm.evaluation.patients import patient_of
from tapfm.evaluation.predictions import Prediction, all_targets, read_predictions
from tapfm.runs.ensemble import is_run
from tapfm.runtime.messages import counted
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import TargetKinds


@dataclass(frozen=True)
class ComparedPredictions:
    """Predictions of two or more models."""

    files: dict[str, Path]  # by name of the model
    predictions: dict[str, list[Prediction]]
    targets: TargetKinds  # those that all have
    warnings: list[str]


def read_compared(sources: Sequence[str], split: str) -> ComparedPredictions:
    """Read the predictions of models given as [NAME=]PATH.

    split: which predictions of a run to take: test or val.
    """
    named = [_named_source(source, split) for source in sources]
    names = [name for name, _ in named]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"Several are called {', '.join(repeated)}.", hint=f"Name them: {repeated[0]}-1=PATH {repeated[0]}-2=PATH"
        )
    methods = _match_cohorts({name: read_predictions(path) for name, path in named})
    targets = target_kinds(_common_targets(methods))
    return ComparedPredictions(dict(named), methods, targets, _not_held_out(named, methods))


def _named_source(source: str, split: str) -> tuple[str, Path]:
    """Read [NAME=]PATH; without a name it is that of the folder or file."""
    name, equals, text = source.partition("=")
    if not equals or Path(source).exists():
        name, text = "", source
    path = Path(text)
    return name or path.resolve().name.removesuffix(".csv"), _find_predictions(path, split)


def _find_predictions(path: Path, split: str) -> Path:
    """Return the table of predictions in a folder, or the file itself."""
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(
            f"{path} does not exist.",
            hint="Give folders of evaluations or runs, or CSVs of predictions; NAME=PATH names one.",
        )
    if (path / "predictions.csv").is_file():
        return path / "predictions.csv"
    name = canonical_split(split)
    if name not in (VALIDATION, TEST):
        raise InputError(f"Runs have no predictions of {name}.", hint="--split is test or val.")
    found = path / f"predictions-{name}.csv"
    if not found.is_file():
        raise InputError(
            f"{path} has neither predictions.csv nor {found.name}.",
            hint="A run has predictions when it is finished; evaluations are made by: tapfm evaluate RUN --out DIR",
        )
    return found


def _match_cohorts(methods: dict[str, list[Prediction]]) -> dict[str, list[Prediction]]:
    """Match patients by patient_id alone where a table, such as another tool's, names no cohorts."""
    nameless = [name for name, predictions in methods.items() if not any(each.cohort for each in predictions)]
    if len(nameless) in (0, len(methods)):
        return methods
    for name, predictions in methods.items():
        cohorts = Counter(patient for patient, _ in {(each.patient_id, each.cohort) for each in predictions})
        if several := sorted(patient for patient, count in cohorts.items() if count > 1):
            raise InputError(
                f"{nameless[0]} names no cohorts, and in {name} patient '{several[0]}' is in several.",
                hint=f"Add the column cohort to the table of {nameless[0]}.",
            )
    return {name: [replace(each, cohort=None) for each in predictions] for name, predictions in methods.items()}


def _not_held_out(named: Sequence[tuple[str, Path]], methods: dict[str, list[Prediction]]) -> list[str]:
    """Return warnings of patients that a model has seen in training or validation of its own cohort."""
    common = set.intersection(*({patient_of(each) for each in predictions} for predictions in methods.values()))
    notes = []
    for name, path in named:
        if _is_of_own_cohort(path):
            seen = {patient_of(each) for each in methods[name] if each.split in (TRAIN, VALIDATION)} & common
            if seen:
                of = counted(len(seen), "patient")
                notes.append(f"NOT HELD OUT: {name} was trained on, or selected by, {of} of these.")
    return notes


def _is_of_own_cohort(predictions: Path) -> bool:
    """Return whether a table of predictions is of the cohort that its model was trained on."""
    if is_run(predictions.parent):
        return True
    try:
        about = json.loads((predictions.parent / "evaluation.json").read_text("utf-8"))
        return bool(about["cohort"] == "own")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _common_targets(methods: dict[str, list[Prediction]]) -> list[str]:
    """Return the targets that all models have. Raises InputError if there is none."""
    of_method = {name: all_targets(predictions) for name, predictions in methods.items()}
    first, *others = of_method.values()
    common = [target for target in first if all(target in each for each in others)]
    if not common:
        lines = [f"{name}: {', '.join(targets) or 'none'}" for name, targets in of_method.items()]
        raise InputError(
            "They have no target in common:\n  " + "\n  ".join(lines), hint="Compare what predicts the same."
        )
    return common
