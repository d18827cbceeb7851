"""Our own aggregator: the tile weights of `cls-attention`, multiplied by a trained factor for each tile and target.

K tiles, D feature size, C targets. The score of tile i for target c is

    s_ci = minmax(r)_i / tau + gate_ci,      gate_ci = w_c . (tanh(V x_i) * sigmoid(U x_i)),      x_i = norm(z_i)

and a_c = softmax over tiles of s_c, Z_c = sum_i a_ci z_i, logit_c = <W_c, Z_c> + b_c.

So a_ci is proportional to exp(minmax(r)_i / tau), the weight a_i of the tile in eq. 2, times a trained factor,
exp(gate_ci). This has three consequences:

- w is initialised to 0, so training starts as `cls-attention`, with the same logits and the same encoder gradient.
- The raw attention is part of every tile weight, so its gradient (eq. 6) reaches the encoder at every step.
- A logit is a sum over tiles, logit_c = b_c + sum_i a_ci <W_c, z_i>, so the contribution of each tile is exact. With
  a LayerNorm before the head, `heads.compute_contributions` has the formula.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapfm.aggregators.cls_attention import check_tau, minmax_scale
from tapfm.aggregators.gated_attention import GatedAttention
from tapfm.aggregators.heads import compute_contributions, compute_target_logits
from tapfm.contracts import BagOutput


class ClsGated(nn.Module):
    """CLS attention with a trained gate for each target. The module docstring has the formula."""

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
        self.classifier = nn.Linear(feature_size, targets)  # created first: same initial values as in cls-attention
        self.dropout = nn.Dropout(dropout)
        self.gates = GatedAttention(feature_size, attention, outputs=targets)
        nn.init.zeros_(self.gates.score.weight)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:
        """Pool the tiles of one slide."""
        # The scale of features differs between encoders by a factor of ten: without a norm, tanh and sigmoid would be
        # saturated for some encoders and linear for others. V and U make parameters of the norm redundant.
        x_KD = F.layer_norm(z_KD, z_KD.shape[1:])
        gate_CK = self.gates(self.dropout(x_KD))
        prior_K = minmax_scale(r_K) / self.tau
        a_CK = torch.stack([(prior_K + gate_K).softmax(0) for gate_K in gate_CK])
        # Before training, the result has to be bit-identical to cls-attention. Rounding depends on memory alignment, so
        # each target has its own matrix product with a copy of its weights.
        bags = [self.norm(a_K.clone() @ z_KD) for a_K in a_CK]
        contributions = partial(compute_contributions, self.classifier, self.norm, a_CK, z_KD)
        return BagOutput(compute_target_logits(self.classifier, bags), a_CK, contributions=contributions)
