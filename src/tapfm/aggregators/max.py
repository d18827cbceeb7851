"""A slide is what its most telling tile is, target by target."""

from __future__ import annotations

from torch import Tensor, nn

from tapfm.contracts import BagOutput


class MaxPool(nn.Module):
    """The highest of the tiles' logits, for each target; only the tile that has it learns."""

    def __init__(self, feature_size: int, targets: int = 1, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        """Pool the tiles of one slide."""
        of_tiles = self.classifier(self.norm(z_KD)).T
        # amax shares its gradient among equal tiles, so that their order does not matter
        return BagOutput(of_tiles.amax(1), None, tile_scores=of_tiles)
