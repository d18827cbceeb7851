"""Binary targets: 1 (positive), 0 (negative) or missing; one logit, whose sigmoid is the probability of positive."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tapfm.metrics import logistic, weighted
from tapfm.metrics.arrays import Flags, Floats, check_scores
from tapfm.metrics.delong import auc_difference, auc_interval
from tapfm.metrics.ranking import auc
from tapfm.metrics.thresholds import at_sensitivity, youden
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Line, Panel
from tapfm.results.numbers import format_percentage
from tapfm.results.table import Cell
from tapfm.tasks import binary_figures, binary_metrics
from tapfm.tasks.target import FigureData, Label, LinearFit, TargetThresholds

# 0.0 and 1.0 are what a column of numbers becomes when some of them are missing
_LABELS: dict[str, int | None] = {"": None, "0": 0, "1": 1, "0.0": 0, "1.0": 1}
_CLASSES = ("negative", "positive")  # by label
_AGREEMENT = 1e-3  # of a probability and the sigmoid of its logit; others round to a few digits
_CLUSTERED = "DeLong needs independent units: some patients have several slides"


def _sigmoid(logit: float) -> float:
    """Turn a logit into a probability, without overflow."""
    small = math.exp(-abs(logit))
    return 1 / (1 + small) if logit >= 0 else small / (1 + small)


def _logit_of(probability: float) -> float:
    """Turn a probability into a logit; 0 and 1 count as the float beside them, so that they stay the ends."""
    inside = min(max(probability, math.nextafter(0, 1)), math.nextafter(1, 0))
    return math.log(inside) - math.log1p(-inside)


def _probabilities(logits: Floats) -> Floats:
    """Turn logits into the probabilities that tables have, to the last digit."""
    return np.array([_sigmoid(logit) for logit in logits.tolist()], dtype=np.float64)


def _known(labels: Sequence[Label]) -> list[int]:
    """Return the labels that are not missing."""
    return [1 if label == 1 else 0 for label in labels if label is not None]


@dataclass(frozen=True)
class BinaryTarget:
    """A target that is there or not. Implements `TargetKind`."""

    @property
    def metrics(self) -> Mapping[str, str]:
        """Every metric, with its name in tables."""
        return binary_metrics.NAMES

    @property
    def main_metrics(self) -> tuple[str, ...]:
        """AUC, average precision and Brier score."""
        return binary_metrics.BESIDE

    @property
    def figures(self) -> Mapping[str, str]:
        """ROC curve, precision and recall, calibration, probabilities."""
        return binary_figures.FIGURES

    def threshold_of(self, metric: str) -> Literal["", "youden", "chosen"]:
        """Name the threshold that a metric is measured at; empty: none."""
        if metric in binary_metrics.THRESHOLD_FREE:
            return ""
        return "chosen" if metric in binary_metrics.BY_CHOSEN else "youden"

    def parse_label(self, text: str) -> Label:
        """Read 0, 1 or nothing. Raises ValueError."""
        if text not in _LABELS:
            raise ValueError(f"a label must be 0, 1 or empty, got {text!r}")
        return _LABELS[text]

    def format_label(self, label: Label) -> str:
        """Write 0, 1 or nothing."""
        return "" if label is None else str(int(label == 1))

    def describe_label(self, label: Label) -> str:
        """Say positive, negative or unknown."""
        return "unknown" if label is None else _CLASSES[label == 1]

    def outcome(self, call: Label, label: Label) -> str:
        """Say right, false positive or false negative; empty where one of them is missing."""
        if call is None or label is None:
            return ""
        return "right" if call == label else f"false {self.describe_label(call)}"

    def stratum(self, label: Label) -> str | None:
        """Keep the classes apart."""
        return None if label is None else self.format_label(label)

    def patient_label(self, labels: Sequence[Label]) -> Label:
        """Return 1 where any slide is positive; None where none is labelled."""
        return max(_known(labels), default=None)

    def lacking(self, labels: Sequence[Label]) -> str:
        """Name the class that is absent; "labelled" where all labels are missing."""
        known = _known(labels)
        if not known:
            return "labelled"
        return next((_CLASSES[label] for label in (1, 0) if label not in known), "")

    def why_undefined(self, labels: Sequence[Label], unit: str) -> str:
        """Say why there is no AUC, for example "no positive slide among 12"; empty where there is one."""
        lacking = self.lacking(labels)
        return f"no {lacking} {unit} among {len(_known(labels)) or len(labels)}" if lacking else ""

    def why_too_few(self, labels: Sequence[Label], unit: str, least: int) -> str:
        """Say that a class has fewer than `least`; empty where both have enough."""
        known = _known(labels)
        if min(known.count(0), known.count(1)) >= least:
            return ""
        return f"{self.describe_counts(labels, unit)}: fewer than {least} of a class"

    def why_no_interval(self, labels: Sequence[Label], patients: Sequence[Hashable]) -> str:
        """Name the class of a single patient, which resampling cannot vary."""
        units = list(zip(labels, patients, strict=True))
        for label, name in enumerate(_CLASSES):
            if len({patient for each, patient in units if each == label}) == 1:
                return f"no interval: a single {name} patient"
        return ""

    def count_labels(self, labels: Sequence[Label]) -> tuple[int | None, int]:
        """Count the positive and the known labels."""
        known = _known(labels)
        return sum(known), len(known)

    @property
    def counted(self) -> str:
        """Positives are counted."""
        return "positive"

    def count_cell(self, labels: Sequence[Label]) -> Cell:
        """Return the positives of the labelled slides, and their share."""
        known = _known(labels)
        if not known:
            return Cell("0 of 0", why="no labels")
        return Cell(f"{sum(known):,} of {len(known):,}", format_percentage(sum(known), len(known)))

    def describe_counts(self, labels: Sequence[Label], unit: str) -> str:
        """Count the labels of both classes, such as "3 positive and 9 negative slides"."""
        known = _known(labels)
        return f"{known.count(1):,} positive and {known.count(0):,} negative {unit}s"

    def summarise_training(self, labels: Sequence[Label]) -> dict[str, int]:
        """Count the positive and the labelled slides."""
        known = _known(labels)
        return {"positive": sum(known), "labelled": len(known)}

    def restore_training(self, summary: Mapping[str, int]) -> list[Label]:
        """Return labels with such a summary."""
        positive, labelled = summary["positive"], summary["labelled"]
        return [*[1] * positive, *[0] * (labelled - positive)]

    def activate(self, logit: float) -> float:
        """Return the probability."""
        return _sigmoid(logit)

    def mean_logit(self, logits: Sequence[float]) -> float:
        """Return the logit of the mean of probabilities, in any order and also where those round to 0 or 1."""
        if len(set(logits)) == 1:
            return float(logits[0])
        ordered = np.sort(np.asarray(logits, dtype=np.float64))
        log_positive = np.logaddexp.reduce(-np.logaddexp(0, -ordered))
        log_negative = np.logaddexp.reduce(-np.logaddexp(0, ordered))
        return float(log_positive - log_negative)

    def format_prediction(self, label: Label, logit: float) -> tuple[str, str, str]:
        """Return the cells label, probability and logit; numbers come back as they were."""
        return self.format_label(label), repr(_sigmoid(logit)), repr(logit)

    def parse_prediction(self, label: str, probability: str, logit: str) -> tuple[Label, float]:
        """Read these cells; an empty logit follows from the probability. Raises ValueError."""
        parsed, share = self.parse_label(label), float(probability)
        if not 0 <= share <= 1:
            raise ValueError(f"a probability must be from 0 to 1, got {probability}")
        score = float(logit) if logit else _logit_of(share)
        if not abs(_sigmoid(score) - share) < _AGREEMENT:
            raise ValueError(f"a logit of {score} is a probability of {_sigmoid(score):.6g}, not of {share:.6g}")
        return parsed, score

    def call(self, logit: float, threshold: float | None) -> Label:
        """Return 1 where the probability is at or above the threshold."""
        return None if threshold is None else int(_sigmoid(logit) >= threshold)

    def known(self, labels: Sequence[Label], logits: Sequence[float]) -> tuple[Flags, Floats]:
        """Return who is positive, and the logits, of those with a label."""
        pairs = zip(labels, logits, strict=True)
        scores: Floats = np.array([logit for label, logit in pairs if label is not None], dtype=np.float64)
        positive = np.array(_known(labels), dtype=bool)
        check_scores(positive, scores)
        return positive, scores

    def score(self, truth: Flags, logits: Floats) -> float | None:
        """Compute the AUC."""
        return auc(truth, logits)

    def resampled_scores(self, weights: Floats, truth: Flags, logits: Floats) -> Floats:
        """Compute the AUC in every resample."""
        return weighted.aucs(weights, truth, logits)

    def values(self, truth: Flags, logits: Floats, thresholds: TargetThresholds | None) -> dict[str, float | None]:
        """Compute every metric."""
        return binary_metrics.compute_values(truth, logits, _probabilities(logits), thresholds)

    def resampled_values(
        self, weights: Floats, truth: Flags, logits: Floats, thresholds: TargetThresholds | None
    ) -> dict[str, Floats]:
        """Compute every metric in every resample, a row of weights; NaN where there is none."""
        return binary_metrics.compute_resampled(weights, truth, logits, _probabilities(logits), thresholds)

    def why_missing(
        self, metric: str, target: str, labels: Sequence[Label], thresholds: TargetThresholds | None, unit: str
    ) -> str:
        """Say why a metric has no value."""
        undefined = self.why_undefined(labels, unit)
        return binary_metrics.why_missing(metric, target, undefined, thresholds, unit, labelled=bool(_known(labels)))

    def analytic_interval(
        self, metric: str, truth: Flags, logits: Floats, *, unit: str, clustered: bool
    ) -> Estimate | None:
        """Estimate the AUC by DeLong's method, which takes units to be independent."""
        if metric != "auc":
            return None
        if clustered:
            return Estimate(auc(truth, logits), why=_CLUSTERED)
        estimate = auc_interval(truth, logits)
        return replace(estimate, why=estimate.why.replace("unit", unit))

    def paired_test(self, truth: Flags, a: Floats, b: Floats, *, clustered: bool) -> tuple[float | None, str]:
        """Test by DeLong's method whether two AUCs are the same."""
        if clustered:
            return None, _CLUSTERED
        test = auc_difference(truth, a, b)
        return test.p, "" if test.p is not None else test.difference.why

    def choose_thresholds(self, truth: Flags, logits: Floats, sensitivity: float) -> TargetThresholds:
        """Choose Youden's threshold, and the one that reaches a sensitivity."""
        probabilities = _probabilities(logits)
        return TargetThresholds(youden(truth, probabilities), at_sensitivity(truth, probabilities, sensitivity))

    def panels(self, data: FigureData) -> dict[str, Panel]:
        """Return the ROC curve, precision and recall, calibration and probabilities."""
        baseline = None
        if data.baseline is not None:
            baseline = binary_figures.ScoredUnits(*data.baseline, _probabilities(data.baseline[1]))
        units = binary_figures.ScoredUnits(data.truth, data.logits, _probabilities(data.logits))
        return binary_figures.binary_panels(units, baseline, data)

    def curve(self, truth: Flags, logits: Floats) -> Line | None:
        """Return the ROC curve; None without both classes."""
        return binary_figures.roc_line(truth, logits)

    def curve_panel(self, title: str, lines: Sequence[Line]) -> Panel:
        """Return the ROC curves of several methods."""
        return binary_figures.roc_panel(title, lines)

    def fit_linear(self, rows: Sequence[Sequence[float]], labels: Sequence[Label]) -> LinearFit | None:
        """Fit a logistic regression; None without both classes."""
        if self.lacking(labels):
            return None
        known = [row for row, label in zip(rows, labels, strict=True) if label is not None]
        return logistic.fit(known, _known(labels))
