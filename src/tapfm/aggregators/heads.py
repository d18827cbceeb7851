"""Linear heads: logits if each target has its own pooled feature, and contributions of tiles to logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tapfm.contracts import Contributions

_CHUNK_TILES = 8192  # a float64 copy of all features of a large slide would need gigabytes


def compute_target_logits(classifier: nn.Linear, pooled: Iterable[Tensor]) -> Tensor:
    """Compute logit_c = <W_c, Z_c> + b_c, where Z_c is the pooled feature of target c; the result has shape (C,)."""
    return torch.stack([classifier(Z_D)[target] for target, Z_D in enumerate(pooled)])


def compute_contributions(classifier: nn.Linear, norm: nn.Module, weights: Tensor, values_KD: Tensor) -> Contributions:
    """Decompose logits = classifier(norm(sum_i a_i v_i)) exactly into contributions of tiles, in float64.

    `weights` has shape (K,), or (C, K) if each target has its own tile weights. Without a norm, tile i contributes
    a_i <W, v_i>, and the constant is b. A LayerNorm subtracts a mean, which can be done per tile, and divides by the
    standard deviation of the pooled feature Z: tile i contributes
    a_i sum_d W_d gamma_d (v_id - mean(v_i)) / sigma(Z), and the constant is b + <W, beta>.
    """
    W_CD, b_C = classifier.weight.double(), classifier.bias.double()
    a_CK = weights.double().expand(len(W_CD), -1)
    if not isinstance(norm, nn.LayerNorm):
        return Contributions(a_CK * _project(values_KD, W_CD), b_C)
    Z_CD = _weighted_sum(values_KD, a_CK)
    sigma_C = (Z_CD.var(1, correction=0) + norm.eps).sqrt()
    scaled_CD = W_CD * norm.weight.double()
    # <W gamma, v - mean(v)> = <W gamma - mean(W gamma), v>
    centred_CD = scaled_CD - scaled_CD.mean(1, keepdim=True)
    per_tile_CK = a_CK * _project(values_KD, centred_CD) / sigma_C[:, None]
    return Contributions(per_tile_CK, b_C + W_CD @ norm.bias.double())


def _project(values_KD: Tensor, W_CD: Tensor) -> Tensor:
    """Return <W_c, v_i> in float64, with shape (C, K)."""
    return torch.cat([W_CD @ chunk_KD.double().T for chunk_KD in values_KD.split(_CHUNK_TILES)], 1)


def _weighted_sum(values_KD: Tensor, a_CK: Tensor) -> Tensor:
    """Return sum_i a_ci v_i in float64, with shape (C, D)."""
    chunks = zip(a_CK.split(_CHUNK_TILES, 1), values_KD.split(_CHUNK_TILES), strict=True)
    return torch.stack([weights_CK @ chunk_KD.double() for weights_CK, chunk_KD in chunks]).sum(0)
