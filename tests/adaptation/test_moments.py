"""Storage formats of AdamW's moments: rounding errors of single values and of means over many steps."""

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

FORMATS = ("float32", "bfloat16", "int8")


def random_bits(blocks, seed=0):
    return hash_int32(element_indices(torch.zeros(blocks, BLOCK_SIZE)) + seed) & 0xFFFF


def test_new_moments_are_zero_and_have_the_stated_size():
    for moment_format in FORMATS:
        stored = zero_moments(moment_format, 3, torch.float32, torch.device("cpu"))
        assert sum(tensor.nbytes for tensor in stored.values()) == 3 * BLOCK_SIZE * moment_bytes(moment_format)
        for moment in read_moments(stored, moment_format, torch.float32):
            assert moment.dtype == torch.float32
            assert not moment.any()


def test_moments_of_float64_parameters_are_float64():
    stored = zero_moments("float32", 1, torch.float64, torch.device("cpu"))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float64}


def test_hash_is_uniform_and_depends_on_the_seed():
    numbers = torch.arange(2**16, dtype=torch.int32)
    random = hash_int32(numbers)
    assert len(random.unique()) == len(numbers)  # the hash is invertible
    for shift in range(0, 32, 4):
        counts = torch.bincount((random >> shift) & 15, minlength=16)
        assert ((counts - 4096).abs() < 300).all()  # 5 standard deviations
    agreement = ((random & 0xFFFF) == (hash_int32(numbers + 12345) & 0xFFFF)).double().mean()
    assert agreement < 1e-3


def test_rounding_to_bfloat16_is_unbiased():
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
    assert torch.equal(rounded[:256], values[:256])  # exact in bfloat16
    assert not rounded[-256:].any()


@pytest.mark.parametrize(
    ("quantise", "dequantise", "signed"),
    [(quantise_first, dequantise_first, True), (quantise_second, dequantise_second, False)],
)
def test_8_bit_rounding_is_unbiased(quantise, dequantise, signed):
    sizes = torch.logspace(-7, 0, 64, dtype=torch.float64).repeat(4).float()  # one block; the largest is 1
    signs = torch.tensor([1.0, -1.0]).repeat(BLOCK_SIZE // 2) if signed else 1.0
    block = sizes * signs
    samples = 20_000
    values = block.expand(samples, BLOCK_SIZE).contiguous()
    codes, scale = quantise(values, random_bits(samples))
    assert codes.dtype == torch.uint8
    assert scale.shape == (samples, 1)
    restored = dequantise(codes, scale).double()
    error = (restored.mean(dim=0) - block).abs()
    assert (error < 5 * restored.std(dim=0) / samples**0.5 + 1e-6 * block.abs()).all()
    # the largest value of a block is exact
    torch.testing.assert_close(restored[:, sizes == 1.0], values[:, sizes == 1.0].double())


def test_positive_second_moment_never_becomes_zero():
    second = torch.zeros(1, BLOCK_SIZE)
    second[0, :4] = torch.tensor([1.0, 1e-12, 1e-25, 1e-37])
    for seed in range(50):
        restored = dequantise_second(*quantise_second(second, random_bits(1, seed)))
        assert (restored[0, :4] > 0).all()
        assert not restored[0, 4:].any()


def test_8_bit_error_is_small_relative_to_the_largest_value_of_a_block():
    torch.manual_seed(0)
    first = torch.randn(64, BLOCK_SIZE) * torch.logspace(-12, 3, 64)[:, None]
    second = first.square() * torch.rand(64, BLOCK_SIZE)
    stored = store_moments(first, second, "int8", torch.tensor(5, dtype=torch.int32))
    first_restored, second_restored = read_moments(stored, "int8", torch.float32)
    first_error = (first_restored - first).abs() / first.abs().amax(dim=1, keepdim=True)
    root_error = (second_restored.sqrt() - second.sqrt()).abs() / second.sqrt().amax(dim=1, keepdim=True)
    assert first_error.max() < 2 / 127
    assert root_error.max() < 2 / 255


@pytest.mark.parametrize("moment_format", FORMATS)
def test_moving_average_forgets_a_large_initial_value(moment_format):
    # with rounding to nearest, bfloat16 and 8 bits would both stay at 1
    spread = torch.logspace(-1, 0, BLOCK_SIZE).expand(8, BLOCK_SIZE)
    stored = zero_moments(moment_format, 8, torch.float32, torch.device("cpu"))
    exact = spread.square().clone()
    zero = torch.zeros_like(spread)
    stored = store_moments(zero, exact, moment_format, torch.tensor(0, dtype=torch.int32))
    gradient = 0.1 * spread.flip(1)
    for step in range(1, 2001):
        exact = exact * 0.999 + gradient.square() * 0.001
        _, second = read_moments(stored, moment_format, torch.float32)
        second = second * 0.999 + gradient.square() * 0.001
        stored = store_moments(zero, second, moment_format, hash_int32(torch.tensor(step, dtype=torch.int32)))
    _, second = read_moments(stored, moment_format, torch.float32)
    ratio = (second / exact).sqrt()
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.03)
    assert ratio.std().item() < {"float32": 1e-4, "bfloat16": 0.06, "int8": 0.06}[moment_format]
