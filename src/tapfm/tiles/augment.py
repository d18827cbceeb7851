"""Flip, turn, blur and restain tiles, each by draws of its own, on the device where they are.

The draws are made on the CPU, so that every device sees the same. A tile's draws depend on the address and on its
place in the bag, not on how many tiles follow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tapfm.errors import SettingError, TileError
from tapfm.seeding import rng_for

Numbers = NDArray[np.float64]

TILES_AT_ONCE = 64  # in float32 while they are blurred or restained
BLUR_REACH = 3  # deviations from a pixel beyond which its neighbours no longer count
# Optical density of a unit of stain in red, green and blue: Ruifrok and Johnston, 2001.
HAEMATOXYLIN = (0.650, 0.704, 0.286)
EOSIN = (0.072, 0.990, 0.105)


@dataclass(frozen=True)
class Augmentation:
    """What may happen to a tile.

    flip: chance of a horizontal flip.
    quarter_turns: turn by 0, 90, 180 or 270 degrees, each as likely.
    blur: chance of a Gaussian blur.
    blur_radius: range of its deviation, in pixels of the tile.
    stain_jitter: how far the amount of each stain may be scaled and shifted, up or down; 0 is off.
    """

    flip: float = 0.5
    quarter_turns: bool = True
    blur: float = 0.5
    blur_radius: tuple[float, float] = (0.1, 0.8)
    stain_jitter: float = 0.0

    def __post_init__(self) -> None:
        lowest, highest = self.blur_radius
        rules = {
            f"flip is {self.flip}: it has to be from 0 to 1": not 0 <= self.flip <= 1,
            f"blur is {self.blur}: it has to be from 0 to 1": not 0 <= self.blur <= 1,
            f"blur_radius is {lowest} to {highest}: it has to rise, within 0.01 to 16 px": not (
                0.01 <= lowest <= highest <= 16
            ),
            f"stain_jitter is {self.stain_jitter}: it has to be from 0 to below 1": not 0 <= self.stain_jitter < 1,
        }
        if broken := [rule for rule, is_broken in rules.items() if is_broken]:
            raise SettingError(
                "; ".join(broken) + ".", hint="The paper: flip 0.5, blur 0.5, blur_radius 0.1 to 0.8, no stain jitter."
            )


class Draws(NamedTuple):
    """What happens to each of K tiles."""

    flip: NDArray[np.bool_]
    turns: NDArray[np.int64]  # quarter turns
    blur: NDArray[np.bool_]
    blur_px: Numbers  # deviation, for those that are blurred
    stain_scale: Numbers  # (K, 3): what the amount of each stain is multiplied with
    stain_shift: Numbers  # (K, 3)


def augment(tiles: Tensor, augmentation: Augmentation, *address: int | str) -> Tensor:
    """Augment uint8 tiles (K, 3, side, side) into a new tensor; the same address gives the same tiles."""
    if tiles.dtype != torch.uint8 or tiles.ndim != 4 or tiles.shape[1] != 3 or tiles.shape[2] != tiles.shape[3]:
        raise TileError(
            f"Tiles to augment have the type {tiles.dtype} and the shape {tuple(tiles.shape)}.",
            hint="They have to be uint8 (tiles, 3, side, side).",
        )
    draws = draw(len(tiles), augmentation, *address)
    augmented = turned(tiles, draws)
    reach_px = min(math.ceil(BLUR_REACH * augmentation.blur_radius[1]), tiles.shape[-1] - 1)
    for rows in slices_of(np.flatnonzero(draws.blur)):
        chosen = torch.from_numpy(rows).to(tiles.device)
        augmented[chosen] = blurred(augmented[chosen], draws.blur_px[rows], reach_px)
    if augmentation.stain_jitter:
        for rows in slices_of(np.arange(len(tiles))):
            chosen = torch.from_numpy(rows).to(tiles.device)
            augmented[chosen] = restained(augmented[chosen], draws.stain_scale[rows], draws.stain_shift[rows])
    return augmented


def draw(count: int, augmentation: Augmentation, *address: int | str) -> Draws:
    """Draw what happens to each tile; a setting never changes what is drawn for the others."""
    numbers = rng_for(*address, "augment").random((count, 10))  # a row for each tile, whatever is switched off
    lowest, highest = augmentation.blur_radius
    jitter = augmentation.stain_jitter * (2 * numbers[:, 4:] - 1)
    return Draws(
        flip=numbers[:, 0] < augmentation.flip,
        turns=(4 * numbers[:, 1]).astype(np.int64) * augmentation.quarter_turns,
        blur=numbers[:, 2] < augmentation.blur,
        blur_px=lowest + (highest - lowest) * numbers[:, 3],
        stain_scale=1 + jitter[:, :3],
        stain_shift=jitter[:, 3:],
    )


def slices_of(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Go through rows, as many at once as memory is meant for."""
    for start in range(0, len(rows), TILES_AT_ONCE):
        yield rows[start : start + TILES_AT_ONCE]


