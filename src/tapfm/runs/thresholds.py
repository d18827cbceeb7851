"""Choose decision thresholds on the validation slides of a run or of the members of an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tapfm.cohort.splits import VALIDATION
from tapfm.evaluation.metric_values import ChosenThresholds, Thresholds, choose_thresholds
from tapfm.evaluation.predictions import Prediction, Unit, average_predictions, read_predictions
from tapfm.runs.model_folder import ModelFolder, ModelMember, read_export_metadata
from tapfm.tasks.target import TargetKinds

EXPORTED_SENSITIVITY = 0.9  # an export contains thresholds for this sensitivity only


def choose_model_thresholds(model_folder: ModelFolder, unit: Unit, sensitivity: float) -> ChosenThresholds:
    """Choose the thresholds of a run or an ensemble on its validation slides; for an export, read its stored ones."""
    if model_folder.ensemble is None and model_folder.members[0].config is None:
        return _read_exported_thresholds(model_folder.members[0], unit, sensitivity)
    predictions_by_member = [
        each for member in model_folder.members if (each := _read_validation_predictions(member.folder, member.targets))
    ]
    if not predictions_by_member:
        return ChosenThresholds(None, f"{model_folder.path} has no validation predictions")
    members = len(model_folder.members)
    if without := members - len(predictions_by_member):
        return ChosenThresholds(None, f"there are no validation predictions for {without} of {members} members")
    predictions = _combine_predictions(predictions_by_member, model_folder.targets)
    owner = "the members" if model_folder.ensemble is not None else "the run"
    source = f"{len(predictions):,} validation slides of {owner}"
    return ChosenThresholds(choose_thresholds(predictions, model_folder.targets, unit, sensitivity), source)


def _read_validation_predictions(run: Path, targets: TargetKinds) -> list[Prediction]:
    """Read the validation predictions of a finished run; empty if there are none."""
    path = run / f"predictions-{VALIDATION}.csv"
    return read_predictions(path, targets) if path.exists() else []


def _combine_predictions(by_member: Sequence[Sequence[Prediction]], targets: TargetKinds) -> list[Prediction]:
    """Average the predictions if all members have the same validation slides (seeds); else concatenate them (folds)."""
    slide_ids = [[each.slide_id for each in predictions] for predictions in by_member]
    if all(each == slide_ids[0] for each in slide_ids):
        return average_predictions(by_member, targets)
    return [each for predictions in by_member for each in predictions]


def _read_exported_thresholds(member: ModelMember, unit: Unit, sensitivity: float) -> ChosenThresholds:
    """Read the thresholds that are stored in an export."""
    try:
        stored = read_export_metadata(member.folder)["thresholds"][unit]
        youden, at_sensitivity, no_at_sensitivity_reason = dict(stored["youden"]), dict(stored["chosen"]), ""
        if stored["sensitivity"] != sensitivity:
            at_sensitivity = dict.fromkeys(at_sensitivity)
            no_at_sensitivity_reason = (
                f"the export has a threshold for sensitivity {stored['sensitivity']:g} only; use the run instead"
            )
        source = "the validation slides of the exported run"
        return ChosenThresholds(Thresholds(youden, at_sensitivity, sensitivity), source, no_at_sensitivity_reason)
    except (LookupError, TypeError, ValueError):
        return ChosenThresholds(
            None, f"{member.folder} was exported without thresholds; use the run instead, or export it again"
        )


def choose_export_thresholds(run: Path, targets: TargetKinds) -> dict[str, Any] | None:
    """Choose the thresholds to store in an export, by unit (slide or patient).

    Returns None if the run has no validation predictions.
    """
    if not (predictions := _read_validation_predictions(run, targets)):
        return None
    thresholds = {}
    for unit in get_args(Unit):
        chosen = choose_thresholds(predictions, targets, unit, EXPORTED_SENSITIVITY)
        thresholds[unit] = {
            "youden": dict(chosen.youden),
            "chosen": dict(chosen.at_sensitivity),
            "sensitivity": chosen.sensitivity,
        }
    return thresholds
