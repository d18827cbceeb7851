"""Attention-based MIL (Ilse et al., 2018): a small network learns how much each tile counts, from its features."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from tapfm.aggregators.gated_scores import GatedScores
from tapfm.aggregators.heads import contributions
from tapfm.contracts import BagOutput


class Abmil(nn.Module):
    """h = relu(W z); weights = softmax over tiles of w (tanh(V h) * sigmoid(U h)); logits of the weighted sum of h.

    All targets share one attention. `gated = False` leaves the sigmoid out.
    """

    def __init__(
        self,
        feature_size: int,
        targets: int = 1,
        *,
        hidden: int = 512,
        attention: int = 256,
        gated: bool = True,
        dropout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(feature_size, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.scores = GatedScores(hidden, attention, gated=gated)
        self.norm = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(hidden, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide."""
        projected = self.project(z_KD)
        tile_weights = self.scores(projected).squeeze(0).softmax(0)
        logits_C = self.classifier(self.norm(tile_weights @ projected))
        given = partial(contributions, self.classifier, self.norm, tile_weights, projected)
        return BagOutput(logits_C, tile_weights, contributions=given)
