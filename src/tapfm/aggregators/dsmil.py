"""DSMIL (Li et al., 2021): tiles are weighted by their similarity to the critical tile, which has the highest score."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from tapfm.aggregators.heads import compute_contributions, compute_target_logits
from tapfm.contracts import BagOutput, Targets, Task


class Dsmil(nn.Module):
    """Two streams: one selects the critical tile m of each target, the other weights tiles by similarity to it.

    weights_c = softmax over tiles of <q_i, q_m> / sqrt(size); Z_c = weighted sum of v; logit_c = <W_c, Z_c> + b_c.
    The logit of a target depends only on its own pooled feature Z_c; with one target this is the original DSMIL.

    nonlinear: compute the queries q with two layers instead of one.
    values: v = relu(V z) instead of v = z.
    instance_weight: loss of the critical tiles as a fraction of the total loss; 0.5 weights both streams equally.
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
        self.instance_loss_factor = instance_weight / (1 - instance_weight)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide. The raw attention `r_K` is not used."""
        instance_logits_KC = self.instance_classifier(z_KD)
        critical_logits_C, critical_tiles = instance_logits_KC.max(0)
        queries = self.query(z_KD)
        similarity_CK = queries[critical_tiles] @ queries.T / math.sqrt(queries.shape[1])
        a_CK = similarity_CK.softmax(1)
        values_KD = self.value(z_KD)
        logits_C = compute_target_logits(self.classifier, self.norm(a_CK @ values_KD))

        def extra_loss(task: Task, targets: Targets) -> Tensor:
            return self.instance_loss_factor * task.loss(critical_logits_C, targets)

        contributions = partial(compute_contributions, self.classifier, self.norm, a_CK, values_KD)
        return BagOutput(logits_C, a_CK, extra_loss=extra_loss, contributions=contributions)
