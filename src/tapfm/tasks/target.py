"""Interface of target kinds (such as binary): labels, predictions, metrics and figures of one target.

This module and the target kinds can be imported without torch. The loss is defined by a `Task`.
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

BASELINE = "colour baseline"  # name in tables and figures

# The label of one target, as parsed by its kind; None if missing. Only tasks/ depends on its value.
Label = Hashable
Truth = NDArray[Any]  # the labels of one target that are not missing, in the format of its kind's metrics


@dataclass(frozen=True)
class TargetThresholds:
    """Thresholds of a target's activation, chosen on the validation split; None if no threshold could be chosen."""

    youden: float | None = None
    at_sensitivity: float | None = None  # the highest threshold that reaches a given sensitivity


@dataclass(frozen=True)
class FigureData:
    """Data for the figures of one target: the labelled units and their metrics."""

    truth: Truth
    logits: Floats
    baseline: tuple[Truth, Floats] | None
    estimates: Mapping[str, Estimate]  # by metric
    threshold: float | None  # Youden threshold
    resample_weights: Iterable[Floats]  # blocks of resamples (rows) x units; may be empty
    unit: str


class LinearFit(Protocol):
    """A linear model of one target, for baselines."""

    def logits(self, X: Any) -> Floats:
        """Return the logit of each row of X."""
        ...


