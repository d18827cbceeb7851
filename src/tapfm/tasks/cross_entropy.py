"""Weighted cross-entropy over the labels that are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from tapfm.contracts import Targets


def weighted_cross_entropy(
    logits_C: Tensor, targets: Targets, positive: Sequence[float], negative: Sequence[float], smoothing: float = 0.0
) -> Tensor:
    """Sum over targets of weight x BCE, from logits; a missing label contributes nothing.

    The weight is that of the label as it is; smoothing moves only what the probability is compared with.
    """
    labels_C = targets.labels_C.to(logits_C)
    weight_C = labels_C * logits_C.new_tensor(positive) + (1 - labels_C) * logits_C.new_tensor(negative)
    smoothed_C = labels_C * (1 - smoothing) + smoothing / 2
    loss_C = F.binary_cross_entropy_with_logits(logits_C, smoothed_C, weight_C, reduction="none")
    return loss_C.masked_fill(~targets.known_C.to(logits_C.device), 0.0).sum()
