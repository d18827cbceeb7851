"""Everything measured of predictions, with intervals: each metric of each target, and their mean over targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tapfm.evaluation.columns import SINGLE, LabelledUnits, labelled_units
from tapfm.evaluation.patients import resample_patients
from tapfm.evaluation.predictions import Prediction, Unit, units_of
from tapfm.metrics import weighted
from tapfm.metrics.arrays import Floats, sigmoid
from tapfm.metrics.bootstrap import RESAMPLES, Resamples, interval
from tapfm.metrics.calibration import brier, expected_calibration_error
from tapfm.metrics.delong import auc_interval
from tapfm.metrics.ranking import auc, average_precision
from tapfm.metrics.thresholds import at_sensitivity, rates, youden
from tapfm.results.estimate import Estimate

NAMES = {  # of every metric, for tables
    "auc": "AUC",
    "average_precision": "average precision",
    "brier": "Brier score",
    "ece": "calibration error (ECE)",
    "balanced_accuracy": "balanced accuracy",
    "f1": "F1",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ppv": "PPV",
    "npv": "NPV",
    "sensitivity_at_chosen": "sensitivity",
    "specificity_at_chosen": "specificity",
    "ppv_at_chosen": "PPV",
    "npv_at_chosen": "NPV",
}
METRICS = tuple(NAMES)
THRESHOLD_FREE = METRICS[:4]
BESIDE = THRESHOLD_FREE[:3]  # of subgroups, and of the model beside the baseline
AT_CHOSEN = "_at_chosen"
BY_CHOSEN = tuple(name for name in METRICS if name.endswith(AT_CHOSEN))
BY_YOUDEN = tuple(name for name in METRICS if name not in THRESHOLD_FREE and name not in BY_CHOSEN)
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
    validation: Sequence[Prediction], targets: Sequence[str], unit: Unit, sensitivity: float = 0.9
) -> Thresholds:
    """Choose the thresholds of each target on validation predictions; None where they cannot say."""
    by_youden: dict[str, float | None] = {}
    by_sensitivity: dict[str, float | None] = {}
    for target, units in ((target, units_of(validation, [target], unit)) for target in targets):
        labels = [each.labels.get(target) for each in units]
        probabilities = [sigmoid(each.logits[target]) for each in units]
        by_youden[target] = youden(labels, probabilities)
        by_sensitivity[target] = at_sensitivity(labels, probabilities, sensitivity)
    return Thresholds(by_youden, by_sensitivity, sensitivity)


def compute_metrics(
    predictions: Sequence[Prediction],
    targets: Sequence[str],
    unit: Unit,
    thresholds: Thresholds | None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[MetricValue]:
    """Measure predictions: every metric of every target, then, with several targets, the macro means.

    AUC and average precision rank logits, whose order does not drown in rounding; the rest takes probabilities.
    """
    units = units_of(predictions, targets, unit)
    columns = [labelled_units(units, target, unit) for target in targets]
    measured = []
    for column in columns:
        # by its own labels: what else is predicted does not change the interval of a target
        draws = resample_patients(units, [column.target], resamples=resamples, seed=seed)
        value, drawn = _values_of(column, thresholds), _draws_of([column], thresholds, draws)[0]
        for metric in METRICS:
            why = column.too_few if value[metric] is not None else _why_missing(metric, column, thresholds, unit)
            delong = _delong_of(column, unit) if metric == "auc" else None
            estimate = interval(value[metric], drawn[metric], why=why)
            positives = int(column.positive.sum())
            measured.append(MetricValue(column.target, metric, estimate, delong, len(column.place), positives))
    if len(targets) > 1:
        draws = resample_patients(units, targets, resamples=resamples, seed=seed)
        together = _draws_of(columns, thresholds, draws)
        for metric in METRICS:
            estimate = macro([each for each in measured if each.metric == metric], [each[metric] for each in together])
            measured.append(MetricValue(MACRO, metric, estimate, None, len(units), None))
    return measured


def _values_of(column: LabelledUnits, thresholds: Thresholds | None) -> dict[str, float | None]:
    """Compute every metric of one target."""
    labels, logits, probabilities = column.labels, column.logits.tolist(), column.probabilities.tolist()
    values: dict[str, float | None] = dict.fromkeys(METRICS)
    values["auc"] = auc(labels, logits)
    values["average_precision"] = average_precision(labels, logits)
    values["brier"] = brier(labels, probabilities)
    values["ece"] = expected_calibration_error(labels, probabilities)
    for ending, threshold in _thresholds_of(column.target, thresholds).items():
        if threshold is not None:
            found = asdict(rates(labels, probabilities, threshold))
            values |= {name + ending: rate for name, rate in found.items() if name + ending in METRICS}
    return values


def _draws_of(
    columns: Sequence[LabelledUnits], thresholds: Thresholds | None, resamples: Resamples
) -> list[dict[str, Floats]]:
    """Compute every metric of every target in every resample; NaN where there is none."""
    draws = [{metric: np.full(len(resamples), np.nan) for metric in METRICS} for _ in columns]
    for rows, of_all_units in resamples.blocks():
        for column, drawn in zip(columns, draws, strict=True):
            weights, positive = of_all_units[:, column.place], column.positive
            drawn["auc"][rows] = weighted.aucs(weights, positive, column.logits)
            drawn["average_precision"][rows] = weighted.average_precisions(weights, positive, column.logits)
            drawn["brier"][rows] = weighted.briers(weights, positive, column.probabilities)
            drawn["ece"][rows] = weighted.calibration_errors(weights, positive, column.probabilities)
            for ending, threshold in _thresholds_of(column.target, thresholds).items():
                if threshold is not None:
                    found = weighted.rates(weights, positive, column.probabilities, threshold)
                    for name in found:
                        if name + ending in METRICS:
                            drawn[name + ending][rows] = found[name]
    return draws


def _thresholds_of(target: str, thresholds: Thresholds | None) -> dict[str, float | None]:
    """Give the thresholds of a target, by the ending of the metrics that are measured there."""
    if thresholds is None:
        return {"": None, AT_CHOSEN: None}
    return {"": thresholds.youden.get(target), AT_CHOSEN: thresholds.chosen.get(target)}


def _why_missing(metric: str, column: LabelledUnits, thresholds: Thresholds | None, unit: Unit) -> str:
    """Say why a metric of a target has no value."""
    if not len(column.place) or metric in THRESHOLD_FREE:
        return column.why_undefined
    if thresholds is None:
        return "no threshold: no validation predictions"
    ending = AT_CHOSEN if metric.endswith(AT_CHOSEN) else ""
    if _thresholds_of(column.target, thresholds)[ending] is None:
        absent = "no positive" if ending else "not both classes"
        return f"no threshold: {absent} of {column.target} in validation"
    calls = {"ppv": "positive", "npv": "negative"}.get(metric.removesuffix(AT_CHOSEN))
    return f"no {unit} is called {calls}" if calls else column.why_undefined


def _delong_of(column: LabelledUnits, unit: Unit) -> Estimate:
    """Estimate the AUC by DeLong's method, which takes units to be independent."""
    if column.clustered:
        value = auc(column.labels, column.logits.tolist())
        return Estimate(value, why="DeLong needs independent units: some patients have several slides")
    estimate = auc_interval(column.labels, column.logits.tolist())
    return replace(estimate, why=column.why_undefined or estimate.why.replace("unit", unit))


def macro(measured: Sequence[MetricValue], draws: Sequence[Floats]) -> Estimate:
    """Average a metric over the targets that have it, in each resample too; the others are named."""
    having = [place for place, each in enumerate(measured) if each.estimate.value is not None]
    lacking = [f"{each.target}: {each.estimate.why}" for each in measured if each.estimate.value is None]
    if not having:
        return Estimate(None, why="; ".join(lacking))
    value = sum(measured[place].estimate.value or 0.0 for place in having) / len(having)
    alone = [f"{measured[place].target}: {measured[place].estimate.why}" for place in having if _fixed(measured[place])]
    estimate = interval(value, np.mean([draws[place] for place in having], axis=0), why="; ".join(alone))
    notes = [f"without {each}" for each in lacking] + [estimate.why] * bool(estimate.why)
    return replace(estimate, why="; ".join(notes))


def _fixed(measured: MetricValue) -> bool:
    """Tell whether a class of a single patient kept a target from having an interval."""
    return measured.estimate.why.startswith(SINGLE)


@dataclass(frozen=True)
class ChosenThresholds:
    """Thresholds, and a text on where they come from or why there are none."""

    thresholds: Thresholds | None
    where: str
    why_none_at_sensitivity: str = ""  # where that is not for want of slides