class TargetKind(Protocol):
    """A kind of target.

    A unit is a slide or a patient. `labels` has all units (None if missing), `truth` and `logits` only units with a
    label.
    """

    @property
    def metrics(self) -> Mapping[str, str]:
        """Name in tables of every metric, by metric."""
        ...

    @property
    def main_metrics(self) -> tuple[str, ...]:
        """Metrics for short tables, such as those of subgroups."""
        ...

    @property
    def figure_titles(self) -> Mapping[str, str]:
        """Titles of the figures of an evaluation, by file name without suffix."""
        ...

    def threshold_name(self, metric: str) -> Literal["", "youden", "at_sensitivity"]:
        """Return the name of the threshold that a metric needs; empty if none."""
        ...

    # labels

    @property
    def label_texts(self) -> Mapping[str, Sequence[str]]:
        """The texts of each class, as in [task.labels] of RUN.toml; empty for the labels 0 and 1."""
        ...

    def parse_label(self, text: str) -> Label:
        """Parse a label of a table; an empty string is a missing label. Raises ValueError."""
        ...

    def format_label(self, label: Label) -> str:
        """Return a true or predicted label as it is written in tables."""
        ...

    def describe_label(self, label: Label) -> str:
        """Return a true or predicted label as a word, such as "positive"."""
        ...

    def describe_outcome(self, call: Label, label: Label) -> str:
        """Return "correct", or the kind of error; empty if a label is missing.

        call: predicted label.
        """
        ...

    def stratum(self, label: Label) -> str | None:
        """Return the stratum of a label for splits and resamples; None if the label is missing."""
        ...

    def pool_labels(self, labels: Sequence[Label]) -> Label:
        """Return the label of a patient from the labels of the patient's slides."""
        ...

    def missing_class(self, labels: Sequence[Label]) -> str:
        """Return the class without labels as an adjective, such as "positive"; empty if all classes have labels.

        Returns "labelled" if there are no labels at all, for messages such as "no labelled slide".
        """
        ...

    def explain_undefined(self, labels: Sequence[Label], unit: str) -> str:
        """Return why metrics are undefined, such as "no positive slide among 12"; empty if they are defined."""
        ...

    def explain_too_few(self, labels: Sequence[Label], unit: str, minimum: int) -> str:
        """Return the label counts if a class has fewer than `minimum`; empty if all classes have enough."""
        ...

    def explain_missing_interval(self, labels: Sequence[Label], patients: Sequence[Hashable]) -> str:
        """Return why there is no bootstrap confidence interval; empty if there is one."""
        ...

    def count_positives(self, labels: Sequence[Label]) -> tuple[int | None, int]:
        """Return the number of positive labels (None if there is no such class) and of all labels."""
        ...

    @property
    def label_count_title(self) -> str:
        """Column title for `label_count_cell`, such as "positive"."""
        ...

    def label_count_cell(self, labels: Sequence[Label]) -> Cell:
        """Return the label counts for a table, such as "3 of 12" with the detail "25%"."""
        ...

    def describe_counts(self, labels: Sequence[Label], unit: str) -> str:
        """Return the label counts as text, such as "3 positive and 9 negative slides"."""
        ...

    def summarise_training_labels(self, labels: Sequence[Label]) -> dict[str, int]:
        """Return a summary of the training labels for tapfm.json."""
        ...

    def restore_training_labels(self, summary: Mapping[str, int]) -> list[Label]:
        """Return labels that have this summary."""
        ...

    # predictions

    def activate(self, logit: float) -> float:
        """Return the activation of a logit: the column `probability` of predictions."""
        ...

    def combine_logits(self, logits: Sequence[float]) -> float:
        """Return the logit of an ensemble from those of its members, or of a patient from those of the slides."""
        ...

    def format_prediction(self, label: Label, logit: float) -> tuple[str, str, str, str]:
        """Return label, positive class (whose probability it is), probability and logit for the predictions table."""
        ...

    def parse_prediction(self, label: str, probability: str, logit: str) -> tuple[Label, float]:
        """Return label and logit; an empty logit is computed from the probability. Raises ValueError if invalid."""
        ...

    def apply_threshold(self, logit: float, threshold: float | None) -> Label:
        """Return the predicted label at a threshold of the activation; None if the threshold is None."""
        ...

    def select_labelled(self, labels: Sequence[Label], logits: Sequence[float]) -> tuple[Truth, Floats]:
        """Return the labels that are not missing, and their logits. Raises NonFiniteError if a logit is NaN."""
        ...

    # evaluation

    def compute_score(self, truth: Truth, logits: Floats) -> float | None:
        """Return the metric for selecting epochs and comparing methods; higher is better."""
        ...

    def compute_resampled_scores(self, weights: Floats, truth: Truth, logits: Floats) -> Floats:
        """Return the score in every resample (a row of weights); NaN if undefined."""
        ...

    def compute_metrics(
        self, truth: Truth, logits: Floats, thresholds: TargetThresholds | None
    ) -> dict[str, float | None]:
        """Return the value of each metric in `metrics`; None if it is undefined."""
        ...

    def compute_resampled_metrics(
        self, weights: Floats, truth: Truth, logits: Floats, thresholds: TargetThresholds | None
    ) -> dict[str, Floats]:
        """Return each metric in `metrics` for every resample (a row of weights); NaN if it is undefined."""
        ...

    def explain_missing_metric(
        self, metric: str, target: str, labels: Sequence[Label], thresholds: TargetThresholds | None, unit: str
    ) -> str:
        """Return why a metric has no value."""
        ...

    def compute_analytic_interval(
        self, metric: str, truth: Truth, logits: Floats, *, unit: str, clustered: bool
    ) -> Estimate | None:
        """Return a metric with an analytic confidence interval; None if the metric has no such interval.

        clustered: whether a patient has more than one unit.
        """
        ...

    def paired_test(
        self, truth: Truth, a: Floats, b: Floats, *, unit: str, clustered: bool
    ) -> tuple[float | None, str]:
        """Return the p value of a test that the logits `a` and `b` have equal scores, or None and the reason.

        clustered: whether a patient has more than one unit; tests that assume independent units return None.
        """
        ...

    def choose_thresholds(self, truth: Truth, logits: Floats, sensitivity: float) -> TargetThresholds:
        """Choose thresholds on the units of the validation split."""
        ...

    def build_panels(self, data: FigureData) -> dict[str, Panel]:
        """Return the panel of each figure, by file name."""
        ...

    def build_curve(self, truth: Truth, logits: Floats) -> Line | None:
        """Return the curve for comparing methods, such as a ROC curve; None if undefined."""
        ...

    def build_curve_panel(self, title: str, lines: Sequence[Line]) -> Panel:
        """Return a panel with the curves of several methods."""
        ...

    def fit_linear(self, rows: Sequence[Sequence[float]], labels: Sequence[Label]) -> LinearFit | None:
        """Fit a linear model to a few features per slide; None if the labels are insufficient."""
        ...


TargetKinds = Mapping[str, TargetKind]  # targets by name, in order
