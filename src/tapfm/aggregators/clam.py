"""CLAM (Lu et al., 2021): ABMIL with an instance loss that separates tiles of high and low attention."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfm.aggregators.gated_attention import GatedAttention
from tapfm.aggregators.heads import compute_contributions, compute_target_logits
from tapfm.contracts import BagOutput, Targets, Task


class Clam(nn.Module):
    """`Abmil` with an instance loss. `branches`: "single" (one attention for all targets) or "multi" (one per target).

    Each target has two tile classifiers, one per slide label. The classifier of the slide's label is trained with the
    `instances` tiles of highest attention as positives and those of lowest attention as negatives; the other one with
    the tiles of highest attention as negatives. The instance loss is the mean of the two, as in the original.

    instance_weight: fraction of the total loss.
    margin: 1 is the smooth top-1 SVM loss of the original, 0 is cross-entropy.
    """

    def __init__(
        self,
        feature_size: int,
        targets: int = 1,
        *,
        hidden: int = 512,
        attention: int = 256,
        gated: bool = True,
        branches: str = "single",
        instances: int = 8,
        instance_weight: float = 0.3,
        margin: float = 1.0,
        dropout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(feature_size, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.scores = GatedAttention(hidden, attention, outputs=targets if branches == "multi" else 1, gated=gated)
        self.norm = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(hidden, targets)
        self.instance_classifiers = nn.Linear(hidden, targets * 2 * 2)  # target, slide label, tile class
        self.multi = branches == "multi"
        self.instances, self.margin = instances, margin
        self.instance_loss_factor = instance_weight / (1 - instance_weight)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide. The raw attention `r_K` is not used."""
        projected = self.project(z_KD)
        tile_weights = self.scores(projected).softmax(1)  # (1 or C, K)
        bags = self.norm(tile_weights @ projected)
        logits_C = compute_target_logits(self.classifier, bags) if self.multi else self.classifier(bags.squeeze(0))

        def extra_loss(task: Task, targets: Targets) -> Tensor:  # noqa: ARG001
            instance_logits = self.instance_classifiers(projected).unflatten(1, (-1, 2, 2))
            attention_CK = tile_weights.detach().expand(instance_logits.shape[1], -1)
            losses = [
                self._instance_loss(
                    instance_logits[:, target, label], instance_logits[:, target, 1 - label], attention_CK[target]
                )
                for target, label in enumerate(targets.labels_C.int().tolist())
                if targets.known_C[target]
            ]
            return self.instance_loss_factor * sum(losses, start=projected.new_zeros(()))

        reported_weights = tile_weights if self.multi else tile_weights.squeeze(0)
        contributions = partial(compute_contributions, self.classifier, self.norm, reported_weights, projected)
        return BagOutput(logits_C, reported_weights, extra_loss=extra_loss, contributions=contributions)

    def _instance_loss(self, label_logits: Tensor, other_logits: Tensor, attention_K: Tensor) -> Tensor:
        """Compute the instance loss of one target from the logits (K, 2) of its two tile classifiers."""
        count = min(self.instances, len(attention_K))
        highest, lowest = (attention_K.topk(count, largest=largest).indices for largest in (True, False))
        positive, negative = torch.ones_like(highest), torch.zeros_like(lowest)
        label_loss = self._margin_loss(label_logits[torch.cat([highest, lowest])], torch.cat([positive, negative]))
        return (label_loss + self._margin_loss(other_logits[highest], negative)) / 2

    def _margin_loss(self, logits: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(logits + self.margin * (1 - F.one_hot(classes, 2)), classes)
