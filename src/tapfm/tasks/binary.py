"""Task with one binary target (eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tapfm.contracts import Targets
from tapfm.tasks.binary_target import NUMBER_LABELS
from tapfm.tasks.class_weights import ClassWeights, Weighting, check_smoothing, compute_class_weights
from tapfm.tasks.cross_entropy import encode_labels, weighted_cross_entropy
from tapfm.tasks.target import Label, TargetKind


class BinaryTask:
    """L_agg = w_y BCE(y, sigmoid(logit)), computed from the logit."""

    def __init__(
        self, target: str, weights: ClassWeights, *, smoothing: float = 0.0, kind: TargetKind = NUMBER_LABELS
    ) -> None:
        check_smoothing(smoothing)
        self.target_kinds: dict[str, TargetKind] = {target: kind}
        self.weights = weights
        self.smoothing = smoothing

    @classmethod
    def from_training_labels(
        cls,
        target: str,
        training_labels: Sequence[Label],
        *,
        smoothing: float = 0.0,
        weighting: Weighting = "balanced",
        kind: TargetKind = NUMBER_LABELS,
    ) -> BinaryTask:
        """Build a task with class weights from the labels of the training split."""
        weights = compute_class_weights({target: training_labels}, weighting, smoothing)
        return cls(target, weights[target], smoothing=smoothing, kind=kind)

    def loss(self, logits_C: Tensor, targets: Targets) -> Tensor:
        """Return the weighted cross-entropy; 0 if the label is missing."""
        positive, negative = [self.weights.positive], [self.weights.negative]
        return weighted_cross_entropy(logits_C, targets, positive, negative, self.smoothing)

    def encode(self, labels: Sequence[Label]) -> Targets:
        """Return the labels 0 and 1 as a tensor, and which labels are known; None (missing) is 0 and not known."""
        return encode_labels(labels)
