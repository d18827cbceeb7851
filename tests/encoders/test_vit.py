"""The encoder under fused attention, autocast, compilation and checkpointing; and what it refuses."""

import pytest
import timm
import torch
from support import FAMILIES, cls_attention, relative_difference, small_encoder, some_tiles, step_gradient
from torch import nn

from tapfm.adaptation.chunked import Chunking
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import TileError, UnsupportedEncoderError

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_blocks_give_the_same_gradient(family):
    encoder = small_encoder(family, depth=3)
    aggregator, tiles = cls_attention(encoder), some_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    encoder.checkpoint_blocks = True
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9
    pieces = step_gradient(encoder, aggregator, tiles, chunking=Chunking(2, keep=0))
    assert relative_difference(pieces, expected) < 1e-9


def test_checkpointed_blocks_hold_less_for_backward():
    def saved_bytes(checkpointed):
        encoder = small_encoder(depth=4)
        encoder.checkpoint_blocks = checkpointed
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
        (torch.zeros(2, 3, 42, 42), "must be uint8"),
        (torch.zeros(2, 42, 42, 3, dtype=torch.uint8), "got 2 x 42 x 42 x 3"),
        (torch.zeros(3, 42, 42, dtype=torch.uint8), "got 3 x 42 x 42"),
        (torch.zeros(0, 3, 42, 42, dtype=torch.uint8), "with K > 0"),
        (torch.zeros(2, 3, 56, 42, dtype=torch.uint8), "42 x 56 px do not fit this encoder, which takes 42 x 42"),
    ],
    ids=["float", "channels last", "no batch", "empty", "size"],
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


@pytest.mark.parametrize("architecture", ["vit_small_patch16_rope_mixed_ape_224", "vit_small_patch16_rope_224"])
def test_other_rotary_families_of_timm_work(architecture):
    torch.manual_seed(0)
    vit = timm.create_model(architecture, pretrained=False, depth=2, img_size=48, num_classes=0, global_pool="token")
    encoder = VitEncoder(vit, **HALF).eval()
    tiles = some_tiles(encoder)
    pixels = (tiles.float() - encoder.mean) / encoder.std
    torch.testing.assert_close(encoder(tiles).z_KD, vit.forward_features(pixels)[:, 0], rtol=1e-4, atol=1e-5)
