"""The paper's aggregator: tiles are weighted by the encoder's CLS attention inside each tile (eqs. 2-3).

K tiles, D feature size, C targets.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from tapfm.aggregators.heads import compute_contributions
from tapfm.contracts import BagOutput
from tapfm.errors import SettingError

# If all raw attentions of a bag are within this fraction of the largest, they are treated as equal.
_EQUAL_TOLERANCE = 1e-6


def minmax_scale(r_K: Tensor) -> Tensor:
    """Scale the raw attentions of a whole bag to the range from 0 to 1: minmax(r).

    With one tile or equal attentions, where min-max would divide by 0, the result and its gradient are 0 for every
    tile. amin and amax distribute their gradient over ties, so the order of the tiles does not matter.
    """
    lowest, highest = r_K.amin(), r_K.amax()
    difference = highest - lowest
    equal = difference <= _EQUAL_TOLERANCE * highest
    # Without the inner `where`, the division by 0 would make the gradient NaN.
    scaled_K = (r_K - lowest) / torch.where(equal, torch.ones_like(difference), difference)
    return torch.where(equal, torch.zeros_like(scaled_K), scaled_K)


def compute_tile_weights(r_K: Tensor, tau: float = 1.0) -> Tensor:
    """Compute a = softmax(minmax(r) / tau). Equal attentions give uniform weights."""
    return (minmax_scale(r_K) / tau).softmax(0)


def check_tau(tau: float) -> None:
    if not (0 < tau < math.inf):
        raise SettingError(f"tau must be positive and finite; got {tau}.", hint="The paper uses tau = 1.")


class ClsAttention(nn.Module):
    """Weight tiles by the CLS attention of the encoder: Z = sum_i a_i z_i (eq. 2), logits = W Z + b (eq. 3)."""

    def __init__(self, feature_size: int, targets: int = 1, *, tau: float = 1.0, layer_norm: bool = False) -> None:
        super().__init__()
        check_tau(tau)
        self.tau = tau
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:
        """Pool the tiles of one slide."""
        a_K = compute_tile_weights(r_K, self.tau)
        bag_D = a_K @ z_KD
        logits_C = self.classifier(self.norm(bag_D))
        contributions = partial(compute_contributions, self.classifier, self.norm, a_K, z_KD)
        return BagOutput(logits_C, a_K, contributions=contributions)
