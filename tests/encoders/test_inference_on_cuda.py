"""Inference on a GPU: cast weights, CUDA graphs, compiled blocks and float8 give the same features."""

import copy

import pytest
import torch
from support import randomise
from torch.nn.functional import cosine_similarity

from tapfm.encoders import inference
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.inference import _CapturedGraph, _copy_to_device, prepare_encoder, wrap_encoder
from tapfm.encoders.precision import can_compile_on_gpu
from tapfm.encoders.vit import VitEncoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


def build_encoder(key="uni", depth=4):
    card = find_encoder_card(key)
    torch.manual_seed(0)
    vit = build_vit(card, extra={"depth": depth})
    for block in vit.blocks:
        randomise(block.ls1)
        randomise(block.ls2)
    return VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).cuda()


def random_tiles(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 224, 224), generator=generator, dtype=torch.uint8)


def disable_capture(monkeypatch):
    monkeypatch.setattr(inference, "_CAPTURE_UP_TO_FLOP", 0)


def enable_capture(monkeypatch):
    monkeypatch.setattr(inference, "_CAPTURE_UP_TO_FLOP", 1e30)


def test_bfloat16_weights_give_similar_features_to_float32(monkeypatch):
    disable_capture(monkeypatch)
    encoder = build_encoder()
    exact = wrap_encoder(encoder).encode(random_tiles(20), 8)
    found = prepare_encoder(encoder, "bfloat16").encode(random_tiles(20), 8)
    assert {parameter.dtype for parameter in encoder.vit.parameters()} == {torch.bfloat16}
    assert found.z_KD.dtype == torch.float32
    assert cosine_similarity(found.z_KD, exact.z_KD).min() > 0.999


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_captured_graph_gives_the_same_features_for_smaller_batches(monkeypatch, precision):
    encoder = build_encoder()
    disable_capture(monkeypatch)
    expected = prepare_encoder(copy.deepcopy(encoder), precision).encode(random_tiles(21), 8)
    enable_capture(monkeypatch)
    prepared = prepare_encoder(encoder, precision)
    found = prepared.encode(random_tiles(21), 8)  # 8, 8 and 5
    assert isinstance(prepared._captured, _CapturedGraph)
    torch.testing.assert_close(found.z_KD, expected.z_KD, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.r_K, expected.r_K, rtol=1e-3, atol=1e-7)


def test_captured_graph_follows_new_weights_and_batch_sizes(monkeypatch):
    enable_capture(monkeypatch)
    encoder = build_encoder()
    prepared = prepare_encoder(encoder)
    first = prepared.encode(random_tiles(8), 8)
    captured = prepared._captured
    with torch.no_grad():
        encoder.vit.norm.bias += 1  # in place: the captured graph reads it
    assert float((prepared.encode(random_tiles(8), 8).z_KD - first.z_KD).mean()) == pytest.approx(1, abs=1e-3)
    assert prepared._captured is captured
    encoder.vit.norm.bias.data = encoder.vit.norm.bias.data.clone() + 1  # new memory: captured again
    assert float((prepared.encode(random_tiles(8), 8).z_KD - first.z_KD).mean()) == pytest.approx(2, abs=1e-3)
    assert prepared._captured is not captured
    plain = wrap_encoder(encoder).encode(random_tiles(8), 4)  # same batch size, so the same kernels
    torch.testing.assert_close(prepared.encode(random_tiles(8), 4).z_KD, plain.z_KD, rtol=1e-3, atol=1e-3)


def test_encoder_that_cannot_be_captured_runs_without_a_graph(monkeypatch):
    enable_capture(monkeypatch)
    encoder = build_encoder()
    expected = wrap_encoder(encoder).encode(random_tiles(8), 8)
    hook = encoder.vit.norm.register_forward_hook(lambda *_: torch.cuda.synchronize())  # fails during capture
    prepared = prepare_encoder(encoder)
    found = prepared.encode(random_tiles(8), 8)
    assert prepared._captured is None
    torch.testing.assert_close(found.z_KD, expected.z_KD, rtol=1e-3, atol=1e-3)
    hook.remove()
    torch.rand(3, device="cuda")  # the generator is not in capture mode


@pytest.mark.skipif(not can_compile_on_gpu(CUDA), reason="needs triton")
@pytest.mark.parametrize("precision", ["bfloat16", "float8"])
def test_compiled_blocks_give_the_same_features(monkeypatch, precision):
    if precision == "float8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs float8")
    disable_capture(monkeypatch)
    plain, compiled = build_encoder("h-optimus-0"), build_encoder("h-optimus-0")
    expected = prepare_encoder(plain, precision, compiled=False).encode(random_tiles(20), 8)
    found = prepare_encoder(compiled, precision, compiled=True).encode(random_tiles(20), 8)
    # sums in another order are rounded differently, which matters in float8
    assert cosine_similarity(found.z_KD, expected.z_KD).min() > (0.999 if precision == "bfloat16" else 0.998)
    torch.testing.assert_close(found.r_K, expected.r_K, rtol=0.02, atol=0)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with float8"
)
def test_float8_matches_its_emulation_on_the_cpu():
    encoder = build_encoder("h-optimus-0", depth=3)
    prepared = prepare_encoder(encoder, "float8", compiled=False)
    found = prepared.encode(random_tiles(8), 8)
    emulated = copy_to_cpu(encoder).encode(random_tiles(8), 8)
    assert cosine_similarity(found.z_KD.cpu(), emulated.z_KD).min() > 0.998


def copy_to_cpu(prepared):
    on_cpu = copy.deepcopy(prepared).cpu()
    return inference.InferenceEncoder(on_cpu, "float8", autocast=None, capture=False)


def test_tiles_are_copied_to_the_device():
    copied = _copy_to_device(random_tiles(4), CUDA)
    assert copied.device.type == "cuda"
    torch.testing.assert_close(copied.cpu(), random_tiles(4))
    assert _copy_to_device(copied, CUDA) is copied
