"""How AdamW's two moments are kept: in full, in bfloat16, or in 8 bits with a scale for every block of 256 elements.

The second moment is a mean over about a thousand steps: one step changes it by a thousandth or less. That is less than
half the distance between two neighbours in bfloat16 (or in 8 bits), so rounding to the nearest would leave it where
it is, for ever. So both moments are rounded up or down at random, the nearer neighbour more often, such that the
expected value is the exact one. The randomness is a hash of the step, the shard and the element: no state to save, and
a run that goes on from a checkpoint rounds as it would have.

In 8 bits the codes are not evenly spaced, because elements of one block differ by orders of magnitude:
    first   value = sign * (code / 127)^2 * scale        scale: the largest size in the block
    second  root  = (code / 255)^2 * scale,  value = root^2
so a root as small as 1/65,025 of the block's largest has a code of its own. What is smaller still is kept as that,
never as zero: the update divides by it. A zero stays a zero.

Everything works on tensors of shape (blocks, 256), without looking at a value on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

MomentFormat = Literal["float32", "bfloat16", "int8"]

BLOCK = 256
_ZERO = 128  # the code of a first moment of 0
_FIRST_CODES, _SECOND_CODES = 127, 255
_SMALLEST = 1e-30  # divides in place of a scale of 0
_LOW_16_BITS = 0xFFFF
_LATTICE = 2**16  # random numbers are that many, evenly spaced


def moment_bytes(form: MomentFormat) -> float:
    """Say what the two moments of one float32 parameter take."""
    return {"float32": 8.0, "bfloat16": 4.0, "int8": 2 * (1 + 4 / BLOCK)}[form]


def no_moments(
    form: MomentFormat, blocks: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> dict[str, Tensor]:
    """Make both moments of so many blocks, all 0, under the names they have in a checkpoint."""

    def zeros(width: int, kept_as: torch.dtype) -> Tensor:
        return torch.zeros(blocks, width, dtype=kept_as, device=device, pin_memory=pinned)

    if form != "int8":
        kept_as = dtype if form == "float32" else torch.bfloat16
        return {"first": zeros(BLOCK, kept_as), "second": zeros(BLOCK, kept_as)}
    return {
        "first": zeros(BLOCK, torch.uint8).fill_(_ZERO),
        "first_scale": zeros(1, torch.float32),
        "second": zeros(BLOCK, torch.uint8),
        "second_scale": zeros(1, torch.float32),
    }


def read_moments(kept: Mapping[str, Tensor], form: MomentFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give both moments in the precision to compute in."""
    if form != "int8":
        return kept["first"].to(dtype), kept["second"].to(dtype)
    first = _first_of_codes(kept["first"], kept["first_scale"])
    second = _second_of_codes(kept["second"], kept["second_scale"])
    return first.to(dtype), second.to(dtype)


def store_moments(first: Tensor, second: Tensor, form: MomentFormat, seed: Tensor) -> dict[str, Tensor]:
    """Give what `read_moments` reads; `seed` (0-dim, int32) decides what is rounded up and what down."""
    if form == "float32":
        return {"first": first, "second": second}
    random = scrambled(_element_numbers(first) + seed)
    for_first, for_second = random & _LOW_16_BITS, (random >> 16) & _LOW_16_BITS
    if form == "bfloat16":
        return {"first": _to_bfloat16(first, for_first), "second": _to_bfloat16(second, for_second)}
    first_codes, first_scale = _codes_of_first(first.float(), for_first)
    second_codes, second_scale = _codes_of_second(second.float(), for_second)
    return {
        "first": first_codes,
        "first_scale": first_scale,
        "second": second_codes,
        "second_scale": second_scale,
    }


def _element_numbers(blocks: Tensor) -> Tensor:
    """Number the elements of a tensor of blocks."""
    rows = torch.arange(blocks.shape[0], dtype=torch.int32, device=blocks.device)
    columns = torch.arange(BLOCK, dtype=torch.int32, device=blocks.device)
    return rows[:, None] * BLOCK + columns


def scrambled(numbers: Tensor) -> Tensor:
    """Make 32 random-looking bits of every int32: the finaliser of MurmurHash3, products modulo 2^32."""
    numbers = numbers ^ ((numbers >> 16) & _LOW_16_BITS)  # the mask: int32 shifts copies of the sign in from the left
    numbers = numbers * (0x85EBCA6B - 2**32)
    numbers = numbers ^ ((numbers >> 13) & 0x7FFFF)
    numbers = numbers * (0xC2B2AE35 - 2**32)
    return numbers ^ ((numbers >> 16) & _LOW_16_BITS)


def _to_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    """Round at random: bfloat16 is the upper half of a float32, and the lower half says how near the next one is."""
    bits = values.float().view(torch.int32) + random
    return (bits & ~_LOW_16_BITS).view(torch.float32).to(torch.bfloat16)


def _codes_of_first(first: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Round first moments to codes at random, such that the expected value is the exact one."""
    size = first.abs()
    scale = size.amax(dim=1, keepdim=True)
    square = size * (_FIRST_CODES**2 / scale.clamp_min(_SMALLEST))  # of the code, were codes not whole
    below = square.sqrt().floor()
    share = (square - below * below) / (2 * below + 1)  # of the way to the next code's value
    code = (below + (random < share * _LATTICE)).clamp_max(_FIRST_CODES)
    return (_ZERO + torch.where(first < 0, -code, code)).to(torch.uint8), scale


def _first_of_codes(codes: Tensor, scale: Tensor) -> Tensor:
    """Give the first moments that codes stand for."""
    code = codes.float() - _ZERO
    return code * code.abs() * (scale / _FIRST_CODES**2)


def _codes_of_second(second: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Round second moments to codes at random, such that the expected value is the exact one; above 0 stays above."""
    root = second.sqrt()
    scale = root.amax(dim=1, keepdim=True)
    exact = (root * (_SECOND_CODES**2 / scale.clamp_min(_SMALLEST))).sqrt()  # the code, were codes not whole
    below = exact.floor()
    share = (_fourth_power(exact) - _fourth_power(below)) / (_fourth_power(below + 1) - _fourth_power(below))
    code = below + (random < share * _LATTICE)
    return torch.where(root > 0, code.clamp(1, _SECOND_CODES), 0.0).to(torch.uint8), scale


def _second_of_codes(codes: Tensor, scale: Tensor) -> Tensor:
    """Give the second moments that codes stand for."""
    code = codes.float()
    return (code * code * (scale / _SECOND_CODES**2)).square()


def _fourth_power(values: Tensor) -> Tensor:
    """Square twice."""
    return values.square().square()
