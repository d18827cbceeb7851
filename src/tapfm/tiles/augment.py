"""Flip, turn, blur and restain tiles, each by draws of its own, on the device where they are.

The draws are made on the CPU, so that every device sees the same. A tile's draws depend on the address and on its
place in the bag, not on how many tiles follow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tapfm.errors import SettingError, TileError
from tapfm.runtime.seeding import rng_for

Numbers = NDArray[np.float64]
Change = Callable[[Tensor, Tensor, int, bool], Tensor]

# Pixels that are changed at once, in float32 and a few times over: as many as keep a device busy, or fit a CPU's cache.
_PIXELS_AT_ONCE, _PIXELS_AT_ONCE_ON_CPU = 2**22, 2**18
_BLUR_REACH = 3  # deviations from a pixel beyond which its neighbours no longer count
# Optical density of a unit of stain in red, green and blue: Ruifrok and Johnston, 2001.
_HAEMATOXYLIN = (0.650, 0.704, 0.286)
_EOSIN = (0.072, 0.990, 0.105)


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


class _AugmentationDraws(NamedTuple):
    """What happens to each of K tiles."""

    flip: NDArray[np.bool_]
    turns: NDArray[np.int64]  # quarter turns
    blur: NDArray[np.bool_]
    blur_px: Numbers  # deviation, for those that are blurred
    stain_scale: Numbers  # (K, 3): what the amount of each stain is multiplied with
    stain_shift: Numbers  # (K, 3)


class AugmentedTiles:
    """The tiles of a bag as the encoder is to see them: they are augmented, on the device, when they are asked for.

    Pixels stay where they are, on the host as a rule: of a bag of any size the device holds the tiles in work only. The
    draws are made once for the whole bag, so that rows are the same tiles however often and in whatever company they
    are asked for. From pinned memory they are copied without waiting; torch's allocator of pinned memory notes such a
    copy and gives the memory to nobody else before it is over, even where the bag is long forgotten.
    """

    def __init__(
        self,
        pixels: Tensor,
        augmentation: Augmentation,
        *address: int | str,
        device: torch.device | None = None,
        compiled: bool = False,
    ) -> None:
        side = pixels.shape[-1]
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
            raise TileError(
                f"Tiles to augment have the type {pixels.dtype} and the shape {tuple(pixels.shape)}.",
                hint="They have to be uint8 (tiles, 3, side, side).",
            )
        self._pixels, self._device = pixels, device or pixels.device
        self._reach_px = _reach_of(augmentation, side)
        self._restain = augmentation.stain_jitter > 0
        numbers = _numbers_of(_draw(len(pixels), augmentation, *address), self._reach_px, restain=self._restain)
        self._numbers = _brought(torch.from_numpy(numbers), self._device)
        self._change = _change_compiled if compiled else _change
        self._at_once = _tiles_at_once(side, self._device)

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, rows: slice | Tensor, /) -> Tensor:
        """Give tiles as a new tensor on the device; rows of a tensor are on the CPU."""
        chosen = range(len(self))[rows] if isinstance(rows, slice) else rows
        result = self._pixels.new_empty((len(chosen), *self._pixels.shape[1:]), device=self._device)
        for start in range(0, len(chosen), self._at_once):
            result[start : start + self._at_once] = self._changed(chosen[start : start + self._at_once])
        return result

    # The same state of autograd and autocast for every caller, or each would have its own compiled form.
    @torch.no_grad()
    def _changed(self, rows: range | Tensor) -> Tensor:
        with torch.autocast(self._device.type, enabled=False):
            pixels, numbers = _brought(_taken(self._pixels, rows), self._device), _taken(self._numbers, rows)
            return self._change(pixels, numbers, self._reach_px, self._restain)


def _brought(values: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without waiting for it."""
    if device.type == "cuda" and values.device.type == "cpu" and not values.is_pinned():
        # from other memory the copy waits for the device; so be it where the system has no more memory to lock
        with suppress(RuntimeError):
            values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _taken(values: Tensor, rows: range | Tensor) -> Tensor:
    """Give rows, wherever the values are, without waiting for the device."""
    if isinstance(rows, range):
        return values[rows.start : rows.stop : rows.step]
    return values.index_select(0, _brought(rows, values.device))


