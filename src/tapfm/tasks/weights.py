"""Class weights, from the labels of the training split alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tapfm.errors import LabelError, SettingError
from tapfm.tasks.target import Label

Weighting = Literal["balanced", "reference"]


@dataclass(frozen=True)
class ClassWeights:
    """How much a slide of either class weighs in one target's loss, and the target (alpha) among several."""

    positive: float
    negative: float
    alpha: float

    @classmethod
    def of(cls, target: str, training_labels: Sequence[Label]) -> ClassWeights:
        """As in the paper, P positives among M labelled slides: w_1 = M / 2P, w_0 = M / 2(M - P), alpha = M / P."""
        slides, positives = _count_labels(target, training_labels)
        return cls(slides / (2 * positives), slides / (2 * (slides - positives)), slides / positives)


def class_weights(
    training_labels: Mapping[str, Sequence[Label]], weighting: Weighting, smoothing: float
) -> dict[str, ClassWeights]:
    """Weigh every target; only `reference` depends on the smoothing."""
    if weighting == "reference":
        return _reference_weights(training_labels, smoothing)
    if weighting != "balanced":
        valid = " or ".join(f"'{value}'" for value in get_args(Weighting))
        raise SettingError(f"weighting must be {valid}; got {weighting!r}.", hint="The paper's is 'balanced'.")
    return {target: ClassWeights.of(target, labels) for target, labels in training_labels.items()}


def _reference_weights(training_labels: Mapping[str, Sequence[Label]], smoothing: float) -> dict[str, ClassWeights]:
    """As in the authors' scripts, with p = P / M and t the smoothed label: t (1 - p) + (1 - t) p, alpha as 1 / p.

    The alphas have the mean 1, so that a single target has alpha = 1.
    """
    shares = {}
    for target, labels in training_labels.items():
        slides, positives = _count_labels(target, labels)
        shares[target] = positives / slides
    mean_inverse = sum(1 / share for share in shares.values()) / len(shares)
    kept = 1 - smoothing / 2  # the smoothed label of a positive slide; that of a negative one is 1 - kept
    return {
        target: ClassWeights(
            positive=kept * (1 - share) + (1 - kept) * share,
            negative=(1 - kept) * (1 - share) + kept * share,
            alpha=1 / share / mean_inverse,
        )
        for target, share in shares.items()
    }


def check_smoothing(smoothing: float) -> None:
    """Refuse a smoothing that would leave nothing of the label."""
    if not 0 <= smoothing < 1:
        raise SettingError(
            f"Label smoothing must be from 0 to below 1; got {smoothing}.",
            hint="The paper uses 0, its authors' scripts 0.1.",
        )


def _count_labels(target: str, training_labels: Sequence[Label]) -> tuple[int, int]:
    """Count one target's labelled slides and its positives; missing labels (None) do not count."""
    labelled = [label for label in training_labels if label is not None]
    bad = [label for label in labelled if label not in (0, 1)]
    if bad:
        raise LabelError(
            f"Target '{target}': a label must be 0, 1 or missing; got {bad[0]!r}.",
            hint="Code the label column as 0/1 and leave unknown labels empty.",
        )
    slides, positives = len(labelled), sum(1 for label in labelled if label == 1)
    if positives in (0, slides):
        missing = "positive" if positives == 0 else "negative"
        raise LabelError(
            f"Target '{target}' has no {missing} slide among the {slides} labelled slides of the training split.",
            hint="Drop the target, or split so that the training part holds both classes.",
        )
    return slides, positives
