"""Figures of an evaluation, by file name: roc, pr, reliability and scores, with a panel for each target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tapfm.evaluation.bands import roc_band
from tapfm.evaluation.columns import labelled_units
from tapfm.evaluation.measures import MetricValue
from tapfm.evaluation.predictions import Prediction, Unit, units_of
from tapfm.results.figure import Figure, Panel
from tapfm.tasks.binary_figures import (
    ScoredUnits,
    calibration_panel,
    precision_recall_panel,
    roc_panel,
    scores_panel,
)

FIGURE_FILES = {
    "roc": "ROC curve",
    "pr": "Precision and recall",
    "reliability": "Calibration",
    "scores": "Predicted probabilities",
}


@dataclass(frozen=True)
class EvaluatedPredictions:
    """Predictions of a model and of a baseline (which may be empty), and what was measured of the model."""

    predictions: Sequence[Prediction]
    baseline: Sequence[Prediction]
    unit: Unit
    metrics: Mapping[tuple[str, str], MetricValue]  # by target and name
    thresholds: Mapping[str, float | None]  # Youden's, by target
    resamples: int
    seed: int


def target_panels(evaluated: EvaluatedPredictions, target: str) -> dict[str, Panel]:
    """Return the panels of one target, by file name."""
    unit = evaluated.unit
    column = labelled_units(units_of(evaluated.predictions, [target], unit), target, unit)
    if column.why_undefined:
        return {name: Panel(title, why_empty=column.why_undefined) for name, title in FIGURE_FILES.items()}
    units = ScoredUnits(column.positive, column.logits, column.probabilities)
    baseline = None
    if evaluated.baseline:
        beside = labelled_units(units_of(evaluated.baseline, [target], unit), target, unit)
        baseline = None if beside.why_undefined else ScoredUnits(beside.positive, beside.logits, beside.probabilities)
    auc, precision, error = (evaluated.metrics[target, each].estimate for each in ("auc", "average_precision", "ece"))
    band = roc_band(evaluated.predictions, target, unit, resamples=evaluated.resamples, seed=evaluated.seed)
    return {
        "roc": roc_panel(units, baseline, auc, band),
        "pr": precision_recall_panel(units, baseline, precision),
        "reliability": calibration_panel(units, error, unit),
        "scores": scores_panel(units, evaluated.thresholds.get(target), unit),
    }


def evaluation_figures(evaluated: EvaluatedPredictions, targets: Sequence[str], title: str) -> dict[str, Figure]:
    """Return the figures of all targets, by file name."""
    panels = {target: target_panels(evaluated, target) for target in targets}
    return {
        name: Figure(f"{curve}: {title}", [replace(panels[target][name], title=target) for target in targets])
        for name, curve in FIGURE_FILES.items()
    }
