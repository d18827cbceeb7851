"""Calls: the predicted class of a target, by a threshold chosen on validation slides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tapfm.errors import InputError
from tapfm.inference.predictor import SlideOutput
from tapfm.prediction.folder import TargetPrediction
from tapfm.runs.model_folder import ModelFolder
from tapfm.runs.thresholds import EXPORTED_SENSITIVITY, choose_model_thresholds
from tapfm.tasks.target import Label, TargetKinds


@dataclass(frozen=True)
class CallThresholds:
    """The call threshold of each target, None if validation gave none, and how they were chosen."""

    thresholds: Mapping[str, float | None]
    description: str
    targets: TargetKinds

    def predict_targets(self, output: SlideOutput, labels: Mapping[str, Label]) -> dict[str, TargetPrediction]:
        """Return the probability and the call of each target of a slide."""
        return {
            target: self.predict_target(target, logit, output.logit_constants[target], labels.get(target))
            for target, logit in output.logits.items()
        }

    def predict_target(self, target: str, logit: float, logit_constant: float | None, label: Label) -> TargetPrediction:
        """Return the probability and the call of one target.

        logit_constant: see `TargetPrediction.constant`; does not change the probability.
        """
        threshold, kind = self.thresholds.get(target), self.targets[target]
        return TargetPrediction(
            logit, kind.activate(logit), threshold, kind.apply_threshold(logit, threshold), label, logit_constant
        )


def choose_call_thresholds(model_folder: ModelFolder, sensitivity: float | None) -> CallThresholds:
    """Choose call thresholds on the validation slides: Youden's, or those that reach a sensitivity."""
    chosen = choose_model_thresholds(
        model_folder, "slide", EXPORTED_SENSITIVITY if sensitivity is None else sensitivity
    )
    if chosen.thresholds is None:
        return CallThresholds({}, f"none, because {chosen.source}", model_folder.targets)
    if sensitivity is None:
        description = f"Youden's, chosen on {chosen.source}"
        return CallThresholds(dict(chosen.thresholds.youden), description, model_folder.targets)
    if chosen.no_at_sensitivity_reason:
        raise InputError(
            f"There is no threshold for a sensitivity of {sensitivity:g}: {chosen.no_at_sensitivity_reason}.",
            hint="Omit --sensitivity, or predict with the run instead of its export.",
        )
    description = f"chosen for a sensitivity of {sensitivity:g} on {chosen.source}"
    return CallThresholds(dict(chosen.thresholds.at_sensitivity), description, model_folder.targets)
