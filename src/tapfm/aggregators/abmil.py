"""Attention-based MIL (Ilse et al., 2018): a small network computes the tile weights."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from tapfm.aggregators.gated_attention import GatedAttention
from tapfm.aggregators.heads import compute_contributions
from tapfm.contracts import BagOutput


class Abmil(nn.Module):
    """h = relu(W z); weights = softmax over tiles of w (tanh(V h) * sigmoid(U h)); logits from the weighted sum of h.

    All targets share the tile weights. With `gated=False` there is no sigmoid.
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
        self.scores = GatedAttention(hidden, attention, gated=gated)
        self.norm = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(hidden, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide. The raw attention `r_K` is not used."""
        projected = self.project(z_KD)
        tile_weights = self.scores(projected).squeeze(0).softmax(0)
        logits_C = self.classifier(self.norm(tile_weights @ projected))
        contributions = partial(compute_contributions, self.classifier, self.norm, tile_weights, projected)
        return BagOutput(logits_C, tile_weights, contributions=contributions)
