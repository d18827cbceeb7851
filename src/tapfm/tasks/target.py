"""What a kind of target defines: its labels, its numbers, its metrics. The rest of tapfm asks the kind.

Everything here and in the kinds can be imported without torch; the loss is a `Task`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from tapfm.metrics.arrays import Floats
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Line, Panel
from tapfm.results.table import Cell

BASELINE = "colour baseline"  # its name in tables and figures

# The label of one target, as its kind parsed it; None: missing. Only tasks/ looks inside.
Label = Hashable
Truth = NDArray[Any]  # the known labels of one target, as its kind's metrics take them


@dataclass(frozen=True)
class TargetThresholds:
    """The thresholds of one target, chosen on validation; None where there is none."""

    youden: float | None = None
    chosen: float | None = None  # reaches a sensitivity


@dataclass(frozen=True)
class FigureData:
    """What the figures of one target are drawn from: units with a label, and what was measured of them."""

    truth: Truth
    logits: Floats
    baseline: tuple[Truth, Floats] | None
    estimates: Mapping[str, Estimate]  # by metric
    threshold: float | None  # Youden's
    weights: Iterable[Floats]  # rows of resamples, some at a time; empty: there are none
    unit: str


class LinearFit(Protocol):
    """A linear model of one target, for baselines."""

    def logits(self, X: Any) -> Floats:
        """Score rows of numbers."""
        ...


class TargetKind(Protocol):
    """A kind of target. `labels` are those of all units, None where missing; `truth` and `logits` of the known ones."""

    @property
    def metrics(self) -> Mapping[str, str]:
        """Every metric, with its name in tables."""
        ...

    @property
    def main_metrics(self) -> tuple[str, ...]:
        """The metrics that are shown where there is little room, such as of subgroups."""
        ...

    @property
    def figures(self) -> Mapping[str, str]:
        """The figures of an evaluation: title by file name."""
        ...

    def threshold_of(self, metric: str) -> Literal["", "youden", "chosen"]:
        """Name the threshold that a metric is measured at; empty: none."""
        ...

    # labels

    def parse_label(self, text: str) -> Label:
        """Read a label from a table; an empty text is a missing label. Raises ValueError."""
        ...

    def format_label(self, label: Label) -> str:
        """Write a label, or a call, into a table."""
        ...

    def describe_label(self, label: Label) -> str:
        """Name a label, or a call, in a sentence."""
        ...

    def outcome(self, call: Label, label: Label) -> str:
        """Say whether a call is "right", or how it is wrong; empty where one of them is missing."""
        ...

    def stratum(self, label: Label) -> str | None:
        """Name the group in which splits and resamples keep a label; None: missing."""
        ...

    def patient_label(self, labels: Sequence[Label]) -> Label:
        """Return the label of a patient from those of the slides."""
        ...

    def lacking(self, labels: Sequence[Label]) -> str:
        """Name what labels lack for training and metrics, such as "positive"; empty: nothing."""
        ...

    def why_undefined(self, labels: Sequence[Label], unit: str) -> str:
        """Say why there are no metrics, such as "no positive slide among 12"; empty where there are."""
        ...

    def why_too_few(self, labels: Sequence[Label], unit: str, least: int) -> str:
        """Say that a class has fewer than `least`; empty where all have enough."""
        ...

    def why_no_interval(self, labels: Sequence[Label], patients: Sequence[Hashable]) -> str:
        """Say why resampling patients cannot give an interval; empty where it can."""
        ...

    def count_labels(self, labels: Sequence[Label]) -> tuple[int | None, int]:
        """Count the positive (None: there is no such class) and the known labels."""
        ...

    @property
    def counted(self) -> str:
        """What `count_cell` counts, for the title of a column, such as "positive"."""
        ...

    def count_cell(self, labels: Sequence[Label]) -> Cell:
        """Return the counts of labels for a table, such as "3 of 12" with "25%" as a detail."""
        ...

    def describe_counts(self, labels: Sequence[Label], unit: str) -> str:
        """Count the labels of each class, such as "3 positive and 9 negative slides"."""
        ...

    def summarise_training(self, labels: Sequence[Label]) -> dict[str, int]:
        """Return what tapfm.json keeps of the training labels."""
        ...

    def restore_training(self, summary: Mapping[str, int]) -> list[Label]:
        """Return labels with such a summary."""
        ...

    # numbers

    def activate(self, logit: float) -> float:
        """Turn a logit into what is reported: the column probability of the table of predictions."""
        ...

    def mean_logit(self, logits: Sequence[float]) -> float:
        """Combine the logits of an ensemble's members or of a patient's slides."""
        ...

    def format_prediction(self, label: Label, logit: float) -> tuple[str, str, str]:
        """Return the cells label, probability and logit of the table of predictions."""
        ...

    def parse_prediction(self, label: str, probability: str, logit: str) -> tuple[Label, float]:
        """Read these cells; an empty logit follows from the probability. Raises ValueError."""
        ...

    def call(self, logit: float, threshold: float | None) -> Label:
        """Return the label that a logit stands for at a threshold; None without one."""
        ...

    def known(self, labels: Sequence[Label], logits: Sequence[float]) -> tuple[Truth, Floats]:
        """Return the known labels and their logits. Raises NonFiniteError for a logit that is not a number."""
        ...

    # evaluation

    def score(self, truth: Truth, logits: Floats) -> float | None:
        """Compute the metric that epochs are selected and methods are compared by; higher is better."""
        ...

    def resampled_scores(self, weights: Floats, truth: Truth, logits: Floats) -> Floats:
        """Compute it in every resample, a row of weights; NaN where there is none."""
        ...

    def values(self, truth: Truth, logits: Floats, thresholds: TargetThresholds | None) -> dict[str, float | None]:
        """Compute every metric."""
        ...

    def resampled_values(
        self, weights: Floats, truth: Truth, logits: Floats, thresholds: TargetThresholds | None
    ) -> dict[str, Floats]:
        """Compute every metric in every resample, a row of weights; NaN where there is none."""
        ...

    def why_missing(
        self, metric: str, target: str, labels: Sequence[Label], thresholds: TargetThresholds | None, unit: str
    ) -> str:
        """Say why a metric has no value."""
        ...

    def analytic_interval(
        self, metric: str, truth: Truth, logits: Floats, *, unit: str, clustered: bool
    ) -> Estimate | None:
        """Estimate a metric with an interval from a formula; None where there is no formula.

        clustered: some patients have several units.
        """
        ...

    def paired_test(self, truth: Truth, a: Floats, b: Floats, *, clustered: bool) -> tuple[float | None, str]:
        """Test whether two methods have the same score: the p value, or why there is none."""
        ...

    def choose_thresholds(self, truth: Truth, logits: Floats, sensitivity: float) -> TargetThresholds:
        """Choose thresholds on validation units."""
        ...

    def panels(self, data: FigureData) -> dict[str, Panel]:
        """Return the panel of each figure, by file name."""
        ...

    def curve(self, truth: Truth, logits: Floats) -> Line | None:
        """Return the curve by which methods are compared, such as a ROC curve; None where there is none."""
        ...

    def curve_panel(self, title: str, lines: Sequence[Line]) -> Panel:
        """Return a panel with the curves of several methods."""
        ...

    def fit_linear(self, rows: Sequence[Sequence[float]], labels: Sequence[Label]) -> LinearFit | None:
        """Fit a linear model of some numbers of each slide; None where the labels do not suffice."""
        ...


TargetKinds = Mapping[str, TargetKind]  # targets by name, in order
