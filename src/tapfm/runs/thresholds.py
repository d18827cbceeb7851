"""Thresholds are chosen on validation slides, never on what is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tapfm.cohort.splits import VALIDATION
from tapfm.evaluation.measures import ChosenThresholds, Thresholds, choose_thresholds
from tapfm.evaluation.predictions import Prediction, Unit, average_predictions, read_predictions
from tapfm.runs.model_folder import ModelFolder, ModelMember, description_of
from tapfm.tasks.target import TargetKinds

EXPORTED_SENSITIVITY = 0.9


def thresholds_of(evaluated: ModelFolder, unit: Unit, sensitivity: float) -> ChosenThresholds:
    """Choose thresholds on the validation slides of a run, or of the members of an ensemble."""
    if evaluated.ensemble is None and evaluated.members[0].config is None:
        return _exported(evaluated.members[0], unit, sensitivity)
    found = [each for member in evaluated.members if (each := _validation_of(member.folder, member.targets))]
    if not found:
        return ChosenThresholds(None, f"{evaluated.path} has no predictions of validation slides")
    if len(found) < len(evaluated.members):
        return ChosenThresholds(None, "some members have no predictions of validation slides")
    predictions = _pooled(found, evaluated.targets)
    slides = f"{len(predictions):,} validation slides"
    of_members = " of its members" if evaluated.ensemble is not None else " of the run"
    return ChosenThresholds(choose_thresholds(predictions, evaluated.targets, unit, sensitivity), slides + of_members)


def _validation_of(run: Path, targets: TargetKinds) -> list[Prediction]:
    """Read what a finished run says of its validation slides; nothing where there are none."""
    path = run / f"predictions-{VALIDATION}.csv"
    return read_predictions(path, targets) if path.exists() else []


def _pooled(of_members: Sequence[Sequence[Prediction]], targets: TargetKinds) -> list[Prediction]:
    """Put members' predictions together: averaged where they are of the same slides, as seeds are, else one by one."""
    slides = [[each.slide_id for each in predictions] for predictions in of_members]
    if all(each == slides[0] for each in slides):
        return average_predictions(of_members, targets)
    return [each for predictions in of_members for each in predictions]


def _exported(member: ModelMember, unit: Unit, sensitivity: float) -> ChosenThresholds:
    """Take the thresholds that an export brings along."""
    try:
        written = description_of(member.folder)["thresholds"][unit]
        youden, chosen, why = dict(written["youden"]), dict(written["chosen"]), ""
        if written["sensitivity"] != sensitivity:
            chosen = dict.fromkeys(chosen)
            why = f"an export has that of sensitivity {written['sensitivity']:g} only; for others evaluate the run"
        where = "the validation slides of the run that was exported"
        return ChosenThresholds(Thresholds(youden, chosen, sensitivity), where, why)
    except (LookupError, TypeError, ValueError):
        return ChosenThresholds(
            None, f"{member.folder} was exported without thresholds; evaluate the run, or export it again"
        )


def thresholds_to_export(run: Path, targets: TargetKinds) -> dict[str, Any] | None:
    """Choose the thresholds that an export takes along, for slides and for patients; None before the run is done."""
    if not (predictions := _validation_of(run, targets)):
        return None
    written = {}
    for unit in get_args(Unit):
        chosen = choose_thresholds(predictions, targets, unit, EXPORTED_SENSITIVITY)
        written[unit] = {
            "youden": dict(chosen.youden),
            "chosen": dict(chosen.chosen),
            "sensitivity": chosen.sensitivity,
        }
    return written
