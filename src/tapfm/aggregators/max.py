"""Max pooling: the logit of a slide is the highest logit of its tiles."""

from __future__ import annotations

from torch import Tensor, nn

from tapfm.contracts import BagOutput


class MaxPool(nn.Module):
    """The highest tile logit of each target. Only the tile with this logit receives a gradient."""

    def __init__(self, feature_size: int, targets: int = 1, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide. The raw attention `r_K` is not used."""
        tile_logits_CK = self.classifier(self.norm(z_KD)).T
        # amax distributes its gradient over ties, so the order of the tiles does not matter
        return BagOutput(tile_logits_CK.amax(1), None, tile_scores=tile_logits_CK)