def _tiles_at_once(side_px: int, device: torch.device) -> int:
    """Say how many tiles to change at once."""
    return max((_PIXELS_AT_ONCE_ON_CPU if device.type == "cpu" else _PIXELS_AT_ONCE) // side_px**2, 1)


def augment(tiles: Tensor, augmentation: Augmentation, *address: int | str) -> Tensor:
    """Augment uint8 tiles (K, 3, side, side) into a new tensor; the same address gives the same tiles."""
    return AugmentedTiles(tiles, augmentation, *address)[:]


def _draw(count: int, augmentation: Augmentation, *address: int | str) -> _AugmentationDraws:
    """Draw what happens to each tile; a setting never changes what is drawn for the others."""
    numbers = rng_for(*address, "augment").random((count, 10))  # a row for each tile, whatever is switched off
    lowest, highest = augmentation.blur_radius
    jitter = augmentation.stain_jitter * (2 * numbers[:, 4:] - 1)
    return _AugmentationDraws(
        flip=numbers[:, 0] < augmentation.flip,
        turns=(4 * numbers[:, 1]).astype(np.int64) * augmentation.quarter_turns,
        blur=numbers[:, 2] < augmentation.blur,
        blur_px=lowest + (highest - lowest) * numbers[:, 3],
        stain_scale=1 + jitter[:, :3],
        stain_shift=jitter[:, 3:],
    )


def _reach_of(augmentation: Augmentation, side_px: int) -> int:
    """Say how many pixels on either side count when a tile is blurred; 0: none is."""
    if augmentation.blur == 0:
        return 0
    return min(math.ceil(_BLUR_REACH * augmentation.blur_radius[1]), side_px - 1)


def _numbers_of(draws: _AugmentationDraws, reach_px: int, *, restain: bool) -> NDArray[np.float32]:
    """Put all that `_change` has to know into one table, a row for each tile: it goes to the device in one copy.

    Columns: mirrored and turned (3), weights of the pixels around (2 reach + 1), mixing of the colours (9) and what is
    added to them (3).
    """
    # A turn is an exchange of rows and columns, and mirrorings of the tile before.
    exchanged, upside_down = draws.turns % 2 == 1, draws.turns >= 2
    mirrored = np.isin(draws.turns, (1, 2)) ^ draws.flip
    columns = [np.stack([exchanged, upside_down, mirrored], axis=1), _blur_weights(draws, reach_px)]
    if restain:
        stains = np.array([_HAEMATOXYLIN, _EOSIN, np.cross(_HAEMATOXYLIN, _EOSIN)])
        stains /= np.linalg.norm(stains, axis=1, keepdims=True)
        # density = amounts @ stains, so that scaled amounts are a mixing of the three colours' densities
        mixing = np.linalg.inv(stains) @ (draws.stain_scale[:, :, None] * stains)
        columns += [mixing.reshape(-1, 9), draws.stain_shift @ stains]
    return np.concatenate(columns, axis=1, dtype=np.float32, casting="same_kind")


def _blur_weights(draws: _AugmentationDraws, reach_px: int) -> Numbers:
    """Give each tile its Gaussian; to one that is not blurred, the weight 1 of its own pixel."""
    offsets = np.arange(-reach_px, reach_px + 1)
    weights = np.exp(-0.5 * (offsets / draws.blur_px[:, None]) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.where(draws.blur[:, None], weights, offsets == 0)


@cache
def _compiled() -> Change:
    """Compile `_change` to a few kernels."""
    return torch.compile(_change)


def _change_compiled(tiles: Tensor, numbers: Tensor, reach_px: int, restain: bool) -> Tensor:
    """Change tiles as `_change` does; once compiled, for any number of them."""
    if len(tiles) == 1:  # the compiler would make a form of its own for it
        return _change(tiles, numbers, reach_px, restain)
    tiles, numbers = tiles.data, numbers.data  # compiled code is made for a view of one tensor, or for none
    for tensor in (tiles, numbers):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled()(tiles, numbers, reach_px, restain)


def _change(tiles: Tensor, numbers: Tensor, reach_px: int, restain: bool) -> Tensor:
    """Flip, turn, blur and restain uint8 tiles, each by its row of `numbers`.

    The same operations whatever was drawn: nothing has to be known on the host, and they can be compiled.
    """
    tiles = _turned(tiles, numbers[:, :3])
    if not (reach_px or restain):
        return tiles
    pixels = tiles.float()
    if reach_px:
        pixels = _blurred(pixels, numbers[:, 3 : 4 + 2 * reach_px], reach_px)
    if restain:
        pixels = _restained(pixels, numbers[:, -12:-3].unflatten(1, (3, 3)), numbers[:, -3:])
    return pixels.to(torch.uint8)


def _turned(tiles: Tensor, ways: Tensor) -> Tensor:
    """Take each pixel from where it was before the tile was flipped and turned."""
    exchanged, upside_down, mirrored = (ways > 0.5)[:, :, None, None].unbind(1)
    side = tiles.shape[-1]
    row, column = torch.arange(side, device=tiles.device)[:, None], torch.arange(side, device=tiles.device)
    row, column = torch.where(exchanged, column, row), torch.where(exchanged, row, column)
    row, column = torch.where(upside_down, side - 1 - row, row), torch.where(mirrored, side - 1 - column, column)
    source = (row * side + column).flatten(1)
    return tiles.flatten(2).gather(2, source[:, None].expand(-1, 3, -1)).view(tiles.shape)


def _blurred(pixels: Tensor, weights: Tensor, reach_px: int) -> Tensor:
    """Blur each tile by its own weights, one axis after the other, mirrored at the edges.

    A sum of shifted copies: a convolution would run in low precision under a caller's autocast, or in TF32.
    """
    weight_of_offset, side = weights[:, :, None, None, None].unbind(1), pixels.shape[-1]
    for axis, margin in ((-1, (reach_px, reach_px, 0, 0)), (-2, (0, 0, reach_px, reach_px))):
        padded = F.pad(pixels, margin, mode="reflect")
        pixels = torch.zeros_like(pixels)
        for start, weight in enumerate(weight_of_offset):
            pixels.addcmul_(padded.narrow(axis, start, side), weight)
    return pixels.round_()


def _restained(pixels: Tensor, mixing: Tensor, added: Tensor) -> Tensor:
    """Scale and shift the amount of haematoxylin, of eosin and of what is left over in each tile.

    The shift grows with the light that a pixel has lost, so that glass stays white.
    """
    light = (pixels + 1) / 256
    density = -light.log()
    mixed = added[..., None, None] * (1 - light.mean(1, keepdim=True))
    for colour in range(3):
        mixed.addcmul_(density[:, colour : colour + 1], mixing[:, colour, :, None, None])
    return ((-mixed).exp() * 256 - 1).round_().clamp_(0, 255)
