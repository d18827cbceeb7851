"""Activation checkpointing does not change gradients, and compiled blocks are compiled once."""

import os
from typing import get_args

import pytest
import torch
from support import FAMILIES, cls_attention, random_tiles, relative_difference, small_encoder, step_gradient
from timm.layers import SwiGLU
from torch import nn
from torch._dynamo.utils import counters

from tapfm.adaptation.chunked import Chunking
from tapfm.encoders import precision, vit
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.blocks import Recompute
from tapfm.encoders.precision import can_compile_on_gpu, cast_weights

LEVELS = get_args(Recompute)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_checkpointing_level_gives_the_same_gradient(family, level):
    encoder = small_encoder(family, depth=3)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    features = encoder(tiles).z_KD
    encoder.recompute = (level,) * 3
    torch.testing.assert_close(encoder(tiles).z_KD, features)
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9
    chunked = step_gradient(encoder, aggregator, tiles, chunking=Chunking(2, keep_graphs=1))
    assert relative_difference(chunked, expected) < 1e-9


@pytest.mark.parametrize("level", LEVELS)
def test_swiglu_and_unknown_mlp_classes_give_the_same_gradient(level):
    class Other(nn.Sequential):
        pass

    for mlp in (SwiGLU(32, 48, norm_layer=nn.LayerNorm), Other(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))):
        encoder = small_encoder(depth=3)
        encoder.vit.blocks[0].mlp = mlp.double()
        aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
        expected = step_gradient(encoder, aggregator, tiles)
        encoder.recompute = (level, "nothing", "nothing")
        assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scope", ["last:2", "lora:4"])
def test_every_checkpointing_level_works_with_frozen_parameters(scope, level):
    encoder = small_encoder(depth=3)
    apply_scope(encoder, Scope.parse(scope))
    for name, parameter in encoder.named_parameters():
        if "lora_B" in name:  # initialised to 0, which would hide the gradient of lora_A
            nn.init.normal_(parameter, std=0.1)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    encoder.recompute = (level,) * 3
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("noise", [{"drop_path_rate": 0.5}, {"proj_drop_rate": 0.3}, {"attn_drop_rate": 0.3}], ids=str)
def test_recomputed_blocks_use_the_same_dropout_masks(noise, level):
    encoder = small_encoder(depth=3, **noise).train()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder, 8)

    def gradient(level):
        encoder.recompute = (level,) * 3
        torch.manual_seed(3)
        return step_gradient(encoder, aggregator, tiles)

    assert relative_difference(gradient(level), gradient("nothing")) < 1e-9


@pytest.fixture
def compile_counters(monkeypatch):
    """Compile with aot_eager, which traces like inductor but needs no compiler; a graph break is an error."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="aot_eager", fullgraph=True))
    vit._compile.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    vit._compile.cache_clear()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads the .grad of its inputs
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", ["registers", "RoPE"])
def test_compiled_blocks_give_the_same_gradient_without_recompiling(compile_counters, family, level):
    encoder = small_encoder(family, depth=3, dtype=torch.float32)
    encoder.recompute = (level,) * 3
    aggregator = cls_attention(encoder)
    expected = step_gradient(encoder, aggregator, random_tiles(encoder, 7))
    encoder.compile_blocks()
    assert relative_difference(step_gradient(encoder, aggregator, random_tiles(encoder, 7)), expected) < 1e-5
    step_gradient(encoder, aggregator, random_tiles(encoder, 6), chunking=Chunking(3, keep_graphs=0))
    graphs = compile_counters["unique_graphs"]
    assert graphs == 6, "embedding, blocks and last block, each with and without gradients"
    for tiles, chunk in ((11, 3), (5, 2), (30, 8), (1, 1)):
        step_gradient(encoder, aggregator, random_tiles(encoder, tiles), chunking=Chunking(chunk, keep_graphs=1))
    assert compile_counters["unique_graphs"] == graphs


def test_cast_weights_compute_in_bfloat16_and_return_float32():
    encoder = small_encoder(dtype=torch.float32)
    tiles = random_tiles(encoder)
    parameters, exact = list(encoder.parameters()), encoder(tiles)
    cast_weights(encoder, torch.bfloat16)
    assert list(map(id, encoder.parameters())) == list(map(id, parameters))
    assert all(parameter.dtype == torch.bfloat16 for parameter in encoder.vit.parameters())
    assert encoder.mean.dtype == torch.float32
    ours = encoder(tiles)
    assert ours.z_KD.dtype == ours.r_K.dtype == torch.float32
    assert torch.cosine_similarity(ours.z_KD, exact.z_KD).min() > 0.999
    torch.testing.assert_close(ours.r_K, exact.r_K, rtol=0.02, atol=0)
    assert not torch.equal(ours.z_KD, exact.z_KD)


def test_mean_of_patch_tokens_is_not_rounded_to_bfloat16():
    encoder = small_encoder("CLS + mean", dtype=torch.float32)
    cast_weights(encoder, torch.bfloat16)
    cls, mean = encoder(random_tiles(encoder)).z_KD.chunk(2, dim=1)
    assert torch.equal(cls, cls.bfloat16().float())
    assert (mean != mean.bfloat16().float()).float().mean() > 0.5


def test_rotary_positions_stay_in_float32():
    encoder = small_encoder("RoPE", dtype=torch.float32)
    cast_weights(encoder, torch.bfloat16)
    assert {buffer.dtype for buffer in encoder.vit.buffers() if buffer.is_floating_point()} <= {torch.float32}
    assert encoder(random_tiles(encoder)).z_KD.isfinite().all()


@pytest.mark.parametrize("writable", [True, False])
def test_compiled_code_is_stored_in_the_user_cache_if_writable(tmp_path, monkeypatch, writable):
    home = tmp_path / "cache"
    if not writable:
        home.write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored after the test")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    vit._set_compile_cache()
    expected = str(home / "tapfm" / "compiled") if writable else None
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == expected


def test_can_compile_on_gpu_is_false_for_a_cpu():
    assert not can_compile_on_gpu(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "compiler", "headers", "expected"),
    [
        ((8, 0), "gcc", True, True),
        ((8, 0), "clang", True, True),
        ((6, 0), "gcc", True, False),
        ((8, 0), "none", True, False),
        ((8, 0), "gcc", False, False),
    ],
)
def test_can_compile_on_gpu_needs_capability_compiler_and_headers(
    monkeypatch, tmp_path, capability, compiler, headers, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(precision.shutil, "which", lambda name: name if name == compiler else None)
    monkeypatch.setattr(precision.sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    if headers:
        (tmp_path / "Python.h").touch()
    assert can_compile_on_gpu(torch.device("cuda")) is expected
