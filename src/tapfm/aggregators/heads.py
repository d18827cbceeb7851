"""Heads: the logits of aggregators in which each target has a bag of its own, and what each tile gives to a logit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tapfm.contracts import Contributions

_ROWS = 8192  # tiles at a time: a copy in float64 of all features of a large slide would take gigabytes


def per_target_logits(classifier: nn.Linear, bags: Iterable[Tensor]) -> Tensor:
    """Give logit c of bag c, <W_c, bag_c> + b_c: the diagonal of what the classifier says of all bags, (C,)."""
    return torch.stack([classifier(bag)[target] for target, bag in enumerate(bags)])


def contributions(classifier: nn.Linear, norm: nn.Module, weights: Tensor, values_KD: Tensor) -> Contributions:
    """Take logits = classifier(norm(sum_i a_i v_i)) apart into what each tile gives, exactly; in float64.

    `weights` are (K,), or (C, K) where each target has a bag of its own. Without a norm tile i gives a_i <W, v_i>, and
    the constant is b. A LayerNorm takes the mean out of each tile by itself and divides by the deviation of the whole
    bag: a_i sum_d W_d gamma_d (v_id - mean(v_i)) / sigma(Z), and the constant is b + <W, beta>.
    """
    W_CD, b_C = classifier.weight.double(), classifier.bias.double()
    a_CK = weights.double().expand(len(W_CD), -1)
    if not isinstance(norm, nn.LayerNorm):
        return Contributions(a_CK * _projected(values_KD, W_CD), b_C)
    bags_CD = _sum_of(values_KD, a_CK)
    sigma_C = (bags_CD.var(1, correction=0) + norm.eps).sqrt()
    scaled_CD = W_CD * norm.weight.double()
    # <W gamma, v - mean(v)> = <W gamma - mean(W gamma), v>
    centred_CD = scaled_CD - scaled_CD.mean(1, keepdim=True)
    given_CK = a_CK * _projected(values_KD, centred_CD) / sigma_C[:, None]
    return Contributions(given_CK, b_C + W_CD @ norm.bias.double())


def _projected(values_KD: Tensor, W_CD: Tensor) -> Tensor:
    """Give <W_c, v_i>, (C, K)."""
    return torch.cat([W_CD @ part.double().T for part in values_KD.split(_ROWS)], 1)


def _sum_of(values_KD: Tensor, a_CK: Tensor) -> Tensor:
    """Give sum_i a_ci v_i, (C, D)."""
    parts = zip(a_CK.split(_ROWS, 1), values_KD.split(_ROWS), strict=True)
    return torch.stack([of_tiles @ part.double() for of_tiles, part in parts]).sum(0)
