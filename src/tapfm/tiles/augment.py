"""Augmentation of tiles on a CPU or GPU: flips, rotations, blur and stain jitter, sampled for each tile.

Parameters are sampled on the CPU, so that they are the same on every device. The parameters of a tile depend on the
key of the random stream and on the tile's position in the bag, not on the number of tiles after it.
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
from tapfm.runtime.seeding import make_rng

FloatArray = NDArray[np.float64]
AugmentFunction = Callable[[Tensor, Tensor, int, bool], Tensor]  # signature of `_apply_parameters`

# Pixels augmented at once, with several float32 copies.
_SLICE_PIXELS, _CPU_SLICE_PIXELS = 2**22, 2**18
_BLUR_TRUNCATE = 3  # the blur kernel ends at this many standard deviations
# Optical density of a unit of stain in red, green and blue (Ruifrok and Johnston, 2001).
_HAEMATOXYLIN = (0.650, 0.704, 0.286)
_EOSIN = (0.072, 0.990, 0.105)


@dataclass(frozen=True)
class Augmentation:
    """Augmentation settings.

    flip: probability of a horizontal flip.
    rotate_90: rotate by 0, 90, 180 or 270 degrees with equal probability.
    blur: probability of a Gaussian blur.
    blur_radius: range of its standard deviation, in tile pixels.
    stain_jitter: strength s of the stain jitter; 0 disables it. The amount of each stain is multiplied by a factor from
        1 - s to 1 + s, and shifted by up to s times the fraction of light that the pixel absorbs.
    """

    flip: float = 0.5
    rotate_90: bool = True
    blur: float = 0.5
    blur_radius: tuple[float, float] = (0.1, 0.8)
    stain_jitter: float = 0.0

    def __post_init__(self) -> None:
        lowest, highest = self.blur_radius
        rules = {
            f"flip is {self.flip}, but must be from 0 to 1": not 0 <= self.flip <= 1,
            f"blur is {self.blur}, but must be from 0 to 1": not 0 <= self.blur <= 1,
            f"blur_radius is {lowest} to {highest}, but must be an increasing range within 0.01 to 16 px": not (
                0.01 <= lowest <= highest <= 16
            ),
            f"stain_jitter is {self.stain_jitter}, but must be at least 0 and below 1": not 0 <= self.stain_jitter < 1,
        }
        if broken := [rule for rule, is_broken in rules.items() if is_broken]:
            raise SettingError(
                "; ".join(broken) + ".",
                hint="The paper uses flip 0.5, blur 0.5, blur_radius 0.1 to 0.8 and no stain jitter.",
            )


class _AugmentationParameters(NamedTuple):
    """Sampled parameters of K tiles."""

    flip: NDArray[np.bool_]
    turns: NDArray[np.int64]  # number of rotations by 90 degrees
    blur: NDArray[np.bool_]
    blur_px: FloatArray  # standard deviation; used if `blur` is set
    stain_scale: FloatArray  # (K, 3): factor for the amount of each stain
    stain_shift: FloatArray  # (K, 3): added to the amount of each stain


class AugmentedTiles:
    """The tiles of a bag, augmented on the device when they are indexed.

    The pixels stay where they are, usually on the host, so that the device holds only the tiles in use. Parameters are
    sampled once for the whole bag; a row gives the same tile every time, alone or together with others. Copies from
    pinned memory are asynchronous. torch's pinned-memory allocator does not reuse the memory before the copy is done,
    even if the bag has been deleted.
    """

    def __init__(
        self,
        pixels: Tensor,
        augmentation: Augmentation,
        *rng_key: int | str,
        device: torch.device | None = None,
        compiled: bool = False,
    ) -> None:
        side = pixels.shape[-1]
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
            raise TileError(
                f"Tiles to augment have dtype {pixels.dtype} and shape {tuple(pixels.shape)}.",
                hint="Pass uint8 tiles of shape (tiles, 3, side, side).",
            )
        self._pixels, self._device = pixels, device or pixels.device
        self._half_width_px = _compute_kernel_half_width(augmentation, side)
        self._has_stain_jitter = augmentation.stain_jitter > 0
        parameters = _sample_parameters(len(pixels), augmentation, *rng_key)
        packed = _pack_parameters(parameters, self._half_width_px, stain_jitter=self._has_stain_jitter)
        self._packed = _copy_to_device(torch.from_numpy(packed), self._device)
        self._apply_parameters = _apply_compiled if compiled else _apply_parameters
        self._slice_tiles = _tiles_per_slice(side, self._device)

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, rows: slice | Tensor, /) -> Tensor:
        """Return augmented tiles as a new tensor on the device; an index tensor has to be on the CPU."""
        chosen = range(len(self))[rows] if isinstance(rows, slice) else rows
        result = self._pixels.new_empty((len(chosen), *self._pixels.shape[1:]), device=self._device)
        for start in range(0, len(chosen), self._slice_tiles):
            result[start : start + self._slice_tiles] = self._augment_rows(chosen[start : start + self._slice_tiles])
        return result

    # Fixed autograd and autocast state, so that all callers share one compiled function.
    @torch.no_grad()
    def _augment_rows(self, rows: range | Tensor) -> Tensor:
        with torch.autocast(self._device.type, enabled=False):
            pixels = _copy_to_device(_select_rows(self._pixels, rows), self._device)
            packed = _select_rows(self._packed, rows)
            return self._apply_parameters(pixels, packed, self._half_width_px, self._has_stain_jitter)


def _copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without synchronising with it."""
    if device.type == "cuda" and values.device.type == "cpu" and not values.is_pinned():
        # A copy from pageable memory would synchronise. Accept that if no more memory can be pinned.
        with suppress(RuntimeError):
            values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _select_rows(values: Tensor, rows: range | Tensor) -> Tensor:
    """Return rows of a tensor without synchronising with its device."""
    if isinstance(rows, range):
        return values[rows.start : rows.stop : rows.step]
    return values.index_select(0, _copy_to_device(rows, values.device))


