"""Figures of a binary target: ROC curve, precision-recall curve, calibration, and predicted probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapfm.metrics.arrays import Flags, Floats
from tapfm.metrics.calibration import reliability_bins
from tapfm.metrics.ranking import precision_recall_curve, roc_curve
from tapfm.metrics.weighted import sum_by_score
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Axis, Band, Bars, Line, Mark, Panel, Points, ReferenceLine
from tapfm.results.formatting import format_estimate, format_number
from tapfm.tasks.target import BASELINE, FigureData

FIGURES = {  # file name without suffix: title
    "roc": "ROC curve",
    "pr": "Precision-recall curve",
    "reliability": "Calibration",
    "scores": "Predicted probabilities",
}
_BINS = 20  # of the histogram of probabilities
_GRID_POINTS = 101  # of the band of resampled curves
_AXIS_LIMITS = (-0.02, 1.02)  # of an axis from 0 to 1, with margins


@dataclass(frozen=True)
class ScoredUnits:
    """Labels, logits and probabilities of labelled slides or patients."""

    positive: Flags
    logits: Floats
    probabilities: Floats


def build_binary_panels(
    units: ScoredUnits, baseline: ScoredUnits | None, data: FigureData, class_names: tuple[str, str]
) -> dict[str, Panel]:
    """Return the panel of each figure in `FIGURES`."""
    return {
        "roc": _roc_panel_with_band(units, baseline, data.estimates["auc"], data.resample_weights),
        "pr": _precision_recall_panel(units, baseline, data.estimates["average_precision"]),
        "reliability": _calibration_panel(units, data.estimates["ece"], data.unit),
        "scores": _scores_panel(units, data.threshold, data.unit, class_names),
    }


def roc_line(positive: Flags, logits: Floats) -> Line | None:
    """Return the ROC curve, reduced to its corners; None if a class is missing."""
    curve = roc_curve(positive, logits)
    if curve is None:
        return None
    points = np.stack(curve[:2])
    corners = (np.abs(np.diff(points, 2)) > 1e-9).any(axis=0)
    x, y = points[:, np.concatenate([[True], corners, [True]])]
    return Line(_floats(x), _floats(y))


def roc_panel(title: str, marks: Sequence[Mark]) -> Panel:
    """Return a panel with ROC curves and the diagonal of a random classifier."""
    x, y = Axis("1 - specificity", *_AXIS_LIMITS), Axis("sensitivity", *_AXIS_LIMITS)
    return Panel(title, x, y, [_diagonal(), *marks], square=True)


def _roc_panel_with_band(
    units: ScoredUnits, baseline: ScoredUnits | None, auc: Estimate, weights: Iterable[Floats]
) -> Panel:
    """Return the ROC curve with the band of resampled curves and the curve of the baseline."""
    marks: list[Mark] = [*_roc_band(units, weights)]
    if baseline is not None and (line := roc_line(baseline.positive, baseline.logits)) is not None:
        marks.append(replace(line, colour="grey", label=BASELINE, dash="dashed"))
    line = roc_line(units.positive, units.logits)
    assert line is not None
    return roc_panel(FIGURES["roc"], [*marks, replace(line, label=f"AUC {format_estimate(auc)}")])


def _roc_band(units: ScoredUnits, weights: Iterable[Floats]) -> list[Band]:
    """Return the band of 95% of the resampled ROC curves; empty without resamples."""
    grid = np.linspace(0, 1, _GRID_POINTS)
    curves = []
    for rows in weights:
        positives, negatives = sum_by_score(rows, units.positive, -units.logits)
        for true_p, false_p in zip(np.cumsum(positives, axis=1), np.cumsum(negatives, axis=1), strict=True):
            if true_p[-1] and false_p[-1]:
                rates = np.concatenate([[0.0], false_p / false_p[-1]]), np.concatenate([[0.0], true_p / true_p[-1]])
                curves.append(np.interp(grid, *rates))
    if not curves:
        return []
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    return [Band(_floats(grid), _floats(low), _floats(high), label="95% of bootstrap resamples")]


def _precision_recall_panel(units: ScoredUnits, baseline: ScoredUnits | None, average_precision: Estimate) -> Panel:
    """Return the precision-recall curve, with the prevalence (the precision of a random classifier)."""
    prevalence = float(units.positive.mean())
    marks: list[Mark] = [ReferenceLine(prevalence, f"prevalence {prevalence:.0%}", dash="dotted", horizontal=True)]
    if baseline is not None and (curve := precision_recall_curve(baseline.positive, baseline.logits)) is not None:
        marks.append(Line(_floats(curve[1]), _floats(curve[0]), "grey", BASELINE, dash="dashed", steps=True))
    curve = precision_recall_curve(units.positive, units.logits)
    assert curve is not None
    name = f"average precision {format_estimate(average_precision)}"
    marks.append(Line(_floats(curve[1]), _floats(curve[0]), label=name, steps=True))
    x, y = Axis("sensitivity (recall)", *_AXIS_LIMITS), Axis("PPV (precision)", *_AXIS_LIMITS)
    return Panel(FIGURES["pr"], x, y, marks, square=True)


def _calibration_panel(units: ScoredUnits, calibration_error: Estimate, unit: str) -> Panel:
    """Return the fraction of positives against the mean probability, with the number of units in each bin."""
    bins = [each for each in reliability_bins(units.positive, units.probabilities) if each.count]
    x = [each.mean_probability or 0.0 for each in bins]
    y = [each.positive_fraction or 0.0 for each in bins]
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
        FIGURES["reliability"],
        Axis(f"mean probability (numbers: {unit}s)", low, high, ticks),
        Axis("fraction of positives", low, high, ticks),
        marks,
    )


def _scores_panel(units: ScoredUnits, threshold: float | None, unit: str, class_names: tuple[str, str]) -> Panel:
    """Return a stacked histogram of the probabilities of positive and negative units."""
    edges = np.linspace(0, 1, _BINS + 1)
    negative = np.histogram(units.probabilities[~units.positive], edges)[0]
    positive = np.histogram(units.probabilities[units.positive], edges)[0]
    marks: list[Mark] = [
        Bars(_floats(edges), _floats(negative), "secondary", f"{class_names[0]} ({negative.sum():,})"),
        Bars(_floats(edges), _floats(positive), "primary", f"{class_names[1]} ({positive.sum():,})", _floats(negative)),
    ]
    if threshold is not None:
        marks.append(ReferenceLine(threshold, f"threshold {format_number(threshold)} (validation)"))
    return Panel(FIGURES["scores"], Axis("probability", 0, 1), Axis(f"{unit}s", integer=True), marks)


def _diagonal() -> Line:
    return Line([0, 1], [0, 1], "grey", dash="dotted")


def _floats(values: Floats | Sequence[float]) -> list[float]:
    return [float(value) for value in values]