def turned(tiles: Tensor, draws: Draws) -> Tensor:
    """Flip and turn tiles, all that go the same way at once."""
    way = 2 * draws.turns + draws.flip
    by_way = torch.from_numpy(np.argsort(way, kind="stable")).to(tiles.device)
    result = torch.empty_like(tiles)
    for number, rows in enumerate(by_way.split(np.bincount(way, minlength=8).tolist())):
        some = tiles[rows]
        result[rows] = (some.flip(-1) if number % 2 else some).rot90(number // 2, (-2, -1))
    return result


def blurred(tiles: Tensor, blur_px: Numbers, reach_px: int) -> Tensor:
    """Blur each tile by its own Gaussian, one axis after the other, mirrored at the edges.

    A sum of shifted copies: a convolution would run in low precision under a caller's autocast, or in TF32.
    """
    offsets = np.arange(-reach_px, reach_px + 1)
    weights = np.exp(-0.5 * (offsets / blur_px[:, None]) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    weight_of_offset = per_tile(weights[:, :, None], tiles.device).unbind(1)
    pixels, side = tiles.float(), tiles.shape[-1]
    for axis, margin in ((-1, (reach_px, reach_px, 0, 0)), (-2, (0, 0, reach_px, reach_px))):
        padded = F.pad(pixels, margin, mode="reflect")
        pixels = torch.zeros_like(pixels)
        for start, weight in enumerate(weight_of_offset):
            pixels.addcmul_(padded.narrow(axis, start, side), weight)
    return pixels.round_().to(torch.uint8)


def restained(tiles: Tensor, scale: Numbers, shift: Numbers) -> Tensor:
    """Scale and shift the amount of haematoxylin, of eosin and of what is left over in each tile.

    The shift grows with the light that a pixel has lost, so that glass stays white.
    """
    stains = np.array([HAEMATOXYLIN, EOSIN, np.cross(HAEMATOXYLIN, EOSIN)])
    stains /= np.linalg.norm(stains, axis=1, keepdims=True)
    # density = amounts @ stains, so that scaled amounts are a mixing of the three colours' densities
    mixing = per_tile(np.linalg.inv(stains) @ (scale[:, :, None] * stains), tiles.device)
    added = per_tile(shift @ stains, tiles.device)
    light = (tiles.float() + 1) / 256
    density = -light.log()
    mixed = added * (1 - light.mean(1, keepdim=True))
    for colour in range(3):
        mixed.addcmul_(density[:, colour : colour + 1], mixing[:, colour])
    return ((-mixed).exp() * 256 - 1).round_().clamp_(0, 255).to(torch.uint8)


def per_tile(numbers: Numbers, device: torch.device) -> Tensor:
    """Put numbers of each tile on the device, ready to be multiplied with pixels."""
    return torch.from_numpy(numbers.astype(np.float32)).to(device)[..., None, None]
