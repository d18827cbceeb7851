"""The gated attention network of ABMIL, used by several aggregators."""

from __future__ import annotations

from torch import Tensor, nn


class GatedAttention(nn.Module):
    """Attention score of each tile, w (tanh(V x) * sigmoid(U x)), before the softmax. With `gated=False`: w tanh(V x).

    size: size of the features x.
    attention: size of the hidden layer.
    outputs: number of scores per tile.
    """

    def __init__(self, size: int, attention: int, *, outputs: int = 1, gated: bool = True) -> None:
        super().__init__()
        self.content = nn.Sequential(nn.Linear(size, attention), nn.Tanh())
        self.gate = nn.Sequential(nn.Linear(size, attention), nn.Sigmoid()) if gated else None
        self.score = nn.Linear(attention, outputs, bias=False)  # the softmax would cancel a bias

    def forward(self, x_KD: Tensor) -> Tensor:
        """Score K tiles; the result has shape (outputs, K)."""
        hidden = self.content(x_KD)
        if self.gate is not None:
            hidden = hidden * self.gate(x_KD)
        scores: Tensor = self.score(hidden).T
        return scores
