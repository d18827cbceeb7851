"""roc.png, pr.png, reliability.png and scores.png: one panel for each target."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tapfm.evaluation.bands import roc_band
from tapfm.evaluation.measures import MetricValue, Thresholds
from tapfm.evaluation.predictions import Prediction, Unit, units_of
from tapfm.metrics.arrays import Floats
from tapfm.metrics.calibration import reliability
from tapfm.metrics.ranking import precision_recall_curve, roc_curve
from tapfm.runtime.files import write_atomically
from tapfm.tasks.target import TargetKinds, Truth

_MODEL, _BASELINE, _NEGATIVE, _GREY = "#c8553d", "#8a8a8a", "#4a6fa5", "0.7"
_PANEL = 3.9  # inches
_BINS = 20  # of the histogram


class EvaluationFigures:
    """Draws what was predicted; `baseline` may be nothing."""

    def __init__(
        self,
        predictions: Sequence[Prediction],
        baseline: Sequence[Prediction],
        targets: TargetKinds,
        unit: Unit,
        title: str,
    ) -> None:
        self._slides = predictions
        self._units, self._baseline = (units_of(each, targets, unit) for each in (predictions, baseline))
        self._targets, self._unit, self._title = targets, unit, title

    def draw(
        self,
        folder: Path,
        measured: dict[tuple[str, str], MetricValue],
        thresholds: Thresholds | None,
        *,
        resamples: int,
        seed: int,
    ) -> None:
        """Draw all four."""
        self._save(
            folder / "roc.png", lambda axes, target: self._roc(axes, target, measured, resamples=resamples, seed=seed)
        )
        self._save(folder / "pr.png", lambda axes, target: self._precision_recall(axes, target, measured))
        self._save(folder / "reliability.png", lambda axes, target: self._reliability(axes, target, measured))
        self._save(folder / "scores.png", lambda axes, target: self._scores(axes, target, thresholds))

    def _save(self, path: Path, panel: Callable[[Any, str], None]) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        across = min(len(self._targets), 4)
        down = -(-len(self._targets) // across)
        figure = Figure(figsize=(max(_PANEL * across, 4.6), _PANEL * down + 0.3), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for axes, target in zip(panels, self._targets, strict=False):
            axes.set_title(target, fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
            if why := self._targets[target].why_undefined(
                [each.labels.get(target) for each in self._units], self._unit
            ):
                axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, fontsize=9)
                axes.set_axis_off()
                continue
            panel(axes, target)
        for axes in panels[len(self._targets) :]:
            axes.set_visible(False)
        figure.suptitle(self._title, fontsize=10)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=140, metadata={"Software": None})  # the same picture, byte for byte
        write_atomically(path, buffer.getvalue())

    def _column(self, target: str, units: Sequence[Prediction]) -> tuple[Truth, Floats]:
        labels, logits = [each.labels.get(target) for each in units], [each.logits[target] for each in units]
        return self._targets[target].known(labels, logits)

    def _probabilities(self, target: str) -> tuple[Truth, Floats]:
        positive, logits = self._column(target, self._units)
        return positive, np.array([self._targets[target].activate(logit) for logit in logits.tolist()])

    def _roc(
        self,
        axes: Any,
        target: str,
        measured: dict[tuple[str, str], MetricValue],
        *,
        resamples: int,
        seed: int,
    ) -> None:
        band = roc_band(self._slides, target, self._targets[target], self._unit, resamples=resamples, seed=seed)
        if band is not None:
            axes.fill_between(
                band.false_positive_rate, band.low, band.high, color=_MODEL, alpha=0.18, lw=0, label="95% of resamples"
            )
        axes.plot([0, 1], [0, 1], color=_GREY, lw=1, ls=":")
        baseline = roc_curve(*self._column(target, self._baseline)) if self._baseline else None
        if baseline is not None:
            axes.plot(baseline[0], baseline[1], color=_BASELINE, lw=1.2, ls="--", label="colour baseline")
        curve = roc_curve(*self._column(target, self._units))
        assert curve is not None
        axes.plot(curve[0], curve[1], color=_MODEL, lw=1.8, label=f"AUC {_shown(measured, target, 'auc')}")
        axes.set(xlabel="1 - specificity", ylabel="sensitivity", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        axes.legend(frameon=False, fontsize=8, loc="lower right")

    def _precision_recall(self, axes: Any, target: str, measured: dict[tuple[str, str], MetricValue]) -> None:
        positive, logits = self._column(target, self._units)
        axes.axhline(positive.mean(), color=_GREY, lw=1, ls=":", label="prevalence")
        baseline = precision_recall_curve(*self._column(target, self._baseline)) if self._baseline else None
        if baseline is not None:
            axes.step(baseline[1], baseline[0], color=_BASELINE, lw=1.2, ls="--", where="post", label="colour baseline")
        curve = precision_recall_curve(positive, logits)
        assert curve is not None
        name = f"average precision {_shown(measured, target, 'average_precision')}"
        axes.step(curve[1], curve[0], color=_MODEL, lw=1.8, where="post", label=name)
        axes.set(xlabel="sensitivity (recall)", ylabel="PPV (precision)", xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
        axes.legend(frameon=False, fontsize=8, loc="best")

    def _reliability(self, axes: Any, target: str, measured: dict[tuple[str, str], MetricValue]) -> None:
        bins = [each for each in reliability(*self._probabilities(target)) if each.count]
        axes.plot([0, 1], [0, 1], color=_GREY, lw=1, ls=":")
        points = [each.mean_probability for each in bins], [each.positive_rate for each in bins]
        axes.plot(*points, color=_MODEL, lw=1.2, alpha=0.6)
        most = max(each.count for each in bins)
        sizes = [20 + 130 * each.count / most for each in bins]
        axes.scatter(*points, s=sizes, color=_MODEL, zorder=3, label=f"ECE {_shown(measured, target, 'ece')}")
        for x, y, each in zip(*points, bins, strict=True):
            axes.annotate(str(each.count), (x, y), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7)
        axes.set(xlabel="mean probability", ylabel="rate of positives", xlim=(-0.03, 1.03), ylim=(-0.05, 1.25))
        axes.set_yticks(np.linspace(0, 1, 6))  # above: room for the legend
        axes.legend(frameon=False, fontsize=8, loc="upper left")

    def _scores(self, axes: Any, target: str, thresholds: Thresholds | None) -> None:
        edges = np.linspace(0, 1, _BINS + 1)
        positive, probabilities = self._probabilities(target)
        for flag, colour, name in ((False, _NEGATIVE, "negative"), (True, _MODEL, "positive")):
            values = probabilities[positive == flag].tolist()
            axes.hist(values, bins=edges, color=colour, alpha=0.55, label=f"{name} ({len(values):,})")
        threshold = None if thresholds is None else thresholds.youden.get(target)
        if threshold is not None:
            axes.axvline(threshold, color="0.3", lw=1, ls="--", label="Youden's threshold, of validation")
        axes.set(xlabel="probability", ylabel=f"{self._unit}s", xlim=(0, 1))
        axes.set_ylim(top=1.35 * axes.get_ylim()[1])  # room for the legend
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, loc="upper right", framealpha=0.9, edgecolor="none")


def _shown(measured: dict[tuple[str, str], MetricValue], target: str, metric: str) -> str:
    """Write a metric for a legend."""
    estimate = measured[target, metric].estimate
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.2f} to {estimate.high:.2f})"
