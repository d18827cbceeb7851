"""Figures of a binary target: ROC curve, precision and recall, calibration, and predicted probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.calibration import reliability
from tapfm.metrics.ranking import precision_recall_curve, roc_curve
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Axis, Band, Bars, Line, Mark, Panel, Points, Rule
from tapfm.results.numbers import format_estimate, format_number

_BINS = 20  # of the histogram
_SHARE = (-0.02, 1.02)  # limits of an axis from 0 to 1
_BASELINE = "colour baseline"


@dataclass(frozen=True)
class RocBand:
    """The range of 95% of the resampled ROC curves, at each of some false positive rates."""

    false_positive_rate: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class ScoredUnits:
    """Labels, logits and probabilities of slides or patients, all of them labelled."""

    positive: Flags
    logits: Floats
    probabilities: Floats


def roc_panel(units: ScoredUnits, baseline: ScoredUnits | None, auc: Estimate, band: RocBand | None) -> Panel:
    """Return the ROC curve, with the range of resampled curves and the curve of a baseline."""
    marks: list[Mark] = []
    if band is not None:
        sides = _floats(band.false_positive_rate), _floats(band.low), _floats(band.high)
        marks.append(Band(*sides, label="95% of resampled patients"))
    marks.append(_diagonal())
    if baseline is not None and (curve := roc_curve(baseline.positive, baseline.logits)) is not None:
        marks.append(Line(_floats(curve[0]), _floats(curve[1]), "grey", _BASELINE, dash="dashed"))
    curve = roc_curve(units.positive, units.logits)
    assert curve is not None
    marks.append(Line(_floats(curve[0]), _floats(curve[1]), label=f"AUC {format_estimate(auc)}"))
    return Panel("ROC curve", Axis("1 - specificity", *_SHARE), Axis("sensitivity", *_SHARE), marks, square=True)


def precision_recall_panel(units: ScoredUnits, baseline: ScoredUnits | None, average_precision: Estimate) -> Panel:
    """Return precision against recall, with the prevalence, which is the precision of chance."""
    prevalence = float(units.positive.mean())
    marks: list[Mark] = [Rule(prevalence, f"prevalence {prevalence:.0%}", dash="dotted", horizontal=True)]
    if baseline is not None and (curve := precision_recall_curve(baseline.positive, baseline.logits)) is not None:
        marks.append(Line(_floats(curve[1]), _floats(curve[0]), "grey", _BASELINE, dash="dashed", steps=True))
    curve = precision_recall_curve(units.positive, units.logits)
    assert curve is not None
    name = f"average precision {format_estimate(average_precision)}"
    marks.append(Line(_floats(curve[1]), _floats(curve[0]), label=name, steps=True))
    x, y = Axis("sensitivity (recall)", *_SHARE), Axis("PPV (precision)", *_SHARE)
    return Panel("Precision and recall", x, y, marks, square=True)


def calibration_panel(units: ScoredUnits, calibration_error: Estimate, unit: str) -> Panel:
    """Return observed rates of positives against mean probabilities, with the number of units in each bin."""
    bins = [each for each in reliability(units.positive, units.probabilities) if each.count]
    x = [each.mean_probability or 0.0 for each in bins]
    y = [each.positive_rate or 0.0 for each in bins]
    largest = max(each.count for each in bins)
    name = f"ECE {format_estimate(calibration_error)}"
    points = Points(
        x,
        y,
        label=name,
        sizes=[each.count / largest for each in bins],
        texts=[f"{each.count:,}" for each in bins],
    )
    marks: list[Mark] = [_diagonal(), Line(x, y, faint=True), points]
    low, high = -0.05, 1.1
    ticks = [0, 0.25, 0.5, 0.75, 1]
    return Panel(
        "Calibration",
        Axis(f"mean probability (numbers: {unit}s)", low, high, ticks),
        Axis("rate of positives", low, high, ticks),
        marks,
    )


def scores_panel(units: ScoredUnits, threshold: float | None, unit: str) -> Panel:
    """Return a histogram of the probabilities of positive and negative units, one on top of the other."""
    edges = np.linspace(0, 1, _BINS + 1)
    negative = np.histogram(units.probabilities[~units.positive], edges)[0]
    positive = np.histogram(units.probabilities[units.positive], edges)[0]
    marks: list[Mark] = [
        Bars(_floats(edges), _floats(negative), "other", f"negative ({negative.sum():,})"),
        Bars(_floats(edges), _floats(positive), "model", f"positive ({positive.sum():,})", _floats(negative)),
    ]
    if threshold is not None:
        marks.append(Rule(threshold, f"threshold {format_number(threshold)} (validation)"))
    return Panel("Predicted probabilities", Axis("probability", 0, 1), Axis(f"{unit}s", integer=True), marks)


def _diagonal() -> Line:
    return Line([0, 1], [0, 1], "grey", dash="dotted")


def _floats(values: Floats | Sequence[float]) -> list[float]:
    return [float(value) for value in values]
