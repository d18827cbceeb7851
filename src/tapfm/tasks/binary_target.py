"""Binary targets: labels 1 (positive), 0 (negative) or missing; the sigmoid of the logit is the probability."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tapfm.metrics import logistic, weighted
from tapfm.metrics.arrays import Flags, Floats, check_scores
from tapfm.metrics.delong import auc_difference, auc_interval
from tapfm.metrics.ranking import auc
from tapfm.metrics.thresholds import sensitivity_threshold, youden_threshold
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Line, Panel
from tapfm.results.formatting import format_percentage
from tapfm.results.table import Cell
from tapfm.tasks import binary_figures, binary_metrics
from tapfm.tasks.target import FigureData, Label, LinearFit, TargetThresholds

_NUMBERS = (("0",), ("1",))  # texts of the classes in a column of numbers
_CLASSES = ("negative", "positive")  # names of the classes in a column of numbers, by label
_PROBABILITY_TOLERANCE = 1e-3  # between a probability, which other tools round, and the sigmoid of its logit
_CLUSTERED = "DeLong's method needs independent units, but some patients have several slides"


def _sigmoid(logit: float) -> float:
    """Return the sigmoid, without overflow."""
    small = math.exp(-abs(logit))
    return 1 / (1 + small) if logit >= 0 else small / (1 + small)


def _to_logit(probability: float) -> float:
    """Return the logit of a probability, which is finite: 0 and 1 are replaced by the nearest float between them."""
    inside = min(max(probability, math.nextafter(0, 1)), math.nextafter(1, 0))
    return math.log(inside) - math.log1p(-inside)


def _probabilities(logits: Floats) -> Floats:
    """Return exactly the probabilities that are written to tables."""
    return np.array([_sigmoid(logit) for logit in logits.tolist()], dtype=np.float64)


def _drop_missing(labels: Sequence[Label]) -> list[int]:
    """Return the labels that are not missing."""
    return [1 if label == 1 else 0 for label in labels if label is not None]


def normalise_label(text: str) -> str:
    """Return the text of a label without case; tools such as pandas write 1 as 1.0 if values are missing."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text.casefold())


