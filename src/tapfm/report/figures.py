"""The charts of a report, from predictions and from what epochs came to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tapfm.evaluation.bands import roc_band
from tapfm.evaluation.predictions import Prediction, units_of
from tapfm.metrics.arrays import Floats
from tapfm.metrics.calibration import reliability
from tapfm.metrics.ranking import precision_recall_curve, roc_curve
from tapfm.report.charts import Axis, Band, Bar, Chart, ChartMark, Dot, Line, Point, Rule, axis_of, draw, share_axis
from tapfm.report.content import Figure, Figures, LegendEntry
from tapfm.report.numbers import format_interval, format_number
from tapfm.report.result import SplitResult
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import Truth

_BINS = 20  # of the histogram
_CHANCE = Line("chance", [(0.0, 0.0), (1.0, 1.0)])
History = Sequence[Mapping[str, Any]]


def result_figures(result: SplitResult, target: str) -> Figures:
    """Draw ROC, precision and recall, calibration and scores of one target."""
    targets = target_kinds([target])
    units = units_of(result.predictions, targets, result.unit)
    if why := targets[target].why_undefined([each.labels.get(target) for each in units], result.unit):
        return Figures([Figure(name, why=why) for name in ("ROC", "Precision and recall", "Calibration")], title=target)
    baseline = units_of(result.baseline, targets, result.unit) if result.baseline else []
    drawn = (
        _roc(result, target, units, baseline),
        _precision_recall(result, target, units, baseline),
        _calibration(result, target, units),
        _scores(result, target, units),
    )
    return Figures(drawn, title=target if len(result.targets) > 1 else "")


def _roc(result: SplitResult, target: str, units: Sequence[Prediction], baseline: Sequence[Prediction]) -> Figure:
    """Draw sensitivity against 1 - specificity, with the band of resampled patients."""
    marks: list[ChartMark] = []
    keys = [LegendEntry("line model", f"AUC {_measure_text(result, target, 'auc')}")]
    kind = target_kinds([target])[target]
    band = roc_band(result.predictions, target, kind, result.unit, resamples=result.resamples, seed=result.seed)
    if band is not None:
        marks.append(Band("model", list(band.false_positive_rate), list(band.low), list(band.high)))
        keys.append(LegendEntry("band model", "95% of resampled patients"))
    marks.append(_CHANCE)
    if baseline and (curve := roc_curve(*_column(baseline, target))) is not None:
        marks.append(Line("baseline", _pairs(curve[0], curve[1])))
        keys.append(LegendEntry("line baseline", "colours and tile count"))
    curve = roc_curve(*_column(units, target))
    assert curve is not None
    marks.append(Line("model", _pairs(curve[0], curve[1])))
    said = f"ROC curve of {target}: {keys[0].name}"
    chart = Chart(said, share_axis("1 − specificity"), share_axis("sensitivity"), marks)
    return Figure("ROC", draw(chart), keys)


def _precision_recall(
    result: SplitResult, target: str, units: Sequence[Prediction], baseline: Sequence[Prediction]
) -> Figure:
    """Draw PPV against sensitivity, and the prevalence, which chance would give."""
    prevalence = float(_column(units, target)[0].mean())
    marks: list[ChartMark] = [Line("chance", [(0.0, prevalence), (1.0, prevalence)])]
    keys = [LegendEntry("line model", f"average precision {_measure_text(result, target, 'average_precision')}")]
    keys.append(LegendEntry("line chance", f"prevalence {prevalence:.0%}"))
    if baseline and (curve := precision_recall_curve(*_column(baseline, target))) is not None:
        marks.append(Line("baseline", _pairs(curve[1], curve[0])[::-1], steps=True))
        keys.append(LegendEntry("line baseline", "colours and tile count"))
    curve = precision_recall_curve(*_column(units, target))
    assert curve is not None
    marks.append(Line("model", _pairs(curve[1], curve[0])[::-1], steps=True))
    chart = Chart(f"Precision and recall of {target}", share_axis("sensitivity"), share_axis("PPV"), marks)
    return Figure("Precision and recall", draw(chart), keys)


def _calibration(result: SplitResult, target: str, units: Sequence[Prediction]) -> Figure:
    """Draw observed rates against mean probabilities, with the number in each bin."""
    bins = [each for each in reliability(*_probabilities(units, target)) if each.count]
    most = max(each.count for each in bins)
    points = [(each.mean_probability or 0.0, each.positive_rate or 0.0) for each in bins]
    marks: list[ChartMark] = [_CHANCE, Line("model faint", points)]
    marks += [
        Dot("model", x, y, 2.5 + 4 * (each.count / most) ** 0.5, f"{each.count:,}")
        for (x, y), each in zip(points, bins, strict=True)
    ]
    keys = [LegendEntry("line model", f"calibration error {_measure_text(result, target, 'ece')}")]
    chart = Chart(
        f"Calibration of {target}", share_axis("mean probability"), share_axis("observed rate of positives"), marks
    )
    return Figure("Calibration", draw(chart), keys, f"Numbers are {result.unit}s in a bin of equal width.")


def _scores(result: SplitResult, target: str, units: Sequence[Prediction]) -> Figure:
    """Draw how many positives and negatives have which probability."""
    edges = np.linspace(0, 1, _BINS + 1)
    counts, keys = {}, []
    positive, probabilities = _probabilities(units, target)
    for flag, style, name in ((False, "negative", "negative"), (True, "positive", "positive")):
        values = probabilities[positive == flag]
        counts[style] = np.histogram(values, edges)[0]
        keys.append(LegendEntry(f"bar {style}", f"{name} ({len(values):,})"))
    marks: list[ChartMark] = []
    for place, (low, high) in enumerate(itertools.pairwise(edges)):  # one on the other: neither hides
        below, above = (float(counts[style][place]) for style in ("negative", "positive"))
        if below:
            marks.append(Bar("negative", low, high, below))
        if above:
            marks.append(Bar("positive", low, high, below + above, below))
    if (threshold := result.youden.get(target)) is not None:
        marks.append(Rule("threshold", threshold, format_number(threshold)))
        keys.append(LegendEntry("rule threshold", "threshold, chosen on validation"))
    top = float(max(counts["negative"] + counts["positive"]))
    y = axis_of(f"{result.unit}s", [0.0, top * 1.15], whole=True)
    chart = Chart(f"Probabilities of positive and negative {result.unit}s", share_axis("probability"), y, marks)
    return Figure("Probabilities", draw(chart), keys)


def _column(units: Sequence[Prediction], target: str) -> tuple[Truth, Floats]:
    """Take the known labels and their logits of one target."""
    labels, logits = [each.labels.get(target) for each in units], [each.logits[target] for each in units]
    return target_kinds([target])[target].known(labels, logits)


def _probabilities(units: Sequence[Prediction], target: str) -> tuple[Truth, Floats]:
    """Take the known labels and their probabilities of one target."""
    positive, logits = _column(units, target)
    return positive, np.array([target_kinds([target])[target].activate(logit) for logit in logits.tolist()])


def _pairs(x: Any, y: Any) -> list[Point]:
    """Make points of two arrays."""
    return [(float(a), float(b)) for a, b in zip(x, y, strict=True)]


def _measure_text(result: SplitResult, target: str, metric: str) -> str:
    """Write a metric and its interval for a legend."""
    found = result.measured.get((target, metric))
    if found is None:
        return ""
    estimate = found.estimate
    within = f" ({format_interval(estimate)})" if format_interval(estimate) else ""
    return format_number(estimate.value) + within


def training_figures(history: History, best_epoch: int | None) -> Figures:
    """Draw losses and AUCs by epoch; the epoch that was kept is marked."""
    kept: list[ChartMark] = [] if best_epoch is None else [Rule("kept", best_epoch, f"epoch {best_epoch} kept")]
    figures = [
        _epochs_figure(
            "Loss of the aggregator",
            "loss",
            history,
            {"training": _by("loss_agg"), "validation": _by("val_loss")},
            kept,
        ),
        _epochs_figure(
            "AUC",
            "AUC",
            history,
            {"training": _by("train_macro_auc"), "validation": _by("val_macro_auc")},
            kept,
            y=share_axis("AUC"),
        ),
        _epochs_figure("Loss of the encoder", "loss", history, {"training": _by("loss_pfm")}, kept),
    ]
    return Figures([figure for figure in figures if figure is not None])


def _by(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Take a number of an epoch; None where it has none."""
    return lambda row: None if row.get(name) is None or not math.isfinite(row[name]) else float(row[name])


