"""An encoder prepared for inference: each way to compute gives what the encoder itself gives."""

import copy

import pytest
import torch
from support import small_encoder, some_tiles
from torch import nn

from tapfm.encoders import inference
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.float8 import _Float8Linear as Float8Linear
from tapfm.encoders.inference import (
    _COMPILE_FROM_FLOP as COMPILE_FROM_FLOP,
)
from tapfm.encoders.inference import (
    _flop_per_tile as flop_per_tile,
)
from tapfm.encoders.inference import (
    default_batch,
    precision_name,
    prepare_encoder,
    wrap_encoder,
)
from tapfm.encoders.vit import VitEncoder


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_float32_is_the_encoder_itself_however_tiles_are_batched(chunk):
    encoder = small_encoder(dtype=torch.float32)
    tiles = some_tiles(encoder, 5)
    with torch.no_grad():
        expected = encoder.eval()(tiles)
    found = prepare_encoder(copy.deepcopy(encoder)).encode(tiles, chunk)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert not mine.requires_grad
        assert mine.dtype == torch.float32


@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_low_precision_on_a_cpu_is_autocast_over_the_weights_as_they_are(precision, dtype):
    encoder = small_encoder(dtype=torch.float32)
    tiles = some_tiles(encoder, 5)
    expected = wrap_encoder(encoder, dtype).encode(tiles, 2)
    ready = prepare_encoder(encoder, precision)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    found = ready.encode(tiles, 2)
    assert torch.equal(found.z_KD, expected.z_KD)
    assert torch.equal(found.r_K, expected.r_K)
    assert not torch.equal(found.z_KD, wrap_encoder(encoder).encode(tiles, 2).z_KD)


def test_float8_lowers_all_else_to_bfloat16():
    encoder = small_encoder(dtype=torch.float32, depth=3)
    tiles = some_tiles(encoder, 5)
    exact = wrap_encoder(copy.deepcopy(encoder)).encode(tiles, 5)
    found = prepare_encoder(encoder, "float8").encode(tiles, 2)
    assert {parameter.dtype for parameter in encoder.vit.parameters()} == {torch.bfloat16}
    assert any(isinstance(module, Float8Linear) for module in encoder.modules())
    assert found.z_KD.dtype == found.r_K.dtype == torch.float32
    assert nn.functional.cosine_similarity(found.z_KD, exact.z_KD).min() > 0.97


def test_dropout_is_off_and_nothing_learns():
    encoder = small_encoder(dtype=torch.float32, drop_path_rate=0.5, proj_drop_rate=0.5).train()
    ready, tiles = prepare_encoder(encoder), some_tiles(encoder, 3)
    assert torch.equal(ready.encode(tiles, 3).z_KD, ready.encode(tiles, 3).z_KD)
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_it_is_compiled_where_that_is_worth_it_or_asked_for(monkeypatch):
    compiled = []
    monkeypatch.setattr(VitEncoder, "compile_blocks", lambda *_: compiled.append(True))

    def is_compiled(*args, **kwargs):
        compiled.clear()
        prepare_encoder(small_encoder(dtype=torch.float32), *args, **kwargs)
        return bool(compiled)

    much = int(COMPILE_FROM_FLOP / flop_per_tile(small_encoder())) + 1
    assert not is_compiled(tiles=much)  # on a CPU
    assert is_compiled(tiles=1, compiled=True)
    monkeypatch.setattr(inference, "can_compile", lambda _: True)
    assert is_compiled(tiles=much)
    assert not is_compiled(tiles=much // 2)
    assert not is_compiled(tiles=much, compiled=False)
    assert is_compiled("float8", tiles=1)


def test_operations_are_counted_as_the_card_has_them():
    card = encoder_card("uni")
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std)
    assert flop_per_tile(encoder) == pytest.approx(1e9 * card.gflops, rel=0.1)


@pytest.mark.parametrize(("key", "batch"), [("h-optimus-0", 128), ("uni", 256), ("kaiko-s16", 256)])
def test_a_gpu_gets_as_many_tiles_at_a_time_as_fill_it(key, batch):
    card = encoder_card(key)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std)
    assert default_batch(encoder) == batch  # of any device but a CPU
    assert default_batch(small_encoder()) == 64


def test_precisions_have_the_names_of_their_types():
    names = [precision_name(each) for each in (None, torch.bfloat16, torch.float16)]
    assert names == ["float32", "bfloat16", "float16"]


def test_memory_that_ends_in_a_library_while_recording_is_no_reason_to_go_on_without(monkeypatch):
    """Said so, a smaller batch is tried; taken for something that cannot be recorded, it never would be again."""
    ready = prepare_encoder(small_encoder(dtype=torch.float32))
    tiles = some_tiles(ready.encoder, 2)
    ready._may_capture = True
    monkeypatch.setattr(inference, "_CapturedGraph", lambda _encoder, _batch, run: run(tiles))

    def no_memory(_):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(ready.encoder, "forward", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        ready.encode(tiles, 2)
    assert ready._may_capture
