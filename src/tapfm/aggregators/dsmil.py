"""DSMIL (Li et al., 2021): a tile counts by its likeness to the most telling tile of the slide."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from tapfm.aggregators.heads import contributions, per_target_logits
from tapfm.contracts import BagOutput, Targets, Task


class Dsmil(nn.Module):
    """Two streams. One classifies tiles and finds each target's critical tile m; the other weighs tiles by it.

    weights_c = softmax over tiles of <q_i, q_m> / sqrt(size); bag_c = weighted sum of v; logit_c = <W_c, bag_c> + b_c.
    A target's logit is of its own bag alone; with one target this is the original. The critical tiles' logits are
    learnt through a loss of their own, `instance_weight` of the whole: 0.5 counts both streams the same.
    `nonlinear` queries are a network of two layers; with `values` v is relu(V z), else z itself.
    """

    def __init__(
        self,
        feature_size: int,
        targets: int = 1,
        *,
        attention: int = 128,
        nonlinear: bool = True,
        values: bool = False,
        dropout: float = 0.0,
        instance_weight: float = 0.5,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.instance_classifier = nn.Linear(feature_size, targets)
        self.query: nn.Module = nn.Linear(feature_size, attention)
        if nonlinear:
            self.query = nn.Sequential(self.query, nn.ReLU(), nn.Linear(attention, attention), nn.Tanh())
        self.value: nn.Module = nn.Identity()
        if values:
            self.value = nn.Sequential(nn.Dropout(dropout), nn.Linear(feature_size, feature_size), nn.ReLU())
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)
        self.instance_share = instance_weight / (1 - instance_weight)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide."""
        of_tiles = self.instance_classifier(z_KD)  # (K, C)
        highest, critical = of_tiles.max(0)
        queries = self.query(z_KD)
        likeness = queries[critical] @ queries.T / math.sqrt(queries.shape[1])
        tile_weights = likeness.softmax(1)  # (C, K)
        values_KD = self.value(z_KD)
        logits_C = per_target_logits(self.classifier, self.norm(tile_weights @ values_KD))

        def extra_loss(task: Task, targets: Targets) -> Tensor:
            return self.instance_share * task.loss(highest, targets)

        given = partial(contributions, self.classifier, self.norm, tile_weights, values_KD)
        return BagOutput(logits_C, tile_weights, extra_loss=extra_loss, contributions=given)
