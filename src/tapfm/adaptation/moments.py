"""Storage formats of AdamW's two moments: float32, bfloat16, or 8 bits with one scale per block of 256 elements.

One step decreases the second moment, a mean over about a thousand steps, by a thousandth or less. That is below half
the distance between two neighbouring values in bfloat16 or 8 bits: rounding to nearest would never decrease it. So both
moments use stochastic rounding, whose expected value is exact. The random bits are a hash of the step, the shard and
the element: there is no random state to save, and a resumed run rounds the same way.

The 8-bit codes are not evenly spaced, because the elements of one block differ by orders of magnitude:
    first moment    value = sign * (code / 127)^2 * scale        scale: the largest absolute value in the block
    second moment   root  = (code / 255)^2 * scale,  value = root^2
So a root of 1/65,025 of the largest one in the block still has its own code. Smaller roots are stored as that value and
never as 0, because the update divides by the root. A zero stays zero.

All functions work on tensors of shape (blocks, 256) and do not synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

MomentFormat = Literal["float32", "bfloat16", "int8"]

BLOCK_SIZE = 256
_ZERO_CODE = 128  # code of a first moment of 0
_FIRST_CODES, _SECOND_CODES = 127, 255
_MIN_SCALE = 1e-30  # avoids a division by a scale of 0
_LOW_16_BITS = 0xFFFF
_RANDOM_VALUES = 2**16  # number of different random values


def moment_bytes(moment_format: MomentFormat) -> float:
    """Return the bytes of both moments of one float32 parameter."""
    return {"float32": 8.0, "bfloat16": 4.0, "int8": 2 * (1 + 4 / BLOCK_SIZE)}[moment_format]


def zero_moments(
    moment_format: MomentFormat, blocks: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> dict[str, Tensor]:
    """Allocate both moments, all 0, under the names they have in a checkpoint."""

    def zeros(width: int, stored_dtype: torch.dtype) -> Tensor:
        return torch.zeros(blocks, width, dtype=stored_dtype, device=device, pin_memory=pinned)

    if moment_format != "int8":
        stored_dtype = dtype if moment_format == "float32" else torch.bfloat16
        return {"first": zeros(BLOCK_SIZE, stored_dtype), "second": zeros(BLOCK_SIZE, stored_dtype)}
    return {
        "first": zeros(BLOCK_SIZE, torch.uint8).fill_(_ZERO_CODE),
        "first_scale": zeros(1, torch.float32),
        "second": zeros(BLOCK_SIZE, torch.uint8),
        "second_scale": zeros(1, torch.float32),
    }


def read_moments(
    stored: Mapping[str, Tensor], moment_format: MomentFormat, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return both moments in the dtype to compute in."""
    if moment_format != "int8":
        return stored["first"].to(dtype), stored["second"].to(dtype)
    first = _dequantise_first(stored["first"], stored["first_scale"])
    second = _dequantise_second(stored["second"], stored["second_scale"])
    return first.to(dtype), second.to(dtype)


def store_moments(first: Tensor, second: Tensor, moment_format: MomentFormat, seed: Tensor) -> dict[str, Tensor]:
    """Convert both moments to the storage format. `seed` (0-dim, int32) determines the stochastic rounding."""
    if moment_format == "float32":
        return {"first": first, "second": second}
    random = hash_int32(_element_indices(first) + seed)
    first_bits, second_bits = random & _LOW_16_BITS, (random >> 16) & _LOW_16_BITS
    if moment_format == "bfloat16":
        return {"first": _round_to_bfloat16(first, first_bits), "second": _round_to_bfloat16(second, second_bits)}
    first_codes, first_scale = _quantise_first(first.float(), first_bits)
    second_codes, second_scale = _quantise_second(second.float(), second_bits)
    return {
        "first": first_codes,
        "first_scale": first_scale,
        "second": second_codes,
        "second_scale": second_scale,
    }


def _element_indices(blocks: Tensor) -> Tensor:
    rows = torch.arange(blocks.shape[0], dtype=torch.int32, device=blocks.device)
    columns = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=blocks.device)
    return rows[:, None] * BLOCK_SIZE + columns


def hash_int32(numbers: Tensor) -> Tensor:
    """Hash every int32 to 32 pseudo-random bits: the finaliser of MurmurHash3, with products modulo 2^32."""
    numbers = numbers ^ ((numbers >> 16) & _LOW_16_BITS)  # masked, because >> on int32 copies the sign bit
    numbers = numbers * (0x85EBCA6B - 2**32)
    numbers = numbers ^ ((numbers >> 13) & 0x7FFFF)
    numbers = numbers * (0xC2B2AE35 - 2**32)
    return numbers ^ ((numbers >> 16) & _LOW_16_BITS)


def _round_to_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    """Round stochastically: bfloat16 is the upper half of a float32, so random bits are added to the lower half."""
    bits = values.float().view(torch.int32) + random
    return (bits & ~_LOW_16_BITS).view(torch.float32).to(torch.bfloat16)


def _quantise_first(first: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Round first moments stochastically to 8-bit codes. Returns codes and scales."""
    size = first.abs()
    scale = size.amax(dim=1, keepdim=True)
    square = size * (_FIRST_CODES**2 / scale.clamp_min(_MIN_SCALE))  # square of the exact, fractional code
    below = square.sqrt().floor()
    fraction = (square - below * below) / (2 * below + 1)  # position between the values of the two nearest codes
    code = (below + (random < fraction * _RANDOM_VALUES)).clamp_max(_FIRST_CODES)
    return (_ZERO_CODE + torch.where(first < 0, -code, code)).to(torch.uint8), scale


def _dequantise_first(codes: Tensor, scale: Tensor) -> Tensor:
    code = codes.float() - _ZERO_CODE
    return code * code.abs() * (scale / _FIRST_CODES**2)


def _quantise_second(second: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Round second moments stochastically to 8-bit codes. A positive moment never becomes 0."""
    root = second.sqrt()
    scale = root.amax(dim=1, keepdim=True)
    exact = (root * (_SECOND_CODES**2 / scale.clamp_min(_MIN_SCALE))).sqrt()  # the exact, fractional code
    below = exact.floor()
    fraction = (_fourth_power(exact) - _fourth_power(below)) / (_fourth_power(below + 1) - _fourth_power(below))
    code = below + (random < fraction * _RANDOM_VALUES)
    return torch.where(root > 0, code.clamp(1, _SECOND_CODES), 0.0).to(torch.uint8), scale


def _dequantise_second(codes: Tensor, scale: Tensor) -> Tensor:
    code = codes.float()
    return (code * code * (scale / _SECOND_CODES**2)).square()


def _fourth_power(values: Tensor) -> Tensor:
    return values.square().square()
