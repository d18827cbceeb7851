"""Bags of pixels are in host memory, which is pinned for a GPU."""

import numpy as np
import pytest
import torch
from training_slides import make_bags, make_learner, write_slides

from tapfm.inference import bags as module
from tapfm.inference.bags import BagRequest, _allocate_pinned, _as_tensor
from tapfm.inference.predictor import Predictor

CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    return write_slides(tmp_path_factory.mktemp("slides"), 2)


def read_bag(slides, request, device="cpu", workers=0):
    bags = make_bags(slides, device=device, workers=workers)
    bags.start(iter([request]))
    bag = bags.read(request)
    bags.close()
    return bag


def test_whole_bags_and_parts_have_the_same_pixels(slides, monkeypatch):
    monkeypatch.setattr(module, "_PART_TILES", 3)
    rng_key = (7, 0, "s01")
    whole = read_bag(slides, BagRequest("train", "s01", 8, rng_key))
    assert whole.content.shape == (8, 3, 42, 42)
    bags, request = make_bags(slides), BagRequest("inference", "s01", 8, rng_key)
    bags.start(iter([request]))
    parts = list(bags.read_parts(request))
    assert [part.tiles for part in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part.content for part in parts]), whole.content)
    assert np.array_equal(np.concatenate([part.rows for part in parts]), whole.rows)


def test_array_of_a_tensor_is_converted_back_to_that_tensor():
    tensor = torch.arange(5 * 12, dtype=torch.uint8).view(5, 3, 2, 2)
    for array in (tensor.numpy(), tensor.numpy()[:3], tensor.numpy()[:4][:2]):
        found = _as_tensor(array)
        assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert found.untyped_storage().nbytes() == tensor.nbytes, (
            "the storage must be the whole block that torch tracks"
        )
        assert np.array_equal(found, array)
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    assert np.array_equal(_as_tensor(array[:1]), array[:1])


def test_pageable_memory_is_used_if_pinning_fails(monkeypatch):
    def raise_error(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(module.torch, "empty", raise_error)
    assert _allocate_pinned((2, 3, 4, 4)).shape == (2, 3, 4, 4)


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_tiles_for_a_gpu_are_read_into_pinned_memory(slides, workers):
    request = BagRequest("train", "s01", 8, (7, 0, "s01"))
    on_gpu = read_bag(slides, request, "cuda", workers)
    assert on_gpu.content.is_pinned()
    assert torch.equal(on_gpu.content, read_bag(slides, request).content)


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
def test_gpu_and_cpu_give_the_same_features(slides):
    request = BagRequest("inference", "s01")
    found = []
    for device in ("cpu", "cuda"):
        bags, model = make_bags(slides, device=device, workers=1), make_learner(device=device).model
        bags.start(iter([request]))
        found.append(Predictor.for_training(model).encode_slide(bags, request).by_model[0].z_KD.cpu())
        bags.close()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
