"""Everything measured of predictions, with intervals: each metric of each target, and their mean over targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapfm.evaluation.labelled_units import LabelledUnits, select_labelled_units
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction, Unit, pool_by_unit
from tapfm.metrics.arrays import Floats
from tapfm.metrics.bootstrap import RESAMPLES, Resamples, percentile_interval
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
    at_sensitivity: Mapping[str, float | None]
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
        units = pool_by_unit(validation, {target: kind}, unit)
        column = select_labelled_units(units, target, kind, unit)
        chosen[target] = kind.choose_thresholds(column.truth, column.logits, sensitivity)
    by_youden = {target: each.youden for target, each in chosen.items()}
    return Thresholds(by_youden, {target: each.at_sensitivity for target, each in chosen.items()}, sensitivity)


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
    units = pool_by_unit(predictions, targets, unit)
    columns = [select_labelled_units(units, target, kind, unit) for target, kind in targets.items()]
    measured = []
    for column in columns:
        kind, at = column.kind, _thresholds_of(column.target, thresholds)
        # by its own labels: what else is predicted does not change the interval of a target
        draws = resample_patients(units, {column.target: kind}, resamples=resamples, seed=seed)
        value, drawn = kind.compute_metrics(column.truth, column.logits, at), _draws_of([column], thresholds, draws)[0]
        positives, known = kind.count_labels(column.labels)
        for metric in kind.metrics:
            reason = column.no_interval_reason
            if value[metric] is None:
                reason = kind.explain_missing_metric(metric, column.target, column.labels, at, unit)
            estimate = percentile_interval(value[metric], drawn[metric], reason=reason)
            delong = _analytic_interval(metric, column, unit)
            measured.append(MetricValue(column.target, metric, estimate, delong, known, positives))
    if len(targets) > 1:
        draws = resample_patients(units, targets, resamples=resamples, seed=seed)
        together = _draws_of(columns, thresholds, draws)
        too_few = {column.target: column.no_interval_reason for column in columns}
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
            for metric, values in column.kind.compute_resampled_metrics(
                weights, column.truth, column.logits, at
            ).items():
                drawn[metric][rows] = values
    return draws


def _thresholds_of(target: str, thresholds: Thresholds | None) -> TargetThresholds | None:
    """Return the thresholds of a target."""
    if thresholds is None:
        return None
    return TargetThresholds(thresholds.youden.get(target), thresholds.at_sensitivity.get(target))


def _analytic_interval(metric: str, column: LabelledUnits, unit: Unit) -> Estimate | None:
    """Estimate a metric by its formula, where it has one; gives the reason where it cannot be computed."""
    found = column.kind.compute_analytic_interval(
        metric, column.truth, column.logits, unit=unit, clustered=column.clustered
    )
    if found is None or column.clustered or not column.undefined_reason:
        return found
    return replace(found, reason=column.undefined_reason)


def _macro(measured: Sequence[MetricValue], draws: Sequence[Floats], too_few: Mapping[str, str]) -> Estimate:
    """Average a metric over the targets that have it, in each resample too; the others are named.

    too_few: why a target has no interval, by target; empty where it has one.
    """
    having = [place for place, each in enumerate(measured) if each.estimate.value is not None]
    lacking = [f"{each.target}: {each.estimate.reason}" for each in measured if each.estimate.value is None]
    if not having:
        return Estimate(None, reason="; ".join(lacking))
    value = sum(measured[place].estimate.value or 0.0 for place in having) / len(having)
    alone = [f"{target}: {too_few[target]}" for place in having if too_few[target := measured[place].target]]
    estimate = percentile_interval(value, np.mean([draws[place] for place in having], axis=0), reason="; ".join(alone))
    notes = [f"without {each}" for each in lacking] + [estimate.reason] * bool(estimate.reason)
    return replace(estimate, reason="; ".join(notes))


@dataclass(frozen=True)
class ChosenThresholds:
    """Thresholds, and a text on where they come from or why there are none."""

    thresholds: Thresholds | None
    source: str
    missing_reason: str = ""  # where that is not for want of slides
