"""Weighted cross-entropy with missing labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tapfm.contracts import Targets
from tapfm.errors import LabelError
from tapfm.tasks.target import Label


def encode_labels(labels: Sequence[Label], *, device: torch.device | str = "cpu") -> Targets:
    """Return the labels 0 and 1 as a tensor, and which labels are known; None (missing) is 0 and not known."""
    bad = [label for label in labels if label is not None and label not in (0, 1)]
    if bad:
        raise LabelError(f"A label must be 0, 1 or missing; got {bad[0]!r}.", hint="Use 0 and 1 in the label column.")
    known = [label is not None for label in labels]
    values = [float(label == 1) for label in labels]
    return Targets(torch.tensor(values, device=device), torch.tensor(known, device=device))


def weighted_cross_entropy(
    logits_C: Tensor, targets: Targets, positive: Sequence[float], negative: Sequence[float], smoothing: float = 0.0
) -> Tensor:
    """Return the sum of weight x BCE (from logits) over the targets that have a label.

    positive, negative: class weights of each target. Smoothing changes the label in the BCE, not the weight.
    """
    labels_C = targets.labels_C.to(logits_C)
    positive_C, negative_C = (_tensor_like(logits_C, weights) for weights in (positive, negative))
    weight_C = labels_C * positive_C + (1 - labels_C) * negative_C
    smoothed_C = labels_C * (1 - smoothing) + smoothing / 2
    loss_C = F.binary_cross_entropy_with_logits(logits_C, smoothed_C, weight_C, reduction="none")
    return loss_C.masked_fill(~targets.known_C.to(logits_C.device), 0.0).sum()


def _tensor_like(tensor: Tensor, values: Sequence[float]) -> Tensor:
    """Return values with the dtype and device of a tensor, without the synchronisation of `new_tensor`."""
    return torch.tensor(values, dtype=tensor.dtype).to(tensor.device, non_blocking=True)
