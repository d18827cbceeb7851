"""The labelled units (slides or patients) of one target, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.evaluation.patients import patient_key
from tapfm.evaluation.predictions import Prediction, Unit
from tapfm.metrics.arrays import Floats
from tapfm.tasks.target import Label, TargetKind, Truth


@dataclass(frozen=True)
class LabelledUnits:
    """Labels and logits of one target for the units that have a label, and reasons for missing results."""

    target: str
    kind: TargetKind
    labels: list[Label]  # of all units
    indices: NDArray[np.intp]  # of the labelled units, among all units
    truth: Truth
    logits: Floats
    undefined_reason: str  # why the AUC is undefined; empty if it is defined
    no_interval_reason: str  # why there is no bootstrap confidence interval; empty if there is one
    clustered: bool  # whether a patient has more than one labelled unit

    def select_logits(self, predictions: Iterable[Prediction]) -> Floats:
        """Return the logits of the labelled units from other predictions of the same units."""
        logits: Floats = np.array([each.logits[self.target] for each in predictions], dtype=np.float64)
        return logits[self.indices]


def select_labelled_units(units: Sequence[Prediction], target: str, kind: TargetKind, unit: Unit) -> LabelledUnits:
    """Return the units that have a label for a target."""
    labels = [each.labels.get(target) for each in units]
    truth, logits = kind.select_labelled(labels, [each.logits[target] for each in units])
    patients = [patient_key(each) for each in units]
    indices = [index for index, label in enumerate(labels) if label is not None]
    return LabelledUnits(
        target=target,
        kind=kind,
        labels=labels,
        indices=np.array(indices, dtype=np.intp),
        truth=truth,
        logits=logits,
        undefined_reason=kind.explain_undefined(labels, unit),
        no_interval_reason=kind.explain_missing_interval(labels, patients),
        clustered=len({patients[index] for index in indices}) < len(indices),
    )
