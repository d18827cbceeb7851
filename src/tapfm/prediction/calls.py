"""Calls: what the number of a target stands for, by a threshold from validation slides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tapfm.errors import InputError
from tapfm.inference.predictor import SlideOutput
from tapfm.prediction.folder import TargetPrediction
from tapfm.runs.model_folder import ModelFolder
from tapfm.runs.thresholds import EXPORTED_SENSITIVITY, thresholds_of
from tapfm.tasks.target import Label, TargetKinds


@dataclass(frozen=True)
class CallThresholds:
    """The threshold of each target, None where validation gave none, and where they come from."""

    thresholds: Mapping[str, float | None]
    where: str
    targets: TargetKinds

    def predictions(self, output: SlideOutput, labels: Mapping[str, Label]) -> dict[str, TargetPrediction]:
        """Return the probability and the call of each target of a slide."""
        return {
            target: self.call(target, logit, output.constants[target], labels.get(target))
            for target, logit in output.logits.items()
        }

    def call(self, target: str, logit: float, constant: float | None, label: Label) -> TargetPrediction:
        """Return the probability and the call of one target."""
        threshold, kind = self.thresholds.get(target), self.targets[target]
        return TargetPrediction(logit, kind.activate(logit), threshold, kind.call(logit, threshold), label, constant)


def choose_calls(evaluated: ModelFolder, sensitivity: float | None) -> CallThresholds:
    """Choose thresholds on the validation slides: Youden's, or those that reach a sensitivity."""
    chosen = thresholds_of(evaluated, "slide", EXPORTED_SENSITIVITY if sensitivity is None else sensitivity)
    if chosen.thresholds is None:
        return CallThresholds({}, f"no calls, as {chosen.where}", evaluated.targets)
    if sensitivity is None:
        where = f"Youden's thresholds of {chosen.where}"
        return CallThresholds(dict(chosen.thresholds.youden), where, evaluated.targets)
    if chosen.why_none_at_sensitivity:
        raise InputError(
            f"There is no threshold for a sensitivity of {sensitivity:g}: {chosen.why_none_at_sensitivity}.",
            hint="Leave --sensitivity out, or predict with the run itself.",
        )
    where = f"a sensitivity of {sensitivity:g} on {chosen.where}"
    return CallThresholds(dict(chosen.thresholds.chosen), where, evaluated.targets)
