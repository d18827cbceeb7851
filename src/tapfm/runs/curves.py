"""curves.png: loss and AUC by epoch."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.runtime.files import write_atomically

_TRAINING, _VALIDATION = "#4a6fa5", "#c8553d"


def draw_curves(path: Path, history: Sequence[Mapping[str, Any]], best_epoch: int | None, title: str) -> None:
    """Draw the losses and AUCs of a run; `best_epoch` counts from 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, auc = figure.subplots(1, 2)
    loss.plot(epochs, [row["loss_agg"] for row in history], color=_TRAINING, marker="o", ms=3, label="training")
    if any(row["val_loss"] is not None for row in history):
        _plot_known(loss, epochs, [row["val_loss"] for row in history], color=_VALIDATION, label="validation")
    loss.set_ylabel("L_agg, mean over slides")
    _plot_known(auc, epochs, [row["train_macro_auc"] for row in history], color=_TRAINING, label="training")
    targets = list(history[0]["val_auc"]) if history else []
    if len(targets) > 1:
        for target in targets:
            values = [row["val_auc"].get(target) for row in history]
            _plot_known(auc, epochs, values, color=_VALIDATION, label=None, alpha=0.35)
            if (last := values[-1]) is not None:
                auc.annotate(target, (epochs[-1], last), xytext=(4, 0), textcoords="offset points", fontsize=8)
    name = "validation, mean of targets" if len(targets) > 1 else "validation"
    _plot_known(auc, epochs, [row["val_macro_auc"] for row in history], color=_VALIDATION, label=name)
    auc.axhline(0.5, color="0.7", lw=1, ls=":")
    auc.set_ylim(0, 1.02)
    auc.set_ylabel("AUC")
    for axes in (loss, auc):
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        if best_epoch is not None:
            axes.axvline(best_epoch, color="0.6", lw=1, ls="--", label=f"kept: epoch {best_epoch}")
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    write_atomically(path, buffer.getvalue())


def _plot_known(axes: Any, epochs: Sequence[int], values: Sequence[float | None], **look: Any) -> None:
    """Draw a line through the values that there are."""
    known = [(epoch, value) for epoch, value in zip(epochs, values, strict=True) if value is not None]
    axes.plot([epoch for epoch, _ in known], [value for _, value in known], marker="o", ms=3, **look)
