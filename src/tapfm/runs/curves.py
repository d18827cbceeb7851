"""Figures of training: loss and AUC by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tapfm.results.figure import Axis, Colour, Figure, Line, Mark, Panel, Rule

History = Sequence[Mapping[str, Any]]  # the lines of history.jsonl
_EPOCH_AXIS = Axis("epoch", integer=True)
_AUC_AXIS = Axis("AUC", 0.0, 1.02)


def training_figure(history: History, best_epoch: int | None, title: str) -> Figure:
    """Return losses and AUCs by epoch; `best_epoch`, which counts from 1, is the epoch that was kept."""
    targets = list(history[0].get("val_auc") or {}) if history else []
    aucs = _curve(history, "train_macro_auc", "other", "training")
    aucs += _curve(history, "val_macro_auc", "model", "validation" + (", mean of targets" if len(targets) > 1 else ""))
    if len(targets) > 1:
        aucs = [line for target in targets for line in _curve(history, "val_auc", "model", target=target)] + aucs
    losses = _curve(history, "loss_agg", "other", "training") + _curve(history, "val_loss", "model", "validation")
    # a fixed encoder has no loss
    of_encoder = _curve(history, "loss_pfm", "other", "training") if any(row.get("loss_pfm") for row in history) else []
    kept: list[Mark] = [] if best_epoch is None else [Rule(best_epoch, f"epoch {best_epoch}, which was kept")]
    chance = Rule(0.5, dash="dotted", horizontal=True)
    panels = [
        Panel("Loss of the aggregator", _EPOCH_AXIS, Axis("L_agg, mean over slides"), [*kept, *losses]),
        Panel("AUC", _EPOCH_AXIS, _AUC_AXIS, [chance, *kept, *aucs]),
        Panel("Loss of the encoder", _EPOCH_AXIS, Axis("L_PFM, mean over slides"), [*kept, *of_encoder]),
    ]
    drawn = [panel for panel, lines in zip(panels, (losses, aucs, of_encoder), strict=True) if lines]
    return Figure(title, drawn)


def _curve(history: History, key: str, colour: Colour, label: str = "", target: str | None = None) -> list[Line]:
    """Return the line of a number of each epoch, or of one target of it; nothing if no epoch has it."""
    values = {row["epoch"]: row.get(key) if target is None else row[key].get(target) for row in history}
    known = {epoch: value for epoch, value in values.items() if value is not None and math.isfinite(value)}
    faint = target is not None
    return [Line(list(known), list(known.values()), colour, label, markers=not faint, faint=faint)] if known else []
