"""The inference encoder gives the same features as the encoder, in each precision."""

import copy

import pytest
import torch
from support import random_tiles, small_encoder
from torch import nn

from tapfm.encoders import inference
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.float8 import _Float8Linear as Float8Linear
from tapfm.encoders.inference import (
    _COMPILE_FROM_FLOP as COMPILE_FROM_FLOP,
)
from tapfm.encoders.inference import (
    _estimate_flop_per_tile as flop_per_tile,
)
from tapfm.encoders.inference import (
    default_batch,
    precision_name,
    prepare_encoder,
    wrap_encoder,
)
from tapfm.encoders.vit import VitEncoder


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_float32_features_do_not_depend_on_the_batch_size(batch):
    encoder = small_encoder(dtype=torch.float32)
    tiles = random_tiles(encoder, 5)
    with torch.no_grad():
        expected = encoder.eval()(tiles)
    found = prepare_encoder(copy.deepcopy(encoder)).encode(tiles, batch)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference)
        assert not ours.requires_grad
        assert ours.dtype == torch.float32


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_half_precision_on_a_cpu_uses_autocast(precision, dtype):
    encoder = small_encoder(dtype=torch.float32)
    tiles = random_tiles(encoder, 5)
    expected = wrap_encoder(encoder, dtype).encode(tiles, 2)
    prepared = prepare_encoder(encoder, precision)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    found = prepared.encode(tiles, 2)
    assert torch.equal(found.z_KD, expected.z_KD)
    assert torch.equal(found.r_K, expected.r_K)
    assert not torch.equal(found.z_KD, wrap_encoder(encoder).encode(tiles, 2).z_KD)


def test_float8_encoder_has_other_weights_in_bfloat16():
    encoder = small_encoder(dtype=torch.float32, depth=3)
    tiles = random_tiles(encoder, 5)
    exact = wrap_encoder(copy.deepcopy(encoder)).encode(tiles, 5)
    found = prepare_encoder(encoder, "float8").encode(tiles, 2)
    assert {parameter.dtype for parameter in encoder.vit.parameters()} == {torch.bfloat16}
    assert any(isinstance(module, Float8Linear) for module in encoder.modules())
    assert found.z_KD.dtype == found.r_K.dtype == torch.float32
    assert nn.functional.cosine_similarity(found.z_KD, exact.z_KD).min() > 0.97


def test_dropout_is_off_and_parameters_are_frozen():
    encoder = small_encoder(dtype=torch.float32, drop_path_rate=0.5, proj_drop_rate=0.5).train()
    prepared, tiles = prepare_encoder(encoder), random_tiles(encoder, 3)
    assert torch.equal(prepared.encode(tiles, 3).z_KD, prepared.encode(tiles, 3).z_KD)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_blocks_are_compiled_for_large_jobs_or_on_request(monkeypatch):
    compiled = []
    monkeypatch.setattr(VitEncoder, "compile_blocks", lambda *_: compiled.append(True))

    def is_compiled(*args, **kwargs):
        compiled.clear()
        prepare_encoder(small_encoder(dtype=torch.float32), *args, **kwargs)
        return bool(compiled)

    many = int(COMPILE_FROM_FLOP / flop_per_tile(small_encoder())) + 1
    assert not is_compiled(tiles=many)  # on a CPU
    assert is_compiled(tiles=1, compiled=True)
    monkeypatch.setattr(inference, "can_compile_on_gpu", lambda _: True)
    assert is_compiled(tiles=many)
    assert not is_compiled(tiles=many // 2)
    assert not is_compiled(tiles=many, compiled=False)
    assert is_compiled("float8", tiles=1)


def test_estimated_operations_match_the_card():
    card = find_encoder_card("uni")
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std)
    assert flop_per_tile(encoder) == pytest.approx(1e9 * card.gflops, rel=0.1)


@pytest.mark.parametrize(("key", "batch"), [("h-optimus-0", 128), ("uni", 256), ("kaiko-s16", 256)])
def test_default_batch_depends_on_the_encoder(key, batch):
    card = find_encoder_card(key)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std)
    assert default_batch(encoder) == batch  # any device except a CPU
    assert default_batch(small_encoder()) == 64


def test_precision_names():
    names = [precision_name(each) for each in (None, torch.bfloat16, torch.float16)]
    assert names == ["float32", "bfloat16", "float16"]


def test_out_of_memory_error_of_a_library_during_capture_is_raised(monkeypatch):
    """The caller then retries with a smaller batch, and capturing stays enabled."""
    prepared = prepare_encoder(small_encoder(dtype=torch.float32))
    tiles = random_tiles(prepared.encoder, 2)
    prepared._may_capture = True
    monkeypatch.setattr(inference, "_CapturedGraph", lambda _encoder, _batch, run: run(tiles))

    def no_memory(_):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(prepared.encoder, "forward", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        prepared.encode(tiles, 2)
    assert prepared._may_capture
