"""Sample tiles for the backward pass such that the expected gradient is the full gradient.

Once the gradients at the tiles are known, L_PFM (eq. 7) is a sum over K tiles. A sample of n tiles gives an unbiased
estimate of it if each sampled term is divided by the tile's inclusion probability (Horvitz-Thompson estimator).
The variance is lowest if the probabilities are proportional to the size of the terms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfm.contracts import EncodedTiles
from tapfm.errors import SettingError

FloatArray = NDArray[np.float64]


class TileSubset(NamedTuple):
    """Sampled tiles of a bag and their weights (1 / inclusion probability)."""

    rows: Tensor  # int64, ascending, on the CPU
    weights: Tensor  # device and dtype of the gradients


def sample_subset(
    encoded: EncodedTiles,
    g_z_KD: Tensor,
    g_r_K: Tensor,
    lambda_: float,
    count: int,
    generator: torch.Generator | None = None,
) -> TileSubset:
    """Sample `count` tiles with probabilities proportional to their importance, without replacement.

    Returns all tiles, with weight 1, if the bag has no more than `count`. Returns fewer than `count` if fewer tiles
    have a gradient. `generator` is a CPU generator; None: torch's default generator.
    """
    if count < 1:
        raise SettingError(f"A subset needs at least 1 tile; got {count}.", hint="A typical value is 256.")
    if len(g_z_KD) <= count:
        return TileSubset(torch.arange(len(g_z_KD)), torch.ones_like(g_r_K))
    importance = tile_importance(encoded, g_z_KD, g_r_K, lambda_).cpu().numpy()  # synchronises with the device
    probabilities = inclusion_probabilities(importance, count)
    order = torch.randperm(len(probabilities), generator=generator).numpy()
    start = torch.rand((), dtype=torch.float64, generator=generator).item()
    rows = systematic_sample(probabilities, order, start)
    weights = torch.from_numpy(1 / probabilities[rows]).to(g_r_K.dtype)
    return TileSubset(torch.from_numpy(rows), weights.to(g_r_K.device))


@torch.no_grad()
def tile_importance(encoded: EncodedTiles, g_z_KD: Tensor, g_r_K: Tensor, lambda_: float) -> Tensor:
    """Return the size of each tile's gradient in float64: the change of the loss for a typical change of the tile.

    Gradients at features and at raw attentions have different units, and how much of each reaches the encoder is not
    known before the backward pass. Multiplied by the standard deviation of the features or of the attention over the
    bag, both become changes of the loss.
    """
    # A float32 square can underflow to 0 for a value that is not 0. The maximum never exceeds the norm.
    norms_K = torch.maximum(g_z_KD.norm(dim=1), g_z_KD.norm(torch.inf, dim=1)).double()
    return norms_K * _standard_deviation(encoded.z_KD) + lambda_ * g_r_K.abs().double() * _standard_deviation(
        encoded.r_K
    )


def _standard_deviation(values: Tensor) -> Tensor:
    """Return the standard deviation over tiles, or 1 if it is 0, so that no gradient is ignored."""
    deviation = values.var(dim=0).mean().sqrt().double()
    return torch.where(deviation == 0, torch.ones_like(deviation), deviation)


def inclusion_probabilities(importance: FloatArray, count: int) -> FloatArray:
    """Return probabilities proportional to importance, at most 1 each, that sum to `count`.

    A tile whose probability would exceed 1 is always included; the others share the rest. If some tiles, but fewer than
    `count`, have an importance above 0, the sum is their number.
    """
    # Without usable gradients all tiles are equally likely. A step that is not finite changes nothing anyway.
    if not (np.isfinite(importance).all() and importance.any()):
        importance = np.ones_like(importance)
    certain = np.zeros(len(importance), bool)
    while True:
        rest = np.where(certain, 0.0, importance)
        remaining = count - certain.sum()
        probabilities = remaining * (rest / rest.sum()) if rest.any() else rest
        if not (probabilities >= 1).any():
            return np.where(certain, 1.0, probabilities)
        certain |= probabilities >= 1


def systematic_sample(probabilities: FloatArray, order: NDArray[np.int64], start: float) -> NDArray[np.int64]:
    """Return the rows of a systematic sample.

    The tiles are placed on a line in `order`, each as long as its probability. Those at start, start + 1, ... are
    selected. If `start` is uniform in [0, 1), every tile is selected with exactly its probability, and the sample size
    is constant.
    """
    certain = probabilities >= 1
    order = order[(probabilities[order] > 0) & ~certain[order]]
    ends = np.cumsum(probabilities[order])
    count = round(ends[-1]) if len(ends) else 0
    hits = np.searchsorted(ends, start + np.arange(count), side="right")
    selected = certain.copy()
    selected[order[np.minimum(hits, len(order) - 1)]] = True  # rounding can put the last end just below `count`
    return np.flatnonzero(selected)
