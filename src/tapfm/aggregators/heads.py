"""The head of aggregators in which each target has a bag of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def own_logits(classifier: nn.Linear, bags: Iterable[Tensor]) -> Tensor:
    """Give logit c of bag c, <W_c, bag_c> + b_c: the diagonal of what the classifier says of all bags, (C,)."""
    return torch.stack([classifier(bag)[target] for target, bag in enumerate(bags)])