@dataclass(frozen=True)
class BinaryTarget:
    """A binary target. Implements `TargetKind`; the score is the AUC.

    negative, positive: texts of the two classes in the label column.
    """

    negative: tuple[str, ...] = _NUMBERS[0]
    positive: tuple[str, ...] = _NUMBERS[1]

    @property
    def class_names(self) -> tuple[str, str]:
        """Names of the negative and of the positive class."""
        return ("/".join(self.negative), "/".join(self.positive)) if self.label_texts else _CLASSES

    @property
    def label_texts(self) -> dict[str, list[str]]:
        if (self.negative, self.positive) == _NUMBERS:
            return {}
        return {"negative": list(self.negative), "positive": list(self.positive)}

    @property
    def metrics(self) -> Mapping[str, str]:
        return binary_metrics.METRIC_NAMES

    @property
    def main_metrics(self) -> tuple[str, ...]:
        return binary_metrics.MAIN_METRICS

    @property
    def figure_titles(self) -> Mapping[str, str]:
        return binary_figures.FIGURES

    def threshold_name(self, metric: str) -> Literal["", "youden", "at_sensitivity"]:
        if metric in binary_metrics.THRESHOLD_FREE:
            return ""
        return "at_sensitivity" if metric in binary_metrics.METRICS_AT_SENSITIVITY else "youden"

    def parse_label(self, text: str) -> Label:
        if not text:
            return None
        for label, texts in enumerate((self.negative, self.positive)):
            if normalise_label(text) in map(normalise_label, (*texts, "/".join(texts))):
                return label
        valid = ", ".join((*self.negative, *self.positive))
        raise ValueError(f"a label must be {valid} or empty; got {text!r}")

    def format_label(self, label: Label) -> str:
        return "" if label is None else "/".join(self.positive if label == 1 else self.negative)

    def describe_label(self, label: Label) -> str:
        return "unknown" if label is None else self.class_names[label == 1]

    def describe_outcome(self, call: Label, label: Label) -> str:
        if call is None or label is None:
            return ""
        return "correct" if call == label else f"false {_CLASSES[call == 1]}"

    def stratum(self, label: Label) -> str | None:
        return None if label is None else str(int(label == 1))

    def pool_labels(self, labels: Sequence[Label]) -> Label:
        """Return 1 if any slide is positive; None if no slide has a label."""
        return max(_drop_missing(labels), default=None)

    def missing_class(self, labels: Sequence[Label]) -> str:
        present = _drop_missing(labels)
        if not present:
            return "labelled"
        return next((self.class_names[label] for label in (1, 0) if label not in present), "")

    def explain_undefined(self, labels: Sequence[Label], unit: str) -> str:
        missing = self.missing_class(labels)
        return f"no {missing} {unit} among {len(_drop_missing(labels)) or len(labels)}" if missing else ""

    def explain_too_few(self, labels: Sequence[Label], unit: str, minimum: int) -> str:
        present = _drop_missing(labels)
        if min(present.count(0), present.count(1)) >= minimum:
            return ""
        return f"{self.describe_counts(labels, unit)}, but at least {minimum} of each class are required"

    def explain_missing_interval(self, labels: Sequence[Label], patients: Sequence[Hashable]) -> str:
        units = list(zip(labels, patients, strict=True))
        for label, name in enumerate(self.class_names):
            if len({patient for each, patient in units if each == label}) == 1:
                return f"no confidence interval: only one {name} patient"
        return ""

    def count_positives(self, labels: Sequence[Label]) -> tuple[int | None, int]:
        present = _drop_missing(labels)
        return sum(present), len(present)

    @property
    def label_count_title(self) -> str:
        return self.class_names[1]

    def label_count_cell(self, labels: Sequence[Label]) -> Cell:
        present = _drop_missing(labels)
        if not present:
            return Cell("0 of 0", reason="no labels")
        return Cell(f"{sum(present):,} of {len(present):,}", format_percentage(sum(present), len(present)))

    def describe_counts(self, labels: Sequence[Label], unit: str) -> str:
        present = _drop_missing(labels)
        negative, positive = self.class_names
        return f"{present.count(1):,} {positive} and {present.count(0):,} {negative} {unit}s"

    def summarise_training_labels(self, labels: Sequence[Label]) -> dict[str, int]:
        present = _drop_missing(labels)
        return {"positive": sum(present), "labelled": len(present)}

    def restore_training_labels(self, summary: Mapping[str, int]) -> list[Label]:
        positive, labelled = summary["positive"], summary["labelled"]
        return [*[1] * positive, *[0] * (labelled - positive)]

    def activate(self, logit: float) -> float:
        return _sigmoid(logit)

    def combine_logits(self, logits: Sequence[float]) -> float:
        """Return the logit of the mean probability, independent of the order and exact near 0 and 1."""
        if len(set(logits)) == 1:
            return float(logits[0])
        ordered = np.sort(np.asarray(logits, dtype=np.float64))
        log_positive = np.logaddexp.reduce(-np.logaddexp(0, -ordered))
        log_negative = np.logaddexp.reduce(-np.logaddexp(0, ordered))
        return float(log_positive - log_negative)

    def format_prediction(self, label: Label, logit: float) -> tuple[str, str, str, str]:
        """Return label, positive class, probability and logit; numbers in full precision."""
        return self.format_label(label), self.format_label(1), repr(_sigmoid(logit)), repr(logit)

    def parse_prediction(self, label: str, probability: str, logit: str) -> tuple[Label, float]:
        parsed, parsed_probability = self.parse_label(label), float(probability)
        if not 0 <= parsed_probability <= 1:
            raise ValueError(f"a probability must be from 0 to 1; got {probability}")
        parsed_logit = float(logit) if logit else _to_logit(parsed_probability)
        expected = _sigmoid(parsed_logit)
        if not abs(expected - parsed_probability) < _PROBABILITY_TOLERANCE:
            raise ValueError(f"logit {parsed_logit} means probability {expected:.6g}, not {parsed_probability:.6g}")
        return parsed, parsed_logit

    def apply_threshold(self, logit: float, threshold: float | None) -> Label:
        return None if threshold is None else int(_sigmoid(logit) >= threshold)

    def select_labelled(self, labels: Sequence[Label], logits: Sequence[float]) -> tuple[Flags, Floats]:
        pairs = zip(labels, logits, strict=True)
        scores: Floats = np.array([logit for label, logit in pairs if label is not None], dtype=np.float64)
        positive = np.array(_drop_missing(labels), dtype=bool)
        check_scores(positive, scores)
        return positive, scores

    def compute_score(self, truth: Flags, logits: Floats) -> float | None:
        return auc(truth, logits)

    def compute_resampled_scores(self, weights: Floats, truth: Flags, logits: Floats) -> Floats:
        return weighted.aucs(weights, truth, logits)

    def compute_metrics(
        self, truth: Flags, logits: Floats, thresholds: TargetThresholds | None
    ) -> dict[str, float | None]:
        return binary_metrics.compute_metrics(truth, logits, _probabilities(logits), thresholds)

    def compute_resampled_metrics(
        self, weights: Floats, truth: Flags, logits: Floats, thresholds: TargetThresholds | None
    ) -> dict[str, Floats]:
        return binary_metrics.compute_resampled_metrics(weights, truth, logits, _probabilities(logits), thresholds)

    def explain_missing_metric(
        self, metric: str, target: str, labels: Sequence[Label], thresholds: TargetThresholds | None, unit: str
    ) -> str:
        undefined = self.explain_undefined(labels, unit)
        return binary_metrics.explain_missing_metric(
            metric, target, undefined, thresholds, unit, labelled=bool(_drop_missing(labels))
        )

    def compute_analytic_interval(
        self, metric: str, truth: Flags, logits: Floats, *, unit: str, clustered: bool
    ) -> Estimate | None:
        """Return the AUC with DeLong's confidence interval; without it, but with the reason, if units are clustered."""
        if metric != "auc":
            return None
        if clustered:
            return Estimate(auc(truth, logits), reason=_CLUSTERED)
        estimate = auc_interval(truth, logits)
        return replace(estimate, reason=estimate.reason.replace("unit", unit))

    def paired_test(
        self, truth: Flags, a: Floats, b: Floats, *, unit: str, clustered: bool
    ) -> tuple[float | None, str]:
        """Return the p value of DeLong's test that the logits `a` and `b` have equal AUCs, or None and the reason."""
        if clustered:
            return None, _CLUSTERED
        test = auc_difference(truth, a, b)
        return test.p, "" if test.p is not None else test.difference.reason.replace("unit", unit)

    def choose_thresholds(self, truth: Flags, logits: Floats, sensitivity: float) -> TargetThresholds:
        probabilities = _probabilities(logits)
        return TargetThresholds(
            youden_threshold(truth, probabilities), sensitivity_threshold(truth, probabilities, sensitivity)
        )

    def build_panels(self, data: FigureData) -> dict[str, Panel]:
        baseline = None
        if data.baseline is not None:
            baseline = binary_figures.ScoredUnits(*data.baseline, _probabilities(data.baseline[1]))
        units = binary_figures.ScoredUnits(data.truth, data.logits, _probabilities(data.logits))
        return binary_figures.build_binary_panels(units, baseline, data, self.class_names)

    def build_curve(self, truth: Flags, logits: Floats) -> Line | None:
        return binary_figures.roc_line(truth, logits)

    def build_curve_panel(self, title: str, lines: Sequence[Line]) -> Panel:
        return binary_figures.roc_panel(title, lines)

    def fit_linear(self, rows: Sequence[Sequence[float]], labels: Sequence[Label]) -> LinearFit | None:
        """Fit a logistic regression; None unless both classes are present."""
        if self.missing_class(labels):
            return None
        labelled = [row for row, label in zip(rows, labels, strict=True) if label is not None]
        return logistic.fit_logistic(labelled, _drop_missing(labels))


NUMBER_LABELS = BinaryTarget()  # of a column with 0 and 1
