"""The encoder under fused attention, autocast, compilation and checkpointing; and what it refuses."""

import numpy
import pytest
import timm
import torch
from support import (
    FAMILIES,
    cls_attention,
    full_attention,
    randomise,
    relative_difference,
    small_encoder,
    some_tiles,
    step_gradient,
)
from torch import nn

from tapfm.adaptation.chunked import Chunking
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import SettingError, TileError, UnsupportedEncoderError

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_blocks_give_the_same_gradient(family):
    encoder = small_encoder(family, depth=3)
    aggregator, tiles = cls_attention(encoder), some_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    encoder.recompute = ("block",) * len(encoder.vit.blocks)
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9
    pieces = step_gradient(encoder, aggregator, tiles, chunking=Chunking(2, keep_graphs=0))
    assert relative_difference(pieces, expected) < 1e-9


def test_checkpointed_blocks_learn_behind_frozen_ones():
    """There the reentrant form of checkpointing, whose input has no gradient, would give none without an error."""
    encoder = small_encoder(depth=3)
    encoder.vit.requires_grad_(False)
    encoder.vit.blocks[-2:].requires_grad_(True)
    aggregator, tiles = cls_attention(encoder), some_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    encoder.recompute = ("block",) * len(encoder.vit.blocks)
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9


@pytest.mark.parametrize("noise", [{"drop_path_rate": 0.5}, {"proj_drop_rate": 0.3}, {"attn_drop_rate": 0.3}], ids=str)
@pytest.mark.parametrize("family", ["registers", "RoPE"])
def test_the_last_block_drops_what_timms_own_would(family, noise):
    encoder = small_encoder(family, feature="cls+mean", **noise).train()
    tiles = some_tiles(encoder, 16)
    torch.manual_seed(3)
    tokens = encoder.vit.forward_features((tiles.double() - encoder.mean) / encoder.std)
    expected = torch.cat([tokens[:, 0], tokens[:, encoder.vit.num_prefix_tokens :].mean(1)], 1)
    torch.manual_seed(3)
    torch.testing.assert_close(encoder(tiles).z_KD, expected)
    assert not torch.allclose(expected, encoder.eval()(tiles).z_KD), "nothing was dropped"


def test_checkpointed_blocks_hold_less_for_backward():
    def saved_bytes(checkpointed):
        encoder = small_encoder(depth=4)
        encoder.recompute = ("block" if checkpointed else "nothing",) * len(encoder.vit.blocks)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            encoder(some_tiles(encoder))
        return sum(sizes)

    assert saved_bytes(True) < saved_bytes(False) / 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at its inputs' .grad
@pytest.mark.parametrize("family", ["plain ViT", "registers", "RoPE", "CLS + mean"])
def test_compiled_whole_without_a_graph_break(family):
    """aot_eager traces forward and backward as inductor would, and needs no C++ compiler."""
    encoder = small_encoder(family, dtype=torch.float32)
    tiles = some_tiles(encoder)
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
def test_the_last_block_runs_for_the_cls_token_alone_when_only_that_is_used(family):
    encoder = small_encoder(family)
    sizes = []
    encoder.vit.blocks[-1].mlp.register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[1]))
    encoder(some_tiles(encoder))
    tokens = encoder.vit.num_prefix_tokens + encoder.vit.patch_embed.num_patches
    assert sizes == [1 if encoder.feature == "cls" else tokens]


def test_no_n_by_n_matrix_is_ever_made():
    encoder = small_encoder("plain ViT")
    tokens = encoder.vit.num_prefix_tokens + encoder.vit.patch_embed.num_patches
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        encoder(some_tiles(encoder))
    assert len(shapes) > 20
    assert not [shape for shape in shapes if shape[-2:] == (tokens, tokens)]


def test_pixels_are_normalised_with_the_cards_statistics():
    card = encoder_card("h-optimus-0")
    encoder = small_encoder("registers")
    seen = []
    encoder.vit.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tiles = some_tiles(encoder)
    encoder(tiles)
    mean, std = (torch.tensor(x, dtype=torch.float64).view(1, 3, 1, 1) for x in (card.mean, card.std))
    torch.testing.assert_close(seen[0], (tiles / 255.0 - mean) / std, rtol=1e-6, atol=1e-6)