def _tiles_per_slice(side_px: int, device: torch.device) -> int:
    """Return the number of tiles to augment at once: enough to use a GPU fully, few enough for a CPU's cache."""
    return max((_CPU_SLICE_PIXELS if device.type == "cpu" else _SLICE_PIXELS) // side_px**2, 1)


def augment(tiles: Tensor, augmentation: Augmentation, *rng_key: int | str) -> Tensor:
    """Return augmented copies of uint8 tiles (K, 3, side, side); the same rng_key gives the same result."""
    return AugmentedTiles(tiles, augmentation, *rng_key)[:]


def _sample_parameters(count: int, augmentation: Augmentation, *rng_key: int | str) -> _AugmentationParameters:
    """Sample the parameters of each tile. Changing one setting does not change the parameters of the others."""
    values = make_rng(*rng_key, "augment").random((count, 10))  # always 10 per tile, whatever is disabled
    lowest, highest = augmentation.blur_radius
    jitter = augmentation.stain_jitter * (2 * values[:, 4:] - 1)
    return _AugmentationParameters(
        flip=values[:, 0] < augmentation.flip,
        turns=(4 * values[:, 1]).astype(np.int64) * augmentation.rotate_90,
        blur=values[:, 2] < augmentation.blur,
        blur_px=lowest + (highest - lowest) * values[:, 3],
        stain_scale=1 + jitter[:, :3],
        stain_shift=jitter[:, 3:],
    )


def _compute_kernel_half_width(augmentation: Augmentation, side_px: int) -> int:
    """Return the half width of the blur kernel in pixels, without its centre; 0 if blur is disabled."""
    if augmentation.blur == 0:
        return 0
    return min(math.ceil(_BLUR_TRUNCATE * augmentation.blur_radius[1]), side_px - 1)


def _pack_parameters(
    parameters: _AugmentationParameters, half_width_px: int, *, stain_jitter: bool
) -> NDArray[np.float32]:
    """Pack the parameters into one array with a row per tile, so that they need a single copy to the device.

    Columns: orientation (3), blur kernel (2 half_width_px + 1), with stain jitter a colour matrix (9) and offset (3).
    """
    # A rotation is a combination of a transposition and flips.
    transposed, flipped_vertically = parameters.turns % 2 == 1, parameters.turns >= 2
    flipped_horizontally = np.isin(parameters.turns, (1, 2)) ^ parameters.flip
    orientation = np.stack([transposed, flipped_vertically, flipped_horizontally], axis=1)
    columns = [orientation, _blur_weights(parameters, half_width_px)]
    if stain_jitter:
        stains = np.array([_HAEMATOXYLIN, _EOSIN, np.cross(_HAEMATOXYLIN, _EOSIN)])
        stains /= np.linalg.norm(stains, axis=1, keepdims=True)
        # density = amounts @ stains, so scaling the amounts is a linear map of the densities
        colour_matrix = np.linalg.inv(stains) @ (parameters.stain_scale[:, :, None] * stains)
        columns += [colour_matrix.reshape(-1, 9), parameters.stain_shift @ stains]
    return np.concatenate(columns, axis=1, dtype=np.float32, casting="same_kind")


def _blur_weights(parameters: _AugmentationParameters, half_width_px: int) -> FloatArray:
    """Return the blur kernel of each tile: a Gaussian, or the identity if the tile is not blurred."""
    offsets = np.arange(-half_width_px, half_width_px + 1)
    weights = np.exp(-0.5 * (offsets / parameters.blur_px[:, None]) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.where(parameters.blur[:, None], weights, offsets == 0)


@cache
def _compile_apply() -> AugmentFunction:
    return torch.compile(_apply_parameters)


def _apply_compiled(tiles: Tensor, packed: Tensor, half_width_px: int, stain_jitter: bool) -> Tensor:
    """Run the compiled `_apply_parameters`; it is compiled once for any number of tiles."""
    if len(tiles) == 1:  # a batch of 1 would be compiled separately
        return _apply_parameters(tiles, packed, half_width_px, stain_jitter)
    tiles, packed = tiles.data, packed.data  # views would be compiled separately
    for tensor in (tiles, packed):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compile_apply()(tiles, packed, half_width_px, stain_jitter)


def _apply_parameters(tiles: Tensor, packed: Tensor, half_width_px: int, stain_jitter: bool) -> Tensor:
    """Augment uint8 tiles, each with its row of packed parameters.

    The operations do not depend on the sampled values, so the host needs no values from the device and the function can
    be compiled.
    """
    tiles = _flip_and_rotate(tiles, packed[:, :3])
    if not (half_width_px or stain_jitter):
        return tiles
    pixels = tiles.float()
    if half_width_px:
        pixels = _blur(pixels, packed[:, 3 : 4 + 2 * half_width_px], half_width_px)
    if stain_jitter:
        pixels = _jitter_stains(pixels, packed[:, -12:-3].unflatten(1, (3, 3)), packed[:, -3:])
    return pixels.to(torch.uint8)


def _flip_and_rotate(tiles: Tensor, orientation: Tensor) -> Tensor:
    """Flip and rotate each tile by gathering every pixel from its source position."""
    transposed, flipped_vertically, flipped_horizontally = (orientation > 0.5)[:, :, None, None].unbind(1)
    side = tiles.shape[-1]
    row, column = torch.arange(side, device=tiles.device)[:, None], torch.arange(side, device=tiles.device)
    row, column = torch.where(transposed, column, row), torch.where(transposed, row, column)
    row = torch.where(flipped_vertically, side - 1 - row, row)
    column = torch.where(flipped_horizontally, side - 1 - column, column)
    source = (row * side + column).flatten(1)
    return tiles.flatten(2).gather(2, source[:, None].expand(-1, 3, -1)).view(tiles.shape)


def _blur(pixels: Tensor, weights: Tensor, half_width_px: int) -> Tensor:
    """Blur each tile with its own separable kernel, with reflection at the edges.

    Implemented as a sum of shifted copies, because a convolution may run in TF32 or under autocast.
    """
    weight_of_offset, side = weights[:, :, None, None, None].unbind(1), pixels.shape[-1]
    for axis, margin in ((-1, (half_width_px, half_width_px, 0, 0)), (-2, (0, 0, half_width_px, half_width_px))):
        padded = F.pad(pixels, margin, mode="reflect")
        pixels = torch.zeros_like(pixels)
        for start, weight in enumerate(weight_of_offset):
            pixels.addcmul_(padded.narrow(axis, start, side), weight)
    return pixels.round_()


def _jitter_stains(pixels: Tensor, colour_matrix: Tensor, offset: Tensor) -> Tensor:
    """Scale and shift the amounts of haematoxylin, eosin and the residual in each tile.

    The shift is proportional to the absorbed light, so that glass stays white.
    """
    light = (pixels + 1) / 256
    density = -light.log()
    mixed = offset[..., None, None] * (1 - light.mean(1, keepdim=True))
    for colour in range(3):
        mixed.addcmul_(density[:, colour : colour + 1], colour_matrix[:, colour, :, None, None])
    return ((-mixed).exp() * 256 - 1).round_().clamp_(0, 255)
