"""Bags on their way to the device: pixels stay on the host, in memory that a GPU can copy from."""

import numpy as np
import pytest
import torch
from training_slides import make_bags, make_learner, write_slides

from tapfm.adaptation import bags as module
from tapfm.adaptation.bags import Visit, pinned_memory, tensor_of
from tapfm.tiles.augment import Augmentation, AugmentedTiles, augment

CUDA = torch.cuda.is_available()
EVERYTHING = Augmentation(stain_jitter=0.1)


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    return write_slides(tmp_path_factory.mktemp("slides"), 2)


def visited(slides, visit, device="cpu", workers=0, augmentation=None):
    bags = make_bags(slides, device=device, workers=workers, augmentation=augmentation)
    bags.begin(iter([visit]))
    bag = bags.training_bag(visit)
    bags.close()
    return bag


def test_a_training_bag_gives_the_tiles_of_its_address_when_asked(slides):
    visit = Visit("train", "s01", 8, (7, 0, "s01"))
    plain = visited(slides, visit, augmentation=Augmentation(flip=0, quarter_turns=False, blur=0))
    bag = visited(slides, visit, augmentation=EVERYTHING)
    assert isinstance(bag.content, AugmentedTiles)
    assert len(bag.content) == bag.tiles == 8
    assert torch.equal(bag.content[2:6], augment(plain.content[:], EVERYTHING, 7, 0, "s01")[2:6])


def test_an_array_over_a_tensors_memory_is_that_tensor_again():
    tensor = torch.arange(5 * 12, dtype=torch.uint8).view(5, 3, 2, 2)
    for array in (tensor.numpy(), tensor.numpy()[:3], tensor.numpy()[:4][:2]):
        found = tensor_of(array)
        assert found.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert found.untyped_storage().nbytes() == tensor.nbytes, "the whole block, which torch keeps watch over"
        assert np.array_equal(found, array)
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    assert np.array_equal(tensor_of(array[:1]), array[:1])


def test_where_no_memory_can_be_pinned_any_other_will_do(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(module.torch, "empty", refuse)
    assert pinned_memory((2, 3, 4, 4)).shape == (2, 3, 4, 4)


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpus_tiles_are_read_into_pinned_memory(slides, workers):
    visit = Visit("train", "s01", 8, (7, 0, "s01"))
    on_gpu = visited(slides, visit, "cuda", workers)
    assert on_gpu.content._pixels.is_pinned()
    tiles, expected = on_gpu.content[:], visited(slides, visit).content[:]
    assert tiles.device.type == "cuda"
    assert int((tiles.cpu().int() - expected.int()).abs().max()) <= 1


@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
def test_a_gpu_encodes_what_the_cpu_encodes(slides):
    visit = Visit("look", "s01", None, ())
    found = []
    for device in ("cpu", "cuda"):
        bags, model = make_bags(slides, device=device, workers=1), make_learner(device=device).model
        bags.begin(iter([visit]))
        found.append(bags.encoded_bag(visit, model).content.z_KD.cpu())
        bags.close()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
