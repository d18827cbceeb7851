"""The paper's aggregator: the ViT's own CLS attention weighs the tiles (eqs. 2-3).

K tiles, D feature size, C targets.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from tapfm.aggregators.heads import contributions
from tapfm.contracts import BagOutput
from tapfm.errors import SettingError

# A bag whose raw attentions differ by less than this part of the largest says nothing about which tile matters.
_FLAT_RANGE = 1e-6


def minmax_attention(r_K: Tensor) -> Tensor:
    """minmax(r): 0 for the tile of least attention, 1 for that of most, over the whole bag and never a part of it.

    K = 1 and equal attentions give 0 for every tile, with gradient 0: min-max would divide by nothing. amin and amax
    share their gradient among ties, so that the result does not depend on the order of the tiles.
    """
    lowest, highest = r_K.amin(), r_K.amax()
    spread = highest - lowest
    flat = spread <= _FLAT_RANGE * highest
    # Both `where` are needed: the inner one keeps the unused branch finite, or its NaN would reach the gradient.
    scaled_K = (r_K - lowest) / torch.where(flat, torch.ones_like(spread), spread)
    return torch.where(flat, torch.zeros_like(scaled_K), scaled_K)


def tile_weights(r_K: Tensor, tau: float = 1.0) -> Tensor:
    """a = softmax(minmax(r) / tau); uniform where the attentions say nothing."""
    return (minmax_attention(r_K) / tau).softmax(0)


def check_tau(tau: float) -> None:
    """Refuse a temperature that is none."""
    if not (0 < tau < math.inf):
        raise SettingError(f"tau must be positive; got {tau}.", hint="The paper uses tau = 1.")


class ClsAttention(nn.Module):
    """Z = sum_i a_i z_i (eq. 2), logits = W Z + b (eq. 3)."""

    def __init__(self, feature_size: int, targets: int = 1, *, tau: float = 1.0, layer_norm: bool = False) -> None:
        super().__init__()
        check_tau(tau)
        self.tau = tau
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:
        """Pool the tiles of one slide."""
        a_K = tile_weights(r_K, self.tau)
        bag_D = a_K @ z_KD
        logits_C = self.classifier(self.norm(bag_D))
        return BagOutput(logits_C, a_K, contributions=partial(contributions, self.classifier, self.norm, a_K, z_KD))
