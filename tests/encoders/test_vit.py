"""The ViT encoder: fused attention, compilation, checkpointing, and errors of invalid input."""

import numpy
import pytest
import timm
import torch
from support import (
    FAMILIES,
    cls_attention,
    full_attention,
    random_tiles,
    randomise,
    relative_difference,
    small_encoder,
    step_gradient,
)
from torch import nn

from tapfm.adaptation.chunked import Chunking
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import SettingError, TileError, UnsupportedEncoderError

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_blocks_give_the_same_gradient(family):
    encoder = small_encoder(family, depth=3)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    encoder.recompute = ("block",) * len(encoder.vit.blocks)
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9
    chunked = step_gradient(encoder, aggregator, tiles, chunking=Chunking(2, keep_graphs=0))
    assert relative_difference(chunked, expected) < 1e-9


def test_checkpointed_blocks_after_frozen_blocks_have_gradients():
    """Reentrant checkpointing would silently give no gradient, because its input needs none."""
    encoder = small_encoder(depth=3)
    encoder.vit.requires_grad_(False)
    encoder.vit.blocks[-2:].requires_grad_(True)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    encoder.recompute = ("block",) * len(encoder.vit.blocks)
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9


@pytest.mark.parametrize("noise", [{"drop_path_rate": 0.5}, {"proj_drop_rate": 0.3}, {"attn_drop_rate": 0.3}], ids=str)
@pytest.mark.parametrize("family", ["registers", "RoPE"])
def test_dropout_of_the_last_block_matches_timm(family, noise):
    encoder = small_encoder(family, feature="cls+mean", **noise).train()
    tiles = random_tiles(encoder, 16)
    torch.manual_seed(3)
    tokens = encoder.vit.forward_features((tiles.double() - encoder.mean) / encoder.std)
    expected = torch.cat([tokens[:, 0], tokens[:, encoder.vit.num_prefix_tokens :].mean(1)], 1)
    torch.manual_seed(3)
    torch.testing.assert_close(encoder(tiles).z_KD, expected)
    assert not torch.allclose(expected, encoder.eval()(tiles).z_KD), "this test needs active dropout"


def test_checkpointed_blocks_save_less_memory_for_backward():
    def saved_bytes(checkpointed):
        encoder = small_encoder(depth=4)
        encoder.recompute = ("block" if checkpointed else "nothing",) * len(encoder.vit.blocks)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            encoder(random_tiles(encoder))
        return sum(sizes)

    assert saved_bytes(True) < saved_bytes(False) / 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads the .grad of its inputs
@pytest.mark.parametrize("family", ["plain ViT", "registers", "RoPE", "CLS + mean"])
def test_encoder_compiles_without_graph_breaks(family):
    """aot_eager traces like inductor, but needs no C++ compiler."""
    encoder = small_encoder(family, dtype=torch.float32)
    tiles = random_tiles(encoder)
    expected = encoder(tiles)
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tiles).z_KD, expected.z_KD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(tiles).r_K, expected.r_K, rtol=1e-5, atol=0)
    aggregator = cls_attention(encoder)
    plain = step_gradient(encoder, aggregator, tiles)
    for block in encoder.vit.blocks[:-1]:
        block.compile(backend="aot_eager")
    assert relative_difference(step_gradient(encoder, aggregator, tiles), plain) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_last_block_computes_only_the_cls_token_if_only_that_is_used(family):
    encoder = small_encoder(family)
    sizes = []
    encoder.vit.blocks[-1].mlp.register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[1]))
    encoder(random_tiles(encoder))
    tokens = encoder.vit.num_prefix_tokens + encoder.vit.patch_embed.num_patches
    assert sizes == [1 if encoder.feature == "cls" else tokens]


def test_no_n_by_n_attention_matrix_is_saved():
    encoder = small_encoder("plain ViT")
    tokens = encoder.vit.num_prefix_tokens + encoder.vit.patch_embed.num_patches
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        encoder(random_tiles(encoder))
    assert len(shapes) > 20
    assert not [shape for shape in shapes if shape[-2:] == (tokens, tokens)]


def test_pixels_are_normalised_with_mean_and_std_of_the_card():
    card = find_encoder_card("h-optimus-0")
    encoder = small_encoder("registers")
    inputs = []
    encoder.vit.patch_embed.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    tiles = random_tiles(encoder)
    encoder(tiles)
    mean, std = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1, 1) for x in (card.mean, card.std))
    torch.testing.assert_close(inputs[0], (tiles / 255.0 - mean) / std, rtol=1e-6, atol=1e-6)


