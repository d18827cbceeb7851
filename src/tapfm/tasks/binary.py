"""One target: is it there or not (eq. 4)."""

from __future__ import annotations

from torch import Tensor

from tapfm.contracts import Targets
from tapfm.tasks.cross_entropy import weighted_cross_entropy
from tapfm.tasks.weights import ClassWeights, Labels


class BinaryTask:
    """L_agg = w_y BCE(y, sigmoid(logit)), computed from the logit."""

    def __init__(self, target: str, weights: ClassWeights) -> None:
        self.targets = (target,)
        self.weights = weights

    @classmethod
    def from_training_labels(cls, target: str, training_labels: Labels) -> BinaryTask:
        """With class weights from the training split."""
        return cls(target, ClassWeights.of(target, training_labels))

    def loss(self, logits_C: Tensor, targets: Targets) -> Tensor:
        """Weighted cross-entropy of the one label; 0 when it is missing."""
        return weighted_cross_entropy(logits_C, targets, [self.weights.positive], [self.weights.negative])

    def probabilities(self, logits_C: Tensor) -> Tensor:
        """Sigmoid."""
        return logits_C.sigmoid()