def test_an_adapter_on_the_last_projection_is_not_bypassed():
    """Low-rank adapters replace the linear layer; reading its weight instead of calling it would lose them."""
    encoder = small_encoder("plain ViT").eval()
    tiles = some_tiles(encoder)
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
        (torch.zeros(2, 3, 56, 42, dtype=torch.uint8), "42 x 56 px do not fit this encoder, which takes 42 x 42"),
    ],
    ids=["float", "numpy", "channels last", "no batch", "empty", "size"],
)
def test_wrong_tiles_are_refused(tiles, message):
    with pytest.raises(TileError, match=message) as refusal:
        small_encoder()(tiles)
    assert refusal.value.hint


def test_a_tile_size_that_is_no_multiple_of_the_patch_is_refused():
    message = r"250 px do not fit encoder 'uni', whose patches have 16 px"
    with torch.device("meta"), pytest.raises(TileError, match=message) as refusal:
        build_vit(encoder_card("uni"), tile_px=250)
    assert "224" in refusal.value.hint
    assert "240 or 256" in refusal.value.hint


@pytest.mark.parametrize(
    ("architecture", "named"),
    [
        ("vit_little_patch16_reg1_gap_256", "no CLS token"),
        ("vit_base_patch16_xp_224", "ParallelScalingBlock|no CLS token"),
        ("vit_small_patch16_18x2_224", "ParallelThingsBlock"),
        ("swin_tiny_patch4_window7_224", "SwinTransformer"),
        ("vit_dlittle_patch16_reg1_gap_256", "no CLS token|DiffAttention"),
        ("cait_xxs24_224", "TalkingHeadAttn"),
    ],
)
def test_attention_that_cannot_be_read_is_refused_by_name(architecture, named):
    with torch.device("meta"):
        vit = timm.create_model(architecture, pretrained=False, num_classes=0)
    with pytest.raises(UnsupportedEncoderError, match=named):
        VitEncoder(vit, **HALF)


def test_an_unknown_attention_class_is_refused_by_name():
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    vit.blocks[-1].attn.__class__ = type("WindowedAttention", (type(vit.blocks[-1].attn),), {})
    with pytest.raises(UnsupportedEncoderError, match="WindowedAttention"):
        VitEncoder(vit, **HALF)


def test_a_model_built_to_average_its_tokens_is_refused():
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0, global_pool="avg")
    with pytest.raises(UnsupportedEncoderError, match="final norm"):
        VitEncoder(vit, **HALF)


@pytest.mark.parametrize(
    ("architecture", "special"),
    [
        ("vit_small_patch16_rope_mixed_ape_224", {}),  # a rotary embedding per block
        ("vit_small_patch16_rope_224", {}),  # AttentionRope
        ("eva02_tiny_patch14_224", {"img_size": 56}),  # biases of q and v kept apart from the projection
        ("vit_small_patch16_224", {"qk_norm": True}),
        ("vit_small_patch16_224", {"scale_attn_norm": True}),
    ],
    ids=str,
)
def test_other_families_of_timm_work(architecture, special):
    torch.manual_seed(0)
    arguments = {"depth": 2, "img_size": 48, "num_classes": 0, "global_pool": "token"} | special
    assert_as_timm_computes(timm.create_model(architecture, pretrained=False, **arguments))


def test_gated_attention_works():
    torch.manual_seed(0)
    vit = timm.create_model("vit_small_patch16_224", depth=2, img_size=48, num_classes=0)
    vit.blocks[-1].attn = timm.layers.Attention(384, num_heads=6, qkv_bias=True, gated=True)
    assert_as_timm_computes(vit)


def assert_as_timm_computes(vit):
    randomise(vit)
    encoder = VitEncoder(vit, **HALF).eval()
    tiles = some_tiles(encoder)
    attention_KHNN, tokens_KND = full_attention(encoder, tiles)
    expected_r_K = attention_KHNN[:, :, 0, vit.num_prefix_tokens :].mean((1, 2))
    z_KD, r_K = encoder(tiles)
    torch.testing.assert_close(z_KD, tokens_KND[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(r_K, expected_r_K, rtol=1e-5, atol=0)


def test_an_unknown_feature_is_refused():
    with pytest.raises(SettingError, match="cls, cls\\+mean; got 'mean'"):
        VitEncoder(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0), **HALF, feature="mean")
