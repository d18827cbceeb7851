"""VarMIL (Schirris et al., 2022): ABMIL that also uses the variance of the tile features."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tapfm.aggregators.gated_attention import GatedAttention
from tapfm.aggregators.heads import compute_contributions
from tapfm.contracts import BagOutput, Contributions


class VarMil(nn.Module):
    """Tile weights of `Abmil`; logits from the weighted mean and the weighted variance, concatenated.

    The variance is sum_i a_i (h_i - mean)^2, without a correction for the number of tiles. It is 0 for a single tile.
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
        self.norm = nn.LayerNorm(2 * hidden) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(2 * hidden, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide. The raw attention `r_K` is not used."""
        projected = self.project(z_KD)
        tile_weights = self.scores(projected).squeeze(0).softmax(0)
        mean = tile_weights @ projected
        variance = tile_weights @ (projected - mean) ** 2
        logits_C = self.classifier(self.norm(torch.cat([mean, variance])))
        contributions = partial(self._compute_contributions, tile_weights, projected, mean)
        return BagOutput(logits_C, tile_weights, contributions=contributions)

    def _compute_contributions(self, tile_weights: Tensor, projected: Tensor, mean: Tensor) -> Contributions:
        """Decompose the logits into contributions of tiles.

        The pooled feature is the weighted mean and the weighted variance, concatenated. The mean is a weighted sum over
        tiles. So is the variance, if the mean inside it is treated as a constant.
        """
        values = torch.cat([projected, (projected - mean) ** 2], 1)
        return compute_contributions(self.classifier, self.norm, tile_weights, values)
