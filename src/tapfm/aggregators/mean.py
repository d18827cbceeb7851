"""The plainest aggregator: every tile counts the same."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from tapfm.aggregators.heads import contributions
from tapfm.contracts import BagOutput


class MeanPool(nn.Module):
    """Logits of the mean feature. It weighs nothing: a tile is shown by the logits it would have on its own."""

    def __init__(self, feature_size: int, targets: int = 1, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide."""
        of_tiles = self.classifier(self.norm(z_KD)).T
        same = z_KD.new_full((len(z_KD),), 1 / len(z_KD))
        given = partial(contributions, self.classifier, self.norm, same, z_KD)
        return BagOutput(self.classifier(self.norm(z_KD.mean(0))), None, tile_scores=of_tiles, contributions=given)
