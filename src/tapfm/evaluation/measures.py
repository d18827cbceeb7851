"""Everything measured of predictions, with intervals: each metric of each target, and their mean over targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapfm.evaluation.columns import LabelledUnits, labelled_units
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction, Unit, units_of
from tapfm.metrics.arrays import Floats
from tapfm.metrics.bootstrap import RESAMPLES, Resamples, interval
from tapfm.results.estimate import Estimate
from tapfm.tasks.target import TargetKinds, TargetThresholds

MACRO = "macro"


def target_title(target: str) -> str:
    """Name a target, or their mean."""
    return "mean of targets" if target == MACRO else target


@dataclass(frozen=True)
class Thresholds:
    """Thresholds by target, chosen on validation: Youden's, and that which reaches a sensitivity."""

    youden: Mapping[str, float | None]
    chosen: Mapping[str, float | None]
    sensitivity: float


@dataclass(frozen=True)
class MetricValue:
    """One metric of one target, or the mean over targets ("macro") that have it, with its bootstrap interval."""

    target: str
    metric: str
    estimate: Estimate
    delong: Estimate | None  # of the AUC of a target
    units: int  # with a label
    positives: int | None


def choose_thresholds(
    validation: Sequence[Prediction], targets: TargetKinds, unit: Unit, sensitivity: float = 0.9
) -> Thresholds:
    """Choose the thresholds of each target on validation predictions; None where they cannot say."""
    chosen: dict[str, TargetThresholds] = {}
    for target, kind in targets.items():
        units = units_of(validation, {target: kind}, unit)
        column = labelled_units(units, target, kind, unit)
        chosen[target] = kind.choose_thresholds(column.truth, column.logits, sensitivity)
    by_youden = {target: each.youden for target, each in chosen.items()}
    return Thresholds(by_youden, {target: each.chosen for target, each in chosen.items()}, sensitivity)


def compute_metrics(
    predictions: Sequence[Prediction],
    targets: TargetKinds,
    unit: Unit,
    thresholds: Thresholds | None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[MetricValue]:
    """Measure predictions: every metric of every target, then, with several targets, the macro means."""
    units = units_of(predictions, targets, unit)
    columns = [labelled_units(units, target, kind, unit) for target, kind in targets.items()]
    measured = []
    for column in columns:
        kind, at = column.kind, _thresholds_of(column.target, thresholds)
        # by its own labels: what else is predicted does not change the interval of a target
        draws = resample_patients(units, {column.target: kind}, resamples=resamples, seed=seed)
        value, drawn = kind.values(column.truth, column.logits, at), _draws_of([column], thresholds, draws)[0]
        positives, known = kind.count_labels(column.labels)
        for metric in kind.metrics:
            why = column.too_few
            if value[metric] is None:
                why = kind.why_missing(metric, column.target, column.labels, at, unit)
            estimate = interval(value[metric], drawn[metric], why=why)
            delong = _analytic_interval(metric, column, unit)
            measured.append(MetricValue(column.target, metric, estimate, delong, known, positives))
    if len(targets) > 1:
        draws = resample_patients(units, targets, resamples=resamples, seed=seed)
        together = _draws_of(columns, thresholds, draws)
        too_few = {column.target: column.too_few for column in columns}
        for metric in [name for name in columns[0].kind.metrics if all(name in each for each in together)]:
            of_targets = [each for each in measured if each.metric == metric]
            estimate = _macro(of_targets, [each[metric] for each in together], too_few)
            measured.append(MetricValue(MACRO, metric, estimate, None, len(units), None))
    return measured


def _draws_of(
    columns: Sequence[LabelledUnits], thresholds: Thresholds | None, resamples: Resamples
) -> list[dict[str, Floats]]:
    """Compute every metric of every target in every resample; NaN where there is none."""
    draws = [{metric: np.full(len(resamples), np.nan) for metric in column.kind.metrics} for column in columns]
    for rows, of_all_units in resamples.blocks():
        for column, drawn in zip(columns, draws, strict=True):
            weights, at = of_all_units[:, column.place], _thresholds_of(column.target, thresholds)
            for metric, values in column.kind.resampled_values(weights, column.truth, column.logits, at).items():
                drawn[metric][rows] = values
    return draws


def _thresholds_of(target: str, thresholds: Thresholds | None) -> TargetThresholds | None:
    """Return the thresholds of a target."""
    if thresholds is None:
        return None
    return TargetThresholds(thresholds.youden.get(target), thresholds.chosen.get(target))


def _analytic_interval(metric: str, column: LabelledUnits, unit: Unit) -> Estimate | None:
    """Estimate a metric by its formula, where it has one; gives the reason where it cannot be computed."""
    found = column.kind.analytic_interval(metric, column.truth, column.logits, unit=unit, clustered=column.clustered)
    if found is None or column.clustered or not column.why_undefined:
        return found
    return replace(found, why=column.why_undefined)


def _macro(measured: Sequence[MetricValue], draws: Sequence[Floats], too_few: Mapping[str, str]) -> Estimate:
    """Average a metric over the targets that have it, in each resample too; the others are named.

    too_few: why a target has no interval, by target; empty where it has one.
    """
    having = [place for place, each in enumerate(measured) if each.estimate.value is not None]
    lacking = [f"{each.target}: {each.estimate.why}" for each in measured if each.estimate.value is None]
    if not having:
        return Estimate(None, why="; ".join(lacking))
    value = sum(measured[place].estimate.value or 0.0 for place in having) / len(having)
    alone = [f"{target}: {too_few[target]}" for place in having if too_few[target := measured[place].target]]
    estimate = interval(value, np.mean([draws[place] for place in having], axis=0), why="; ".join(alone))
    notes = [f"without {each}" for each in lacking] + [estimate.why] * bool(estimate.why)
    return replace(estimate, why="; ".join(notes))


@dataclass(frozen=True)
class ChosenThresholds:
    """Thresholds, and a text on where they come from or why there are none."""

    thresholds: Thresholds | None
    where: str
    why_none_at_sensitivity: str = ""  # where that is not for want of slides
