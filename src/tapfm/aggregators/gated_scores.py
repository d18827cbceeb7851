"""How much each tile counts, by a small network that looks at its features: shared by the aggregators that learn it."""

from __future__ import annotations

from torch import Tensor, nn


class GatedScores(nn.Module):
    """w (tanh(V x) * sigmoid(U x)) of each tile, before any softmax; `rows` of them. Not `gated`: w tanh(V x)."""

    def __init__(self, size: int, attention: int, *, rows: int = 1, gated: bool = True) -> None:
        super().__init__()
        self.content = nn.Sequential(nn.Linear(size, attention), nn.Tanh())
        self.gate = nn.Sequential(nn.Linear(size, attention), nn.Sigmoid()) if gated else None
        self.score = nn.Linear(attention, rows, bias=False)  # softmax would cancel a bias

    def forward(self, tiles: Tensor) -> Tensor:
        """Score K tiles: (rows, K)."""
        seen = self.content(tiles)
        if self.gate is not None:
            seen = seen * self.gate(tiles)
        scores: Tensor = self.score(seen).T
        return scores
