"""Several targets at once, each there or not: EGFR, KRAS, MET, ALK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tapfm.contracts import Targets
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.cross_entropy import encode_labels, weighted_cross_entropy
from tapfm.tasks.target import Label, TargetKind
from tapfm.tasks.weights import ClassWeights, Weighting, check_smoothing, class_weights


class MultiLabelTask:
    """L_agg = sum_j alpha_j w_{y_j} BCE_j; a missing label drops its target from the sum."""

    def __init__(self, weights: Mapping[str, ClassWeights], *, smoothing: float = 0.0) -> None:
        check_smoothing(smoothing)
        self.targets: dict[str, TargetKind] = {target: BinaryTarget() for target in weights}
        self.weights = tuple(weights.values())
        self.smoothing = smoothing

    @classmethod
    def from_training_labels(
        cls,
        training_labels: Mapping[str, Sequence[Label]],
        *,
        smoothing: float = 0.0,
        weighting: Weighting = "balanced",
    ) -> MultiLabelTask:
        """With class weights and alpha from the training split, each target by its own labelled slides."""
        return cls(class_weights(training_labels, weighting, smoothing), smoothing=smoothing)

    def loss(self, logits_C: Tensor, targets: Targets) -> Tensor:
        """Weighted sum over the targets whose label is known."""
        positive = [w.alpha * w.positive for w in self.weights]
        negative = [w.alpha * w.negative for w in self.weights]
        return weighted_cross_entropy(logits_C, targets, positive, negative, self.smoothing)

    def encode(self, labels: Sequence[Label]) -> Targets:
        """Return 0, 1 and None (missing) as tensors."""
        return encode_labels(labels)
