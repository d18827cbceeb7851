"""Back-propagate through some tiles and still get the whole gradient, on average.

Once the gradients at the tiles are known, L_PFM (eq. 7) is a sum over tiles. Of a sum over K tiles, n drawn ones give
an estimate: each is divided by its chance of being drawn, so that the mean over draws is the whole sum, whatever the
chances are. It varies least where the chances follow the size of what each tile adds to the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfm.contracts import EncodedTiles
from tapfm.errors import SettingError

Numbers = NDArray[np.float64]


class Subset(NamedTuple):
    """Some tiles of a bag, and what each of them counts so that together they stand for all."""

    rows: Tensor  # int64, rising, on the CPU
    weights: Tensor  # on the device of the gradients, in their type


def draw_subset(
    encoded: EncodedTiles,
    g_z_KD: Tensor,
    g_r_K: Tensor,
    lambda_: float,
    count: int,
    generator: torch.Generator | None = None,
) -> Subset:
    """Draw `count` tiles, likelier ones where the gradient is larger; all of them where there are no more.

    Fewer come where fewer have a gradient at all. The generator is one of the CPU; None: torch's own.
    """
    if count < 1:
        raise SettingError(f"A subset needs at least 1 tile; got {count}.", hint="A usual value is 256.")
    if len(g_z_KD) <= count:
        return Subset(torch.arange(len(g_z_KD)), torch.ones_like(g_r_K))
    chances = chances_of(sizes_of(encoded, g_z_KD, g_r_K, lambda_).cpu().numpy(), count)  # waits for the device
    order = torch.randperm(len(chances), generator=generator).numpy()
    start = torch.rand((), dtype=torch.float64, generator=generator).item()
    rows = systematic(chances, order, start)
    weights = torch.from_numpy(1 / chances[rows]).to(g_r_K.dtype)
    return Subset(torch.from_numpy(rows), weights.to(g_r_K.device))


@torch.no_grad()
def sizes_of(encoded: EncodedTiles, g_z_KD: Tensor, g_r_K: Tensor, lambda_: float) -> Tensor:
    """Say how large a tile's gradient is, in float64: by how much the loss varies if the tile varies as tiles do.

    Gradients at features and at raw attentions have different units, and how much of either reaches the encoder is not
    known before backward. Times how far features and attentions of the bag are spread, both are changes of the loss.
    """
    # in float32 a square can be 0 where the number is not; the largest number is never more than the norm
    norms_K = torch.maximum(g_z_KD.norm(dim=1), g_z_KD.norm(torch.inf, dim=1)).double()
    return norms_K * _spread(encoded.z_KD) + lambda_ * g_r_K.abs().double() * _spread(encoded.r_K)


def _spread(values: Tensor) -> Tensor:
    """Give the deviation of a number over the tiles; where there is none 1, so that no gradient is lost."""
    deviation = values.var(dim=0).mean().sqrt().double()
    return torch.where(deviation == 0, torch.ones_like(deviation), deviation)


def chances_of(sizes: Numbers, count: int) -> Numbers:
    """Give each tile a chance proportional to its size; they add up to `count`, and none is above 1.

    A tile that would be above 1 is certain, and the others share what is left.
    """
    if not (np.isfinite(sizes).all() and sizes.any()):  # nothing to go by; a step that is not finite changes nothing
        sizes = np.ones_like(sizes)
    certain = np.zeros(len(sizes), bool)
    while True:
        rest = np.where(certain, 0.0, sizes)
        room = count - certain.sum()
        chances = room * (rest / rest.sum()) if rest.any() else rest
        if not (chances >= 1).any():
            return np.where(certain, 1.0, chances)
        certain |= chances >= 1


def systematic(chances: Numbers, order: NDArray[np.int64], start: float) -> NDArray[np.int64]:
    """Lay the tiles end to end in `order`, each as long as its chance, and take those at start, start + 1, ...

    With `start` evenly distributed in [0, 1) a tile is taken with exactly its chance, and their number never varies.
    """
    certain = chances >= 1
    order = order[(chances[order] > 0) & ~certain[order]]
    ends = np.cumsum(chances[order])
    count = round(ends[-1]) if len(ends) else 0
    hit = np.searchsorted(ends, start + np.arange(count), side="right")
    taken = certain.copy()
    taken[order[np.minimum(hit, len(order) - 1)]] = True  # the last end can be a rounding error short of `count`
    return np.flatnonzero(taken)
