"""Figures of a study: curves of all methods, and the losses of an ablation as they are and as logarithms."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.runtime.files import write_atomically
from tapfm.study.costs import title_of
from tapfm.study.fits import FittedMethod
from tapfm.study.results import StudyResults

_REGIME_COLOURS = {"fixed": "#8a8a8a", "finetune": "#4a6fa5", "tapfm": "#c8553d"}
_COLOURS = ("#4a6fa5", "#c8553d", "#5b8e4d", "#8a5aa0", "#b8860b", "#3b8686", "#7a7a7a", "#a0522d")
_MOST_NAMED = 14  # methods that get a line of the legend


def draw_methods(path: Path, results: StudyResults) -> None:
    """Draw validation AUC and training loss of every method, the mean over its runs."""
    figure, (auc, loss) = _axes_side_by_side(11, 4.5)
    many = len(results.methods) > _MOST_NAMED
    drawn: set[str] = set()
    for number, each in enumerate(results.methods):
        regime = each.method.regime
        colour = _REGIME_COLOURS[regime] if many else _COLOURS[number % len(_COLOURS)]
        name = regime if many else title_of(results, each)
        look: dict[str, Any] = {
            "color": colour,
            "lw": 1.2,
            "alpha": 0.6 if many else 0.9,
            "ls": "-" if many or number < len(_COLOURS) else "--",
        }
        histories = list(each.histories.values())
        for axes, key in ((auc, "val_macro_auc"), (loss, "loss_agg")):
            values = _means_by_epoch(histories, key)
            axes.plot(list(values), list(values.values()), label=None if name in drawn else name, **look)
        drawn.add(name)
    auc.set_ylabel("validation AUC")
    auc.set_ylim(0, 1.02)
    auc.axhline(0.5, color="0.7", lw=1, ls=":")
    loss.set_ylabel("training loss L_agg, mean over slides")
    loss.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(results.study.name, fontsize=11)
    _save(figure, path)


def draw_losses(path: Path, fitted: Sequence[FittedMethod], title: str, *, logarithms: bool) -> None:
    """Draw the losses of an ablation; as logarithms with the fitted lines."""
    figure, axes = _one_axes(6.4, 4.4)
    for number, each in enumerate(fitted):
        colour = _COLOURS[number % len(_COLOURS)]
        shown = {epoch: loss for epoch, loss in each.losses.items() if loss > 0 or not logarithms}
        values = [math.log(loss) if logarithms else loss for loss in shown.values()]
        name = each.variant
        of_fit = each.fit
        if logarithms and of_fit.a is not None and of_fit.b is not None:
            name += f": b = {of_fit.b:+.4f}"
            ends = [of_fit.epochs_used[0], of_fit.epochs_used[-1]]
            axes.plot(ends, [of_fit.a + of_fit.b * epoch for epoch in ends], color=colour, lw=1.4)
        style = {"ls": "none", "marker": "o", "ms": 3.5} if logarithms else {"marker": "o", "ms": 3, "lw": 1.2}
        axes.plot(list(shown), values, color=colour, label=name, **style)
    axes.set_ylabel("log of L_agg" if logarithms else "L_agg, mean over slides")
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _means_by_epoch(histories: Sequence[Sequence[Mapping[str, Any]]], key: str) -> dict[int, float]:
    """Average a number of each epoch over the runs that have it."""
    by_epoch: dict[int, list[float]] = {}
    for history in histories:
        for row in history:
            if row[key] is not None:
                by_epoch.setdefault(row["epoch"], []).append(row[key])
    return {epoch: sum(values) / len(values) for epoch, values in sorted(by_epoch.items())}


def _axes_side_by_side(width: float, height: float) -> tuple[Any, tuple[Any, Any]]:
    """Make a figure with two axes over epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        _dress(axes)
    return figure, (left, right)


def _one_axes(width: float, height: float) -> tuple[Any, Any]:
    """Make a figure with one pair of axes over epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    _dress(axes)
    return figure, axes


def _dress(axes: Any) -> None:
    """Make axes over epochs look as all of ours do."""
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    """Write a PNG that is the same each time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140, metadata={"Software": None})
    write_atomically(path, buffer.getvalue())
