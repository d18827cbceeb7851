"""Class weights, computed from the labels of the training split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tapfm.errors import LabelError, SettingError
from tapfm.tasks.target import Label

Weighting = Literal["balanced", "reference"]


@dataclass(frozen=True)
class ClassWeights:
    """Weights of the two classes in the loss of a target, and of the target (alpha) among several targets."""

    positive: float
    negative: float
    alpha: float

    @classmethod
    def from_labels(cls, target: str, training_labels: Sequence[Label]) -> ClassWeights:
        """Return the weights of the paper: w_1 = M / 2P, w_0 = M / 2(M - P), alpha = M / P.

        M is the number of labelled slides, P the number of positive slides.
        """
        slides, positives = _count_labels(target, training_labels)
        return cls(slides / (2 * positives), slides / (2 * (slides - positives)), slides / positives)


def compute_class_weights(
    training_labels: Mapping[str, Sequence[Label]], weighting: Weighting, smoothing: float
) -> dict[str, ClassWeights]:
    """Return the weights of every target. Only the weighting `reference` depends on the smoothing."""
    if weighting == "reference":
        return _reference_weights(training_labels, smoothing)
    if weighting != "balanced":
        valid = " or ".join(f"'{value}'" for value in get_args(Weighting))
        raise SettingError(f"weighting must be {valid}; got {weighting!r}.", hint="The paper uses 'balanced'.")
    return {target: ClassWeights.from_labels(target, labels) for target, labels in training_labels.items()}


def _reference_weights(training_labels: Mapping[str, Sequence[Label]], smoothing: float) -> dict[str, ClassWeights]:
    """Return the weights of the authors' scripts.

    The weight of a slide with the smoothed label t is t (1 - p) + (1 - t) p; p = P / M is the fraction of positives.
    Alpha is proportional to 1 / p, and the mean of all alphas is 1.
    """
    fractions = {}
    for target, labels in training_labels.items():
        slides, positives = _count_labels(target, labels)
        fractions[target] = positives / slides
    mean_inverse = sum(1 / p for p in fractions.values()) / len(fractions)
    t = 1 - smoothing / 2  # the smoothed label of a positive slide; 1 - t for a negative slide
    return {
        target: ClassWeights(
            positive=t * (1 - p) + (1 - t) * p,
            negative=(1 - t) * (1 - p) + t * p,
            alpha=1 / p / mean_inverse,
        )
        for target, p in fractions.items()
    }


def check_smoothing(smoothing: float) -> None:
    """Raise SettingError unless 0 <= smoothing < 1."""
    if not 0 <= smoothing < 1:
        raise SettingError(
            f"Label smoothing must be at least 0 and less than 1; got {smoothing}.",
            hint="The paper uses 0, the scripts of its authors use 0.1.",
        )


def _count_labels(target: str, training_labels: Sequence[Label]) -> tuple[int, int]:
    """Return the number of labelled slides and of positive slides. Raises LabelError if a class is missing."""
    labelled = [label for label in training_labels if label is not None]
    bad = [label for label in labelled if label not in (0, 1)]
    if bad:
        raise LabelError(
            f"Target '{target}': a label must be 0, 1 or missing; got {bad[0]!r}.",
            hint="Use 0 and 1 in the label column, and leave unknown labels empty.",
        )
    slides, positives = len(labelled), sum(1 for label in labelled if label == 1)
    if positives in (0, slides):
        missing = "positive" if positives == 0 else "negative"
        raise LabelError(
            f"Target '{target}' has no {missing} slide among the {slides} labelled slides of the training split.",
            hint="Remove the target, or split the cohort so that the training split has both classes.",
        )
    return slides, positives
