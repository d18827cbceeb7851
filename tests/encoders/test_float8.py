"""Linear layers in float8: rounding error, converted layers, and precision of features."""

import copy

import pytest
import torch
from support import FAMILIES, random_tiles, small_encoder
from torch import nn

from tapfm.encoders.float8 import _FLOAT8_MAX as FLOAT8_MAX
from tapfm.encoders.float8 import _Float8Linear as Float8Linear
from tapfm.encoders.float8 import _quantise_rows as quantise_rows
from tapfm.encoders.float8 import check_float8_support, convert_to_float8
from tapfm.encoders.precision import cast_weights
from tapfm.encoders.weights import load_encoder
from tapfm.errors import InputError


def random_values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_relative_rounding_error_is_at_most_a_sixteenth():
    rows = random_values(64, 512) * torch.logspace(-6, 6, 64)[:, None]
    values, scale = quantise_rows(rows)
    restored = values.float() * scale
    largest = rows.abs().amax(1, keepdim=True)
    normal = rows.abs() > largest * 2**-6 / FLOAT8_MAX  # smaller values are subnormal
    assert ((restored - rows).abs() <= rows.abs() / 16 * (1 + 1e-5))[normal].all()
    assert ((restored - rows).abs() <= largest * 2**-10 / FLOAT8_MAX * (1 + 1e-5))[~normal].all()
    torch.testing.assert_close(restored.abs().amax(1, keepdim=True), largest)
    assert scale.shape == (64, 1)


def test_zeros_and_extreme_values_stay_finite():
    values, scale = quantise_rows(torch.stack([torch.zeros(8), torch.full((8,), 3.4e38), torch.full((8,), 1e-30)]))
    restored = values.float() * scale
    assert restored.isfinite().all()
    assert (restored[0] == 0).all()


@pytest.mark.parametrize("bias", [True, False])
def test_layer_output_is_the_product_of_rounded_values(bias):
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias)
    x = random_values(2, 5, 64)
    found = Float8Linear(layer)(x)
    weight, x_rounded = (
        values.double() * scale for values, scale in (quantise_rows(layer.weight), quantise_rows(x.flatten(0, 1)))
    )
    expected = x_rounded @ weight.t() + (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(found, expected.float().reshape(2, 5, 48), rtol=1e-5, atol=1e-5)
    exact = layer(x)
    assert found.shape == exact.shape
    assert (found - exact).norm() / exact.norm() < 0.05
    assert Float8Linear(layer.bfloat16())(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_all_blocks_except_the_last_are_converted(family):
    encoder = small_encoder(family, dtype=torch.float32, depth=3)
    replaced = convert_to_float8(encoder)
    *blocks, last = ([type(each) for each in block.modules()] for block in encoder.vit.blocks)
    assert replaced == sum(types.count(Float8Linear) for types in blocks) >= 2 * 2
    assert Float8Linear not in last
    assert not any(isinstance(each, Float8Linear) for each in (encoder.vit.patch_embed.proj, encoder.vit.norm))
    encoded = encoder(random_tiles(encoder))
    assert encoded.z_KD.isfinite().all()


def test_layers_of_unsupported_sizes_are_not_converted():
    encoder = small_encoder(dtype=torch.float32, embed_dim=24, depth=3)
    assert convert_to_float8(encoder) == 0
    assert not any(isinstance(each, Float8Linear) for each in encoder.modules())


def test_features_of_a_pretrained_encoder_are_precise():
    plain = load_encoder("tapfm-pocket").encoder.eval()
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 256, (8, 3, 14, 14), generator=generator).float()
    tiles = nn.functional.interpolate(coarse, size=(224, 224), mode="bilinear").to(torch.uint8)
    bfloat16, float8 = copy.deepcopy(plain), copy.deepcopy(plain)
    for each in (bfloat16, float8):
        cast_weights(each, torch.bfloat16)
    assert convert_to_float8(float8) > 0
    with torch.no_grad():
        exact, in_bfloat16, in_float8 = (each(tiles) for each in (plain, bfloat16, float8))
    assert nn.functional.cosine_similarity(in_float8.z_KD, exact.z_KD).min() > 0.99
    assert nn.functional.cosine_similarity(in_bfloat16.z_KD, exact.z_KD).min() > 0.999
    torch.testing.assert_close(in_float8.r_K, exact.r_K, rtol=0.05, atol=0)
    assert not torch.equal(in_float8.z_KD, in_bfloat16.z_KD)


def test_device_without_float8_is_an_error(monkeypatch):
    with pytest.raises(InputError, match="CPU does not support float8") as raised:
        check_float8_support(torch.device("cpu"))
    assert "bfloat16" in raised.value.hint
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    for capability, is_error in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        if is_error:
            with pytest.raises(InputError, match="A100 does not support"):
                check_float8_support(torch.device("cuda"))
        else:
            check_float8_support(torch.device("cuda"))
