"""Figure of the training curves: loss and AUC by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tapfm.results.figure import Axis, Colour, Figure, Line, Mark, Panel, ReferenceLine

History = Sequence[Mapping[str, Any]]  # the rows of history.jsonl
_EPOCH_AXIS = Axis("epoch", integer=True)
_AUC_AXIS = Axis("AUC", 0.0, 1.02)


def build_training_figure(history: History, best_epoch: int | None, title: str) -> Figure:
    """Return the figure of losses and AUCs by epoch; `best_epoch` is the selected epoch, counted from 1."""
    targets = list(history[0].get("val_auc") or {}) if history else []
    aucs = _curve(history, "train_macro_auc", "secondary", "training")
    aucs += _curve(
        history, "val_macro_auc", "primary", "validation" + (", mean of targets" if len(targets) > 1 else "")
    )
    if len(targets) > 1:
        aucs = [line for target in targets for line in _curve(history, "val_auc", "primary", target=target)] + aucs
    losses = _curve(history, "loss_agg", "secondary", "training") + _curve(history, "val_loss", "primary", "validation")
    # runs with a fixed encoder have no encoder loss
    encoder_losses = (
        _curve(history, "loss_pfm", "secondary", "training") if any(row.get("loss_pfm") for row in history) else []
    )
    selected: list[Mark] = [] if best_epoch is None else [ReferenceLine(best_epoch, f"selected epoch ({best_epoch})")]
    chance = ReferenceLine(0.5, dash="dotted", horizontal=True)
    panels = [
        Panel("Aggregator loss", _EPOCH_AXIS, Axis("L_agg, mean over slides"), [*selected, *losses]),
        Panel("AUC", _EPOCH_AXIS, _AUC_AXIS, [chance, *selected, *aucs]),
        Panel("Encoder loss", _EPOCH_AXIS, Axis("L_PFM, mean over slides"), [*selected, *encoder_losses]),
    ]
    with_data = [panel for panel, lines in zip(panels, (losses, aucs, encoder_losses), strict=True) if lines]
    return Figure(title, with_data)


def _curve(history: History, key: str, colour: Colour, label: str = "", target: str | None = None) -> list[Line]:
    """Return the curve of a column of the history, for one target if given; an empty list if no epoch has a value."""
    values = {row["epoch"]: row.get(key) if target is None else row[key].get(target) for row in history}
    known = {epoch: value for epoch, value in values.items() if value is not None and math.isfinite(value)}
    faint = target is not None
    return [Line(list(known), list(known.values()), colour, label, markers=not faint, faint=faint)] if known else []
