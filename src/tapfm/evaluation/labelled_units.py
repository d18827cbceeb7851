"""One target of predictions, as arrays: the units with a label, and how many patients they stand for."""

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
    """The units that have a label of one target."""

    target: str
    kind: TargetKind
    labels: list[Label]  # of all units
    place: NDArray[np.intp]  # of those with a label, among all units
    truth: Truth
    logits: Floats
    undefined_reason: str  # what the labels lack
    no_interval_reason: str  # why resampling cannot give an interval
    clustered: bool  # some patient has several units

    def logits_of(self, predictions: Iterable[Prediction]) -> Floats:
        """Return the logits of other predictions of the same units, of those with a label."""
        logits: Floats = np.array([each.logits[self.target] for each in predictions], dtype=np.float64)
        return logits[self.place]


def select_labelled_units(units: Sequence[Prediction], target: str, kind: TargetKind, unit: Unit) -> LabelledUnits:
    """Take one target of the units."""
    labels = [each.labels.get(target) for each in units]
    truth, logits = kind.select_labelled(labels, [each.logits[target] for each in units])
    patients = [patient_key(each) for each in units]
    known = [place for place, label in enumerate(labels) if label is not None]
    return LabelledUnits(
        target=target,
        kind=kind,
        labels=labels,
        place=np.array(known, dtype=np.intp),
        truth=truth,
        logits=logits,
        undefined_reason=kind.explain_undefined(labels, unit),
        no_interval_reason=kind.explain_missing_interval(labels, patients),
        clustered=len({patients[place] for place in known}) < len(known),
    )
