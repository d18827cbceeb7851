"""Class weights, from the labels of the training split alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tapfm.errors import LabelError

Labels = Sequence[int | float | None]


@dataclass(frozen=True)
class ClassWeights:
    """Of one target, with P positives among M labelled slides: w_1 = M / 2P, w_0 = M / 2(M - P), alpha = M / P."""

    positive: float
    negative: float
    alpha: float

    @classmethod
    def of(cls, target: str, training_labels: Labels) -> ClassWeights:
        """Count one target's training labels; missing ones (None) do not count."""
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
        return cls(slides / (2 * positives), slides / (2 * (slides - positives)), slides / positives)
