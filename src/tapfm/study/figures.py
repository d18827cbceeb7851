"""Figures of a study: training curves and ROC curves of all models, and losses of an ablation with their fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tapfm.evaluation.predictions import pool_by_unit
from tapfm.results.figure import SERIES, Axis, Colour, Dash, Figure, Line, Mark, Panel, Points, ReferenceLine
from tapfm.study.ablation import ModelFit
from tapfm.study.comparison import BASELINE_TITLE, COHORT_TITLES
from tapfm.study.results import COHORTS, StudyResults, average_by_epoch

_METHOD_COLOURS: dict[str, Colour] = {"fixed": "grey", "finetune": "secondary", "tapfm": "primary"}
_DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted")
_MAX_LABELLED_MODELS = 14  # with more models, only methods have their own colour and label
_EPOCHS = Axis("epoch", integer=True)


def curves_figure(results: StudyResults) -> Figure:
    """Return the validation AUC and training loss of every model by epoch, averaged over its runs."""
    panels = []
    for key, title, axis in (
        ("val_macro_auc", "Validation AUC", Axis("AUC", 0, 1.02)),
        ("loss_agg", "Training loss", Axis("L_agg, mean over slides")),
    ):
        lines = []
        for number, each in enumerate(results.models):
            line = _epoch_line(average_by_epoch(each.histories.values(), key), each.model.full_title)
            lines.append(_style_line(line, number, each.model.method, len(results.models)))
        chance = [ReferenceLine(0.5, dash="dotted", horizontal=True)] if key == "val_macro_auc" else []
        panels.append(Panel(title, _EPOCHS, axis, [*chance, *_remove_repeated_labels(lines)]))
    return Figure("Validation AUC and training loss", panels, panel_width_in=5.0)


def roc_figure(results: StudyResults) -> Figure | None:
    """Return the ROC curves of the first seed of each model by cohort and target, or None without predictions."""
    study, panels = results.study, []
    models = {each.model.row_key: each.model for each in results.models}
    for target, kind in study.target_kinds.items():
        for cohort in COHORTS:
            lines, undefined_reason = [], ""
            for row, seeds in results.predictions(cohort, target).items():
                units = pool_by_unit(seeds[0], {target: kind}, study.unit)
                labels, logits = [each.labels.get(target) for each in units], [each.logits[target] for each in units]
                line = kind.build_curve(*kind.select_labelled(labels, logits))
                if line is None:
                    undefined_reason = kind.explain_undefined(labels, study.unit)
                elif row in models:
                    labelled = replace(line, label=models[row].title)
                    lines.append(_style_line(labelled, list(models).index(row), models[row].method, len(models)))
                else:
                    lines.append(replace(line, colour="grey", label=BASELINE_TITLE, dash="dotted"))
            if lines or undefined_reason:
                panel = kind.build_curve_panel(f"{target}, {COHORT_TITLES[cohort]}", _remove_repeated_labels(lines))
                panels.append(panel if lines else replace(panel, why_empty=undefined_reason))
    return Figure("ROC curves", panels, "From the first seed of each model.") if panels else None


def losses_figure(fits: Sequence[ModelFit]) -> Figure:
    lines = [
        replace(_epoch_line(each.losses, each.variant), colour=SERIES[number % len(SERIES)], markers=True)
        for number, each in enumerate(fits)
    ]
    panel = Panel("", _EPOCHS, Axis("L_agg, mean over slides"), lines)
    return Figure("Training loss", [panel], panel_width_in=6.0)


def log_losses_figure(fits: Sequence[ModelFit]) -> Figure:
    """Return the logarithms of the training losses, with the fitted lines."""
    marks: list[Mark] = []
    for number, each in enumerate(fits):
        colour, fit, label = SERIES[number % len(SERIES)], each.fit, each.variant
        logs = {epoch: math.log(loss) for epoch, loss in each.losses.items() if loss > 0 and math.isfinite(loss)}
        if fit.a is not None and fit.b is not None:
            ends = [fit.epochs_used[0], fit.epochs_used[-1]]
            marks.append(Line(ends, [fit.a + fit.b * epoch for epoch in ends], colour))
            label += f": b = {fit.b:+.4f}"
        marks.append(Points(list(logs), list(logs.values()), colour, label))
    panel = Panel("", _EPOCHS, Axis("log of L_agg"), marks)
    return Figure(
        "Logarithm of the training loss", [panel], "Lines: fit of log L = a + b k over epochs k.", panel_width_in=6.0
    )


def _epoch_line(values: Mapping[int, float], label: str) -> Line:
    """Return a line through the epochs that have a finite value."""
    finite = {epoch: value for epoch, value in values.items() if math.isfinite(value)}
    return Line(list(finite), list(finite.values()), label=label)


def _style_line(line: Line, model_index: int, method: str, model_count: int) -> Line:
    """Return the line in the style of its model or, if there are many models, in the colour of its method."""
    if model_count > _MAX_LABELLED_MODELS:
        return replace(line, colour=_METHOD_COLOURS[method], label=method, faint=True)
    dash = _DASHES[model_index // len(SERIES) % len(_DASHES)]
    return replace(line, colour=SERIES[model_index % len(SERIES)], dash=dash)


def _remove_repeated_labels(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with repeated labels removed, for the legend."""
    labels = [line.label for line in lines]
    return [replace(line, label="") if line.label in labels[:i] else line for i, line in enumerate(lines)]
