"""One target of predictions, as arrays: the units with a label, and how many patients they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapfm.evaluation.patients import patient_of
from tapfm.evaluation.predictions import Prediction, Unit
from tapfm.metrics.arrays import Flags, Floats, known_of, sigmoid
from tapfm.metrics.ranking import why_undefined

SINGLE = "no interval: a single"


@dataclass(frozen=True)
class LabelledUnits:
    """The units that have a label of one target."""

    target: str
    place: NDArray[np.intp]  # among all units
    positive: Flags
    logits: Floats
    probabilities: Floats
    why_undefined: str  # the class that is absent
    too_few: str  # the class of a single patient, which resampling cannot vary
    clustered: bool  # some patient has several units

    @property
    def labels(self) -> list[int | None]:
        """The labels, all of them known."""
        return [int(each) for each in self.positive]


def labelled_units(units: Sequence[Prediction], target: str, unit: Unit) -> LabelledUnits:
    """Take one target of the units."""
    labels = [each.labels.get(target) for each in units]
    known = [each for each, label in zip(units, labels, strict=True) if label is not None]
    positive, logits = known_of(labels, [each.logits[target] for each in units])
    patients = {
        name: {patient_of(each) for each in known if each.labels[target] == label}
        for label, name in enumerate(("negative", "positive"))
    }
    alone = [name for name, of_class in patients.items() if len(of_class) == 1]
    return LabelledUnits(
        target=target,
        place=np.array([place for place, label in enumerate(labels) if label is not None], dtype=np.intp),
        positive=positive,
        logits=logits,
        probabilities=np.array([sigmoid(logit) for logit in logits], dtype=np.float64),
        why_undefined=why_undefined(labels, unit),
        too_few=f"{SINGLE} {alone[0]} patient" if alone else "",
        clustered=len({patient_of(each) for each in known}) < len(known),
    )
