"""Inference on a GPU: lowered weights, recorded launches, compiled blocks and float8 give what the plain form gives."""

import copy

import pytest
import torch
from support import randomise
from torch.nn.functional import cosine_similarity

from tapfm.encoders import inference
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.inference import _CapturedGraph, _copy_to_device, prepare_encoder, wrap_encoder
from tapfm.encoders.precision import can_compile
from tapfm.encoders.vit import VitEncoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


def encoder(key="uni", depth=4):
    card = encoder_card(key)
    torch.manual_seed(0)
    vit = build_vit(card, extra={"depth": depth})
    for block in vit.blocks:
        randomise(block.ls1)
        randomise(block.ls2)
    return VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).cuda()


def tiles(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 224, 224), generator=generator, dtype=torch.uint8)


def never_captured(monkeypatch):
    monkeypatch.setattr(inference, "_CAPTURE_UP_TO_FLOP", 0)


def always_captured(monkeypatch):
    monkeypatch.setattr(inference, "_CAPTURE_UP_TO_FLOP", 1e30)


def test_lowered_weights_say_almost_what_float32_says(monkeypatch):
    never_captured(monkeypatch)
    one = encoder()
    exact = wrap_encoder(one).encode(tiles(20), 8)
    found = prepare_encoder(one, "bfloat16").encode(tiles(20), 8)
    assert {parameter.dtype for parameter in one.vit.parameters()} == {torch.bfloat16}
    assert found.z_KD.dtype == torch.float32
    assert cosine_similarity(found.z_KD, exact.z_KD).min() > 0.999


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_recorded_launches_give_the_same_also_for_fewer_tiles(monkeypatch, precision):
    one = encoder()
    never_captured(monkeypatch)
    expected = prepare_encoder(copy.deepcopy(one), precision).encode(tiles(21), 8)
    always_captured(monkeypatch)
    ready = prepare_encoder(one, precision)
    found = ready.encode(tiles(21), 8)  # 8, 8 and 5
    assert isinstance(ready._captured, _CapturedGraph)
    torch.testing.assert_close(found.z_KD, expected.z_KD, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.r_K, expected.r_K, rtol=1e-3, atol=1e-7)


def test_what_was_recorded_follows_new_weights_and_other_batches(monkeypatch):
    always_captured(monkeypatch)
    one = encoder()
    ready = prepare_encoder(one)
    first = ready.encode(tiles(8), 8)
    recorded = ready._captured
    with torch.no_grad():
        one.vit.norm.bias += 1  # in place: the recorded launches read it
    assert float((ready.encode(tiles(8), 8).z_KD - first.z_KD).mean()) == pytest.approx(1, abs=1e-3)
    assert ready._captured is recorded
    one.vit.norm.bias.data = one.vit.norm.bias.data.clone() + 1  # elsewhere: recorded anew
    assert float((ready.encode(tiles(8), 8).z_KD - first.z_KD).mean()) == pytest.approx(2, abs=1e-3)
    assert ready._captured is not recorded
    plain = wrap_encoder(one).encode(tiles(8), 4)  # of the same batches, whose kernels differ from those of larger ones
    torch.testing.assert_close(ready.encode(tiles(8), 4).z_KD, plain.z_KD, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_recorded_is_run_plainly(monkeypatch):
    always_captured(monkeypatch)
    one = encoder()
    expected = wrap_encoder(one).encode(tiles(8), 8)
    waits = one.vit.norm.register_forward_hook(lambda *_: torch.cuda.synchronize())  # not while recording
    ready = prepare_encoder(one)
    found = ready.encode(tiles(8), 8)
    assert ready._captured is None
    torch.testing.assert_close(found.z_KD, expected.z_KD, rtol=1e-3, atol=1e-3)
    waits.remove()
    torch.rand(3, device="cuda")  # the generator has not stayed in the recording


@pytest.mark.skipif(not can_compile(CUDA), reason="needs triton")
@pytest.mark.parametrize("precision", ["bfloat16", "float8"])
def test_compiled_blocks_say_the_same(monkeypatch, precision):
    if precision == "float8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs float8")
    never_captured(monkeypatch)
    plain, fused = encoder("h-optimus-0"), encoder("h-optimus-0")
    expected = prepare_encoder(plain, precision, compiled=False).encode(tiles(20), 8)
    found = prepare_encoder(fused, precision, compiled=True).encode(tiles(20), 8)
    # what is added up in another order is rounded to other neighbours, which are far apart in float8
    assert cosine_similarity(found.z_KD, expected.z_KD).min() > (0.999 if precision == "bfloat16" else 0.998)
    torch.testing.assert_close(found.r_K, expected.r_K, rtol=0.02, atol=0)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
)
def test_float8_is_what_its_emulation_is():
    one = encoder("h-optimus-0", depth=3)
    ready = prepare_encoder(one, "float8", compiled=False)
    found = ready.encode(tiles(8), 8)
    emulated = copy_on_cpu(one).encode(tiles(8), 8)
    assert cosine_similarity(found.z_KD.cpu(), emulated.z_KD).min() > 0.998


def copy_on_cpu(ready):
    on_cpu = copy.deepcopy(ready).cpu()
    return inference.InferenceEncoder(on_cpu, "float8", autocast=None, capture=False)


def test_tiles_are_copied_without_waiting():
    there = _copy_to_device(tiles(4), CUDA)
    assert there.device.type == "cuda"
    torch.testing.assert_close(there.cpu(), tiles(4))
    assert _copy_to_device(there, CUDA) is there
