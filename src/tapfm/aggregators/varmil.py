"""VarMIL (Schirris et al., 2022): ABMIL that also sees how much the tiles of a slide differ from each other."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tapfm.aggregators.gated_scores import GatedScores
from tapfm.aggregators.heads import contributions
from tapfm.contracts import BagOutput, Contributions


class VarMil(nn.Module):
    """Tiles weighed as in `Abmil`; logits of their weighted mean and weighted variance, side by side.

    The variance is the plain one, sum_i a_i (h_i - mean)^2: weights that are learnt leave no count of tiles to
    correct it by. A slide of one tile has the variance 0.
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
        self.norm = nn.LayerNorm(2 * hidden) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(2 * hidden, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide."""
        projected = self.project(z_KD)
        tile_weights = self.scores(projected).squeeze(0).softmax(0)
        mean = tile_weights @ projected
        variance = tile_weights @ (projected - mean) ** 2
        logits_C = self.classifier(self.norm(torch.cat([mean, variance])))
        return BagOutput(logits_C, tile_weights, contributions=partial(self._given, tile_weights, projected, mean))

    def _given(self, tile_weights: Tensor, projected: Tensor, mean: Tensor) -> Contributions:
        """Take the logits apart: both halves of the bag are weighted sums over tiles, once the mean is known."""
        both = torch.cat([projected, (projected - mean) ** 2], 1)
        return contributions(self.classifier, self.norm, tile_weights, both)