def test_adapter_on_the_last_qkv_layer_is_used():
    """Adapters replace the linear layer; reading its weight instead of calling it would ignore them."""
    encoder = small_encoder("plain ViT").eval()
    tiles = random_tiles(encoder)
    before = encoder(tiles)

    class Adapted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear, self.delta = linear, nn.Linear(32, 96).double()

        def forward(self, x):
            return self.linear(x) + self.delta(x)

    encoder.vit.blocks[-1].attn.qkv = Adapted(encoder.vit.blocks[-1].attn.qkv)
    after = encoder(tiles)
    assert not torch.allclose(before.r_K, after.r_K, rtol=1e-6)
    assert not torch.allclose(before.z_KD, after.z_KD, rtol=1e-6)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (torch.zeros(2, 3, 42, 42), r"uint8 pixels \(0-255\); got torch.float32"),
        (numpy.zeros((2, 3, 42, 42), dtype="uint8"), "must be a torch tensor .* got ndarray"),
        (torch.zeros(2, 42, 42, 3, dtype=torch.uint8), "got 2 x 42 x 42 x 3"),
        (torch.zeros(3, 42, 42, dtype=torch.uint8), "got 3 x 42 x 42"),
        (torch.zeros(0, 3, 42, 42, dtype=torch.uint8), "with K > 0"),
        (torch.zeros(2, 3, 56, 42, dtype=torch.uint8), "42 x 56 px do not match this encoder, which takes 42 x 42"),
    ],
    ids=["float", "numpy", "channels last", "no batch", "empty", "size"],
)
def test_invalid_tiles_are_an_error(tiles, message):
    with pytest.raises(TileError, match=message) as raised:
        small_encoder()(tiles)
    assert raised.value.hint


def test_tile_size_that_is_not_a_multiple_of_the_patch_size_is_an_error():
    message = r"250 px do not match encoder 'uni', .* patch size of 16 px"
    with torch.device("meta"), pytest.raises(TileError, match=message) as raised:
        build_vit(find_encoder_card("uni"), tile_px=250)
    assert "224" in raised.value.hint
    assert "240 or 256" in raised.value.hint


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_little_patch16_reg1_gap_256", "no CLS token"),
        ("vit_base_patch16_xp_224", "ParallelScalingBlock|no CLS token"),
        ("vit_small_patch16_18x2_224", "ParallelThingsBlock"),
        ("swin_tiny_patch4_window7_224", "SwinTransformer"),
        ("vit_dlittle_patch16_reg1_gap_256", "no CLS token|DiffAttention"),
        ("cait_xxs24_224", "TalkingHeadAttn"),
    ],
)
def test_unsupported_architecture_is_an_error(architecture, message):
    with torch.device("meta"):
        vit = timm.create_model(architecture, pretrained=False, num_classes=0)
    with pytest.raises(UnsupportedEncoderError, match=message):
        VitEncoder(vit, **HALF)


def test_unknown_attention_class_is_an_error():
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    vit.blocks[-1].attn.__class__ = type("WindowedAttention", (type(vit.blocks[-1].attn),), {})
    with pytest.raises(UnsupportedEncoderError, match="WindowedAttention"):
        VitEncoder(vit, **HALF)


def test_model_with_average_pooling_is_an_error():
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0, global_pool="avg")
    with pytest.raises(UnsupportedEncoderError, match="final norm"):
        VitEncoder(vit, **HALF)


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("vit_small_patch16_rope_mixed_ape_224", {}),  # a rotary embedding per block
        ("vit_small_patch16_rope_224", {}),  # AttentionRope
        ("eva02_tiny_patch14_224", {"img_size": 56}),  # separate biases of q and v
        ("vit_small_patch16_224", {"qk_norm": True}),
        ("vit_small_patch16_224", {"scale_attn_norm": True}),
    ],
    ids=str,
)
def test_other_architectures_match_timm(architecture, extra):
    torch.manual_seed(0)
    arguments = {"depth": 2, "img_size": 48, "num_classes": 0, "global_pool": "token"} | extra
    assert_matches_timm(timm.create_model(architecture, pretrained=False, **arguments))


def test_gated_attention_matches_timm():
    torch.manual_seed(0)
    vit = timm.create_model("vit_small_patch16_224", depth=2, img_size=48, num_classes=0)
    vit.blocks[-1].attn = timm.layers.Attention(384, num_heads=6, qkv_bias=True, gated=True)
    assert_matches_timm(vit)


def assert_matches_timm(vit):
    randomise(vit)
    encoder = VitEncoder(vit, **HALF).eval()
    tiles = random_tiles(encoder)
    attention_KHNN, tokens_KND = full_attention(encoder, tiles)
    expected_r_K = attention_KHNN[:, :, 0, vit.num_prefix_tokens :].mean((1, 2))
    z_KD, r_K = encoder(tiles)
    torch.testing.assert_close(z_KD, tokens_KND[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(r_K, expected_r_K, rtol=1e-5, atol=0)


def test_unknown_feature_is_an_error():
    with pytest.raises(SettingError, match="cls, cls\\+mean; got 'mean'"):
        VitEncoder(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0), **HALF, feature="mean")
