"""Mean pooling: all tiles have the same weight."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from tapfm.aggregators.heads import compute_contributions
from tapfm.contracts import BagOutput


class MeanPool(nn.Module):
    """Logits of the mean feature. The score of a tile is the logit of a slide that has only this tile."""

    def __init__(self, feature_size: int, targets: int = 1, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide. The raw attention `r_K` is not used."""
        tile_logits_CK = self.classifier(self.norm(z_KD)).T
        uniform_K = z_KD.new_full((len(z_KD),), 1 / len(z_KD))
        contributions = partial(compute_contributions, self.classifier, self.norm, uniform_K, z_KD)
        logits_C = self.classifier(self.norm(z_KD.mean(0)))
        return BagOutput(logits_C, None, tile_scores=tile_logits_CK, contributions=contributions)
