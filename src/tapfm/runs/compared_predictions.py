"""Read the predictions to compare from runs, evaluations or tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.cohort.splits import TEST, TRAIN, VALIDATION, parse_split_option
from tapfm.errors import InputError
from tapfm.evaluation.patients import patient_key
from tapfm.evaluation.predictions import Prediction, collect_targets, read_predictions, read_target_kinds
from tapfm.runs.ensemble import is_run
from tapfm.runtime.messages import format_count
from tapfm.tasks.target import TargetKinds


@dataclass(frozen=True)
class ComparedPredictions:
    """Predictions of two or more models."""

    files: dict[str, Path]  # prediction table, by name of the model
    predictions: dict[str, list[Prediction]]  # by name of the model
    targets: TargetKinds  # targets that all models predict
    warnings: list[str]


def read_compared_predictions(sources: Sequence[str], split: str) -> ComparedPredictions:
    """Read the predictions of models given as [NAME=]PATH.

    split: "test" or "val"; a run has predictions for both.
    """
    named_files = [_parse_source(source, split) for source in sources]
    names = [name for name, _ in named_files]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"Several models have the same name: {', '.join(repeated)}.",
            hint=f"Give them different names: {repeated[0]}-1=PATH {repeated[0]}-2=PATH",
        )
    by_model = _remove_cohorts_unless_all_models_have_them({name: read_predictions(path) for name, path in named_files})
    kinds = [read_target_kinds(path) for _, path in named_files]
    common = _find_common_targets(by_model)
    _check_same_classes(names, kinds, common)
    targets = {target: kinds[0][target] for target in common}
    return ComparedPredictions(
        dict(named_files), by_model, targets, _collect_not_held_out_warnings(named_files, by_model)
    )


def _parse_source(source: str, split: str) -> tuple[str, Path]:
    """Return the name and the prediction table of a model given as [NAME=]PATH; NAME defaults to the name of PATH."""
    name, equals, text = source.partition("=")
    if not equals or Path(source).exists():
        name, text = "", source
    path = Path(text)
    return name or path.resolve().name.removesuffix(".csv"), _find_prediction_table(path, split)


def _find_prediction_table(path: Path, split: str) -> Path:
    """Return `path` if it is a file, else the path of the prediction table in the folder `path`."""
    if path.is_file():
        return path
    if not path.exists():
        raise InputError(
            f"{path} does not exist.",
            hint="Pass folders of evaluations or runs, or CSV files of predictions. NAME=PATH names a model.",
        )
    if (path / "predictions.csv").is_file():
        return path / "predictions.csv"
    name = parse_split_option(split, (VALIDATION, TEST))
    found = path / f"predictions-{name}.csv"
    if not found.is_file():
        raise InputError(
            f"{path} has neither predictions.csv nor {found.name}.",
            hint="A run writes its predictions when it finishes. To evaluate a run: tapfm evaluate RUN --out DIR",
        )
    return found


def _remove_cohorts_unless_all_models_have_them(by_model: dict[str, list[Prediction]]) -> dict[str, list[Prediction]]:
    """Return the predictions with `cohort=None`, unless the tables of all models have a cohort column.

    Patients then match by patient_id only. Raises InputError if a patient id occurs in several cohorts of one table.
    """
    without_cohorts = [name for name, predictions in by_model.items() if not any(each.cohort for each in predictions)]
    if len(without_cohorts) in (0, len(by_model)):
        return by_model
    for name, predictions in by_model.items():
        cohorts = Counter(patient for patient, _ in {(each.patient_id, each.cohort) for each in predictions})
        if several := sorted(patient for patient, count in cohorts.items() if count > 1):
            raise InputError(
                f"Patients cannot be matched: in the predictions of {name}, the patient id '{several[0]}' occurs in "
                f"several cohorts, but the predictions of {without_cohorts[0]} have no column 'cohort'.",
                hint=f"Add a column 'cohort' to the predictions of {without_cohorts[0]}.",
            )
    return {name: [replace(each, cohort=None) for each in predictions] for name, predictions in by_model.items()}


def _collect_not_held_out_warnings(
    named_files: Sequence[tuple[str, Path]], by_model: dict[str, list[Prediction]]
) -> list[str]:
    """Return a warning for each model that was trained or validated on some of the compared patients."""
    common = set.intersection(*({patient_key(each) for each in predictions} for predictions in by_model.values()))
    warnings = []
    for name, path in named_files:
        if _is_for_run_cohort(path):
            seen = {patient_key(each) for each in by_model[name] if each.split in (TRAIN, VALIDATION)} & common
            if seen:
                patients = format_count(len(seen), "patient")
                warnings.append(f"NOT HELD OUT: {name} was trained or validated on {patients} of this comparison.")
    return warnings


def _is_for_run_cohort(predictions: Path) -> bool:
    """Return whether a prediction table is for the cohort of the run (any split), not for an external cohort."""
    if is_run(predictions.parent):
        return True
    try:
        evaluation = json.loads((predictions.parent / "evaluation.json").read_text("utf-8"))
        return bool(evaluation["cohort"] == "own")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _check_same_classes(names: Sequence[str], kinds: Sequence[TargetKinds], targets: Sequence[str]) -> None:
    """Raise InputError if the models have different positive classes of a target."""
    for target in targets:
        positive = {name: each[target].format_prediction(None, 0.0)[1] for name, each in zip(names, kinds, strict=True)}
        if len(set(positive.values())) > 1:
            listed = ", ".join(f"{name}: {text}" for name, text in positive.items())
            raise InputError(
                f"The models have different positive classes of {target} ({listed}).",
                hint="Compare predictions of the same class.",
            )


def _find_common_targets(by_model: dict[str, list[Prediction]]) -> list[str]:
    """Return the targets that all models predict. Raises InputError if there is none."""
    targets_by_model = {name: collect_targets(predictions) for name, predictions in by_model.items()}
    first, *others = targets_by_model.values()
    common = [target for target in first if all(target in each for each in others)]
    if not common:
        lines = [f"{name}: {', '.join(targets) or 'none'}" for name, targets in targets_by_model.items()]
        raise InputError(
            "The models have no target in common:\n  " + "\n  ".join(lines),
            hint="Compare models that predict the same target.",
        )
    return common
