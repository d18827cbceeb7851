"""Task with several binary targets, such as EGFR, KRAS, MET and ALK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tapfm.contracts import Targets
from tapfm.tasks.binary_target import BinaryTarget
from tapfm.tasks.class_weights import ClassWeights, Weighting, check_smoothing, compute_class_weights
from tapfm.tasks.cross_entropy import encode_labels, weighted_cross_entropy
from tapfm.tasks.target import Label, TargetKind, TargetKinds


class MultiLabelTask:
    """L_agg = sum_j alpha_j w_{y_j} BCE_j, over the targets j that have a label."""

    def __init__(
        self, weights: Mapping[str, ClassWeights], *, smoothing: float = 0.0, kinds: TargetKinds | None = None
    ) -> None:
        check_smoothing(smoothing)
        self.target_kinds: dict[str, TargetKind] = {
            target: BinaryTarget() if kinds is None else kinds[target] for target in weights
        }
        self.weights = tuple(weights.values())
        self.smoothing = smoothing

    @classmethod
    def from_training_labels(
        cls,
        training_labels: Mapping[str, Sequence[Label]],
        *,
        smoothing: float = 0.0,
        weighting: Weighting = "balanced",
        kinds: TargetKinds | None = None,
    ) -> MultiLabelTask:
        """Build a task with class weights and alpha from the training labels of each target."""
        return cls(compute_class_weights(training_labels, weighting, smoothing), smoothing=smoothing, kinds=kinds)

    def loss(self, logits_C: Tensor, targets: Targets) -> Tensor:
        """Return the weighted sum over the targets that have a label."""
        positive = [w.alpha * w.positive for w in self.weights]
        negative = [w.alpha * w.negative for w in self.weights]
        return weighted_cross_entropy(logits_C, targets, positive, negative, self.smoothing)

    def encode(self, labels: Sequence[Label]) -> Targets:
        """Return the labels 0 and 1 as a tensor, and which labels are known; None (missing) is 0 and not known."""
        return encode_labels(labels)
