"""CLAM (Lu et al., 2021): attention, and tiles of high and of low attention that learn to be told apart."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfm.aggregators.gated_scores import GatedScores
from tapfm.aggregators.heads import contributions, per_target_logits
from tapfm.contracts import BagOutput, Targets, Task


class Clam(nn.Module):
    """Pools as `Abmil` does; `branches` is "single" (one attention for all targets) or "multi" (one for each).

    Each target has two classifiers of tiles, one for slides of either label. That of the slide's label learns that the
    `instances` tiles of highest attention are in its class and those of lowest are not; the other that the highest are
    not in its. Their mean, as the original has it, is `instance_weight` of the whole loss. `margin` 1 is the original's
    smooth top-1 SVM, which asks for a lead of 1; 0 is plain cross-entropy.
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
        self.scores = GatedScores(hidden, attention, rows=targets if branches == "multi" else 1, gated=gated)
        self.norm = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(hidden, targets)
        self.instance_classifiers = nn.Linear(hidden, targets * 2 * 2)  # target, label of the slide, class of the tile
        self.multi = branches == "multi"
        self.instances, self.margin = instances, margin
        self.instance_share = instance_weight / (1 - instance_weight)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide."""
        projected = self.project(z_KD)
        tile_weights = self.scores(projected).softmax(1)  # (1 or C, K)
        bags = self.norm(tile_weights @ projected)
        logits_C = per_target_logits(self.classifier, bags) if self.multi else self.classifier(bags.squeeze(0))

        def extra_loss(task: Task, targets: Targets) -> Tensor:  # noqa: ARG001 - a loss of its own
            said = self.instance_classifiers(projected).unflatten(1, (-1, 2, 2))
            ranks = tile_weights.detach().expand(said.shape[1], -1)
            losses = [
                self._instance_loss(said[:, target, label], said[:, target, 1 - label], ranks[target])
                for target, label in enumerate(targets.labels_C.int().tolist())
                if targets.known_C[target]
            ]
            return self.instance_share * sum(losses, start=projected.new_zeros(()))

        shown = tile_weights if self.multi else tile_weights.squeeze(0)
        given = partial(contributions, self.classifier, self.norm, shown, projected)
        return BagOutput(logits_C, shown, extra_loss=extra_loss, contributions=given)

    def _instance_loss(self, of_label: Tensor, of_other: Tensor, rank: Tensor) -> Tensor:
        """Compare what the two classifiers say of tiles, (K, 2) each, with what their attention says."""
        count = min(self.instances, len(rank))
        highest, lowest = (rank.topk(count, largest=largest).indices for largest in (True, False))
        inside, outside = torch.ones_like(highest), torch.zeros_like(lowest)
        of_both = self._told_apart(of_label[torch.cat([highest, lowest])], torch.cat([inside, outside]))
        return (of_both + self._told_apart(of_other[highest], outside)) / 2

    def _told_apart(self, logits: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(logits + self.margin * (1 - F.one_hot(classes, 2)), classes)
