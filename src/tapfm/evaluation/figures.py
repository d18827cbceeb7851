"""Figures of an evaluation, with a panel for each target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tapfm.evaluation.labelled_units import select_labelled_units
from tapfm.evaluation.metric_values import MetricValue
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction, Unit, pool_by_unit
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Figure, Panel
from tapfm.tasks.target import FigureData, TargetKind, TargetKinds


@dataclass(frozen=True)
class EvaluatedPredictions:
    """Predictions of a model and of the baseline (which may be empty), and the metrics of the model."""

    predictions: Sequence[Prediction]
    baseline: Sequence[Prediction]
    unit: Unit
    metrics: Mapping[tuple[str, str], MetricValue]  # by target and metric
    thresholds: Mapping[str, float | None]  # Youden thresholds by target
    resamples: int
    seed: int


def build_target_panels(evaluated: EvaluatedPredictions, target: str, kind: TargetKind) -> dict[str, Panel]:
    """Return the panels of one target, by file name."""
    kinds, unit = {target: kind}, evaluated.unit
    units = pool_by_unit(evaluated.predictions, kinds, unit)
    labelled = select_labelled_units(units, target, kind, unit)
    if labelled.undefined_reason:
        return {name: Panel(title, why_empty=labelled.undefined_reason) for name, title in kind.figure_titles.items()}
    baseline = None
    if evaluated.baseline:
        baseline_units = select_labelled_units(pool_by_unit(evaluated.baseline, kinds, unit), target, kind, unit)
        if not baseline_units.undefined_reason:
            baseline = baseline_units.truth, baseline_units.logits
    resamples = resample_patients(units, kinds, resamples=evaluated.resamples, seed=evaluated.seed)
    has_interval = not labelled.no_interval_reason
    data = FigureData(
        truth=labelled.truth,
        logits=labelled.logits,
        baseline=baseline,
        estimates={
            name: each.estimate if (each := evaluated.metrics.get((target, name))) is not None else Estimate(None)
            for name in kind.metrics
        },
        threshold=evaluated.thresholds.get(target),
        resample_weights=(weights[:, labelled.indices] for _, weights in resamples.blocks()) if has_interval else (),
        unit=unit,
    )
    return kind.build_panels(data)


def build_evaluation_figures(evaluated: EvaluatedPredictions, targets: TargetKinds, title: str) -> dict[str, Figure]:
    """Return each figure, such as "roc", with one panel per target, by file name without suffix."""
    panels: dict[str, list[Panel]] = {}
    for target, kind in targets.items():
        for name, panel in build_target_panels(evaluated, target, kind).items():
            panels.setdefault(name, []).append(replace(panel, title=target))
    titles = {name: figure_title for kind in targets.values() for name, figure_title in kind.figure_titles.items()}
    return {name: Figure(f"{titles[name]}: {title}", target_panels) for name, target_panels in panels.items()}
