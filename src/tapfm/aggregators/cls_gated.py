"""Our own aggregator: the ViT's CLS attention is where it starts, and a gate learns where each target looks instead.

K tiles, D feature size, C targets. The score of tile i for target c is

    s_ci = minmax(r)_i / tau + gate_ci,      gate_ci = w_c . (tanh(V x_i) * sigmoid(U x_i)),      x_i = norm(z_i)

and a_c = softmax over tiles of s_c, Z_c = sum_i a_ci z_i, logit_c = <W_c, Z_c> + b_c.

As a prior multiplied by a likelihood: a_ci is proportional to exp(minmax(r)_i / tau), the encoder's own weight of the
tile as in eq. 2, times exp(gate_ci). Three things follow.

- w starts at 0, so that training starts at `cls-attention` exactly: the same logits, the same gradient of the encoder.
- The attention stays inside every weight, so that the gradient at r, by which the encoder learns where to look
  (eq. 6), is there at every step, however much the gate has learnt.
- A logit is a sum over tiles, logit_c = b_c + sum_i a_ci <W_c, z_i>, in the encoder's own features: what a tile gives
  to a target is known exactly (with a LayerNorm before the head, in the form that `heads.contributions` gives).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfm.aggregators.cls_attention import check_tau, minmax_attention
from tapfm.aggregators.gated_scores import GatedScores
from tapfm.aggregators.heads import contributions, per_target_logits
from tapfm.contracts import BagOutput


class ClsGated(nn.Module):
    """A learned gate for each target, with the encoder's attention as its prior."""

    def __init__(
        self,
        feature_size: int,
        targets: int = 1,
        *,
        tau: float = 1.0,
        attention: int = 128,
        dropout: float = 0.0,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        check_tau(tau)
        self.tau = tau
        self.norm = nn.LayerNorm(feature_size) if layer_norm else nn.Identity()
        self.classifier = nn.Linear(feature_size, targets)  # made first: a seed gives that of cls-attention
        self.dropout = nn.Dropout(dropout)
        self.gates = GatedScores(feature_size, attention, rows=targets)
        nn.init.zeros_(self.gates.score.weight)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:
        """Pool the tiles of one slide."""
        # Features of one encoder are ten times as long as those of another: without a norm tanh and sigmoid would be
        # saturated for one and linear for the other. It has no parameters: V and U would undo them.
        x_KD = F.layer_norm(z_KD, z_KD.shape[1:])
        gate_CK = self.gates(self.dropout(x_KD))
        prior_K = minmax_attention(r_K) / self.tau
        a_CK = torch.stack([(prior_K + gate_K).softmax(0) for gate_K in gate_CK])
        # Bag by bag as cls-attention has it, from a copy: a product is rounded by where its vector begins in memory.
        bags = [self.norm(a_K.clone() @ z_KD) for a_K in a_CK]
        given = partial(contributions, self.classifier, self.norm, a_CK, z_KD)
        return BagOutput(per_target_logits(self.classifier, bags), a_CK, contributions=given)
