"""The band around a ROC curve, from the patient bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapfm.evaluation.columns import labelled_units
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction, Unit, units_of
from tapfm.metrics.arrays import Floats
from tapfm.metrics.bootstrap import RESAMPLES
from tapfm.metrics.weighted import by_distinct_score
from tapfm.tasks.target import TargetKind

_POINTS = 101


@dataclass(frozen=True)
class RocBand:
    """Where 95% of the resampled curves lie, at each of some false positive rates."""

    false_positive_rate: Floats
    low: Floats
    high: Floats


def roc_band(
    predictions: Sequence[Prediction],
    target: str,
    kind: TargetKind,
    unit: Unit,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> RocBand | None:
    """Find the band of a binary target's ROC curve; None where there is no curve or a class is a single patient."""
    units = units_of(predictions, {target: kind}, unit)
    column = labelled_units(units, target, kind, unit)
    if column.why_undefined or column.too_few:
        return None
    grid = np.linspace(0, 1, _POINTS)
    curves = []
    for _, weights in resample_patients(units, {target: kind}, resamples=resamples, seed=seed).blocks():
        positives, negatives = by_distinct_score(weights[:, column.place], column.truth, -column.logits)
        for found, alarms in zip(np.cumsum(positives, axis=1), np.cumsum(negatives, axis=1), strict=True):
            if found[-1] and alarms[-1]:
                rates = np.concatenate([[0.0], alarms / alarms[-1]]), np.concatenate([[0.0], found / found[-1]])
                curves.append(np.interp(grid, *rates))
    if not curves:
        return None
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    return RocBand(grid, low, high)
