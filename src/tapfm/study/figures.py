"""Figures of a study: curves and ROC of all methods, and the losses of an ablation with their fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tapfm.evaluation.predictions import pool_by_unit
from tapfm.results.figure import SERIES, Axis, Colour, Dash, Figure, Line, Mark, Panel, Points, Rule
from tapfm.study.ablation import FittedMethod
from tapfm.study.comparison import BASELINE_TITLE, COHORT_TITLES
from tapfm.study.results import COHORTS, StudyResults, means_by_epoch
from tapfm.tasks.catalog import target_kinds

_REGIME_COLOURS: dict[str, Colour] = {"fixed": "grey", "finetune": "other", "tapfm": "model"}
_DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted")
_MAX_NAMED = 14  # methods that have a style of their own; if there are more, regimes have
_EPOCHS = Axis("epoch", integer=True)


def curves_figure(results: StudyResults) -> Figure:
    """Return validation AUC and training loss of every method by epoch, means over its runs."""
    panels = []
    for key, title, axis in (
        ("val_macro_auc", "Validation AUC", Axis("AUC", 0, 1.02)),
        ("loss_agg", "Training loss", Axis("L_agg, mean over slides")),
    ):
        lines = []
        for number, each in enumerate(results.methods):
            line = _epoch_line(means_by_epoch(each.histories.values(), key), each.method.full_title)
            lines.append(_styled(line, number, each.method.regime, len(results.methods)))
        chance = [Rule(0.5, dash="dotted", horizontal=True)] if key == "val_macro_auc" else []
        panels.append(Panel(title, _EPOCHS, axis, [*chance, *_label_once(lines)]))
    return Figure("Validation AUC and training loss", panels, panel_width_in=5.0)


def roc_figure(results: StudyResults) -> Figure | None:
    """Return the ROC curves of all methods for each cohort and target, from the first seed; None without any."""
    study, panels = results.study, []
    methods = {each.method.row: each.method for each in results.methods}
    for target, kind in target_kinds(study.targets).items():
        for cohort in COHORTS:
            lines, undefined_reason = [], ""
            for row, seeds in results.predictions(cohort, target).items():
                units = pool_by_unit(seeds[0], {target: kind}, study.unit)
                labels, logits = [each.labels.get(target) for each in units], [each.logits[target] for each in units]
                line = kind.build_curve(*kind.select_labelled(labels, logits))
                if line is None:
                    undefined_reason = kind.explain_undefined(labels, study.unit)
                elif row in methods:
                    named = replace(line, label=methods[row].title)
                    lines.append(_styled(named, list(methods).index(row), methods[row].regime, len(methods)))
                else:
                    lines.append(replace(line, colour="grey", label=BASELINE_TITLE, dash="dotted"))
            if lines or undefined_reason:
                panel = kind.build_curve_panel(f"{target}, {COHORT_TITLES[cohort]}", _label_once(lines))
                panels.append(panel if lines else replace(panel, why_empty=undefined_reason))
    return Figure("ROC curves", panels, "From the first seed of each method.") if panels else None


def losses_figure(fitted: Sequence[FittedMethod]) -> Figure:
    """Return the training losses of an ablation."""
    lines = [
        replace(_epoch_line(each.losses, each.variant), colour=SERIES[number % len(SERIES)], markers=True)
        for number, each in enumerate(fitted)
    ]
    panel = Panel("", _EPOCHS, Axis("L_agg, mean over slides"), lines)
    return Figure("Training loss", [panel], panel_width_in=6.0)


def log_losses_figure(fitted: Sequence[FittedMethod]) -> Figure:
    """Return the logarithms of the training losses, with the fitted lines."""
    marks: list[Mark] = []
    for number, each in enumerate(fitted):
        colour, of_fit, label = SERIES[number % len(SERIES)], each.fit, each.variant
        logs = {epoch: math.log(loss) for epoch, loss in each.losses.items() if loss > 0 and math.isfinite(loss)}
        if of_fit.a is not None and of_fit.b is not None:
            ends = [of_fit.epochs_used[0], of_fit.epochs_used[-1]]
            marks.append(Line(ends, [of_fit.a + of_fit.b * epoch for epoch in ends], colour))
            label += f": b = {of_fit.b:+.4f}"
        marks.append(Points(list(logs), list(logs.values()), colour, label))
    panel = Panel("", _EPOCHS, Axis("log of L_agg"), marks)
    return Figure("Logarithm of the training loss", [panel], "Lines: log L = a + b k.", panel_width_in=6.0)


def _epoch_line(values: Mapping[int, float], label: str) -> Line:
    """Return a line through the epochs that have a finite value."""
    finite = {epoch: value for epoch, value in values.items() if math.isfinite(value)}
    return Line(list(finite), list(finite.values()), label=label)


def _styled(line: Line, number: int, regime: str, count: int) -> Line:
    """Give the line of a method its colour and dash; of many methods, those of its regime and its name."""
    if count > _MAX_NAMED:
        return replace(line, colour=_REGIME_COLOURS[regime], label=regime, faint=True)
    dash = _DASHES[number // len(SERIES) % len(_DASHES)]
    return replace(line, colour=SERIES[number % len(SERIES)], dash=dash)


def _label_once(lines: Sequence[Line]) -> list[Line]:
    """Keep the first of equal labels."""
    labels = [line.label for line in lines]
    return [replace(line, label="") if line.label in labels[:i] else line for i, line in enumerate(lines)]