def _epochs_figure(
    title: str,
    unit: str,
    history: History,
    series: Mapping[str, Callable[[Mapping[str, Any]], float | None]],
    below: Sequence[ChartMark],
    y: Axis | None = None,
) -> Figure | None:
    """Draw numbers by epoch; nothing where no epoch has any."""
    lines = {
        name: [(float(row["epoch"]), value) for row in history if (value := of(row)) is not None]
        for name, of in series.items()
    }
    lines = {name: points for name, points in lines.items() if points}
    values = [value for points in lines.values() for _, value in points]
    if not values or (title == "Loss of the encoder" and not any(values)):  # a fixed encoder has none
        return None
    epochs = axis_of("epoch", [float(row["epoch"]) for row in history], whole=True)
    marks = [*below, *(Line(name, points) for name, points in lines.items())]
    chart = Chart(f"{title} by epoch", epochs, y or axis_of(unit, values), marks)
    return Figure(title, draw(chart), [LegendEntry(f"line {name}", name) for name in lines])


def methods_figures(methods: Sequence[tuple[str, str, Sequence[History]]]) -> Figures:
    """Draw validation AUC and training loss of methods: (title, regime, histories of its runs), means over runs."""
    figures = []
    for title, unit, name in (("Validation AUC", "AUC", "val_macro_auc"), ("Training loss", "loss", "loss_agg")):
        lines = [(regime, _means_by_epoch(histories, name)) for _, regime, histories in methods]
        values = [value for _, points in lines for _, value in points]
        if not values:
            continue
        epochs = axis_of("epoch", [epoch for _, points in lines for epoch, _ in points], whole=True)
        y = share_axis(unit) if name == "val_macro_auc" else axis_of(unit, values)
        marks = [Line(f"regime-{regime}", points) for regime, points in lines if points]
        keys = [LegendEntry(f"line regime-{regime}", regime) for regime in dict.fromkeys(regime for regime, _ in lines)]
        figures.append(Figure(title, draw(Chart(f"{title} of all methods by epoch", epochs, y, marks)), keys))
    return Figures(figures)


def _means_by_epoch(histories: Sequence[History], name: str) -> list[Point]:
    """Average a number of each epoch over the runs that have it."""
    of_epoch: dict[float, list[float]] = {}
    for history in histories:
        for row in history:
            if (value := _by(name)(row)) is not None:
                of_epoch.setdefault(float(row["epoch"]), []).append(value)
    return [(epoch, sum(values) / len(values)) for epoch, values in sorted(of_epoch.items())]
