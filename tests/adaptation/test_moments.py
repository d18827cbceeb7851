"""Moments in few bits: what they keep of a value, and of a mean over many steps."""

import pytest
import torch

from tapfm.adaptation.moments import (
    BLOCK_SIZE,
    hash_int32,
    moment_bytes,
    read_moments,
    store_moments,
    zero_moments,
)
from tapfm.adaptation.moments import (
    _dequantise_first as dequantise_first,
)
from tapfm.adaptation.moments import (
    _dequantise_second as dequantise_second,
)
from tapfm.adaptation.moments import (
    _element_indices as element_indices,
)
from tapfm.adaptation.moments import (
    _quantise_first as quantise_first,
)
from tapfm.adaptation.moments import (
    _quantise_second as quantise_second,
)
from tapfm.adaptation.moments import (
    _round_to_bfloat16 as round_to_bfloat16,
)

FORMS = ("float32", "bfloat16", "int8")


def random_bits(blocks, seed=0):
    return hash_int32(element_indices(torch.zeros(blocks, BLOCK_SIZE)) + seed) & 0xFFFF


def test_moments_begin_at_zero_and_take_the_bytes_that_are_said():
    for form in FORMS:
        kept = zero_moments(form, 3, torch.float32, torch.device("cpu"))
        assert sum(tensor.nbytes for tensor in kept.values()) == 3 * BLOCK_SIZE * moment_bytes(form)
        for moment in read_moments(kept, form, torch.float32):
            assert moment.dtype == torch.float32
            assert not moment.any()


def test_moments_of_float64_parameters_are_kept_in_float64():
    kept = zero_moments("float32", 1, torch.float64, torch.device("cpu"))
    assert {tensor.dtype for tensor in kept.values()} == {torch.float64}


def test_the_hash_spreads_neighbours_evenly_and_differs_between_seeds():
    numbers = torch.arange(2**16, dtype=torch.int32)
    random = hash_int32(numbers)
    assert len(random.unique()) == len(numbers)  # it can be undone, so no two meet
    for shift in range(0, 32, 4):
        counts = torch.bincount((random >> shift) & 15, minlength=16)
        assert ((counts - 4096).abs() < 300).all()  # 5 standard deviations
    agreement = ((random & 0xFFFF) == (hash_int32(numbers + 12345) & 0xFFFF)).double().mean()
    assert agreement < 1e-3


def test_bfloat16_is_rounded_to_a_neighbour_and_exact_in_the_mean():
    values = (
        torch.tensor([1.0, 1.001, -1.001, 3.14159, -2.7e-20, 0.0])
        .repeat_interleave(BLOCK_SIZE * 256)
        .view(-1, BLOCK_SIZE)
    )
    rounded = round_to_bfloat16(values, random_bits(len(values))).float()
    assert (abs(rounded - values) < abs(values) * 2**-7 + 1e-45).all()
    means = rounded.view(6, -1).double().mean(dim=1)
    exact = values.view(6, -1)[:, 0].double()
    torch.testing.assert_close(means, exact, rtol=1e-4, atol=0.0)
    assert torch.equal(rounded[:256], values[:256])  # what bfloat16 can hold stays
    assert not rounded[-256:].any()


@pytest.mark.parametrize(
    ("to_codes", "from_codes", "signed"),
    [(quantise_first, dequantise_first, True), (quantise_second, dequantise_second, False)],
)
def test_codes_are_exact_in_the_mean_whatever_the_size(to_codes, from_codes, signed):
    sizes = torch.logspace(-7, 0, 64, dtype=torch.float64).repeat(4).float()  # one block; the largest is 1
    signs = torch.tensor([1.0, -1.0]).repeat(BLOCK_SIZE // 2) if signed else 1.0
    block = sizes * signs
    draws = 20_000
    values = block.expand(draws, BLOCK_SIZE).contiguous()
    codes, scale = to_codes(values, random_bits(draws))
    assert codes.dtype == torch.uint8
    assert scale.shape == (draws, 1)
    back = from_codes(codes, scale).double()
    error = (back.mean(dim=0) - block).abs()
    assert (error < 5 * back.std(dim=0) / draws**0.5 + 1e-6 * block.abs()).all()
    torch.testing.assert_close(
        back[:, sizes == 1.0], values[:, sizes == 1.0].double()
    )  # a block's largest has no error


def test_a_second_moment_above_zero_never_becomes_zero():
    second = torch.zeros(1, BLOCK_SIZE)
    second[0, :4] = torch.tensor([1.0, 1e-12, 1e-25, 1e-37])
    for seed in range(50):
        back = dequantise_second(*quantise_second(second, random_bits(1, seed)))
        assert (back[0, :4] > 0).all()
        assert not back[0, 4:].any()


def test_the_error_of_8_bits_is_small_beside_the_blocks_largest():
    torch.manual_seed(0)
    first = torch.randn(64, BLOCK_SIZE) * torch.logspace(-12, 3, 64)[:, None]
    second = first.square() * torch.rand(64, BLOCK_SIZE)
    kept = store_moments(first, second, "int8", torch.tensor(5, dtype=torch.int32))
    first_back, second_back = read_moments(kept, "int8", torch.float32)
    first_error = (first_back - first).abs() / first.abs().amax(dim=1, keepdim=True)
    root_error = (second_back.sqrt() - second.sqrt()).abs() / second.sqrt().amax(dim=1, keepdim=True)
    assert first_error.max() < 2 / 127
    assert root_error.max() < 2 / 255


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_over_a_thousand_steps_forgets_a_large_beginning(form):
    # rounded to the nearest neighbour, bfloat16 and 8 bits would both stay at 1
    spread = torch.logspace(-1, 0, BLOCK_SIZE).expand(8, BLOCK_SIZE)
    kept = zero_moments(form, 8, torch.float32, torch.device("cpu"))
    exact = spread.square().clone()
    zero = torch.zeros_like(spread)
    kept = store_moments(zero, exact, form, torch.tensor(0, dtype=torch.int32))
    gradient = 0.1 * spread.flip(1)
    for step in range(1, 2001):
        exact = exact * 0.999 + gradient.square() * 0.001
        _, second = read_moments(kept, form, torch.float32)
        second = second * 0.999 + gradient.square() * 0.001
        kept = store_moments(zero, second, form, hash_int32(torch.tensor(step, dtype=torch.int32)))
    _, second = read_moments(kept, form, torch.float32)
    ratio = (second / exact).sqrt()
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.03)
    assert ratio.std().item() < {"float32": 1e-4, "bfloat16": 0.06, "int8": 0.06}[form]
