"""Augmentation on a GPU: same tiles as on the CPU except for rounding, no synchronisation, little GPU memory."""

import pytest
import torch
from torch._dynamo.utils import counters

from tapfm.tiles.augment import Augmentation, AugmentedTiles, augment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CUDA = torch.device("cuda")
EXACT = Augmentation(blur=0)
ALL_ENABLED = Augmentation(stain_jitter=0.1)


def random_tiles(count, side=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def assert_equal_except_rounding(found, expected):
    assert found.device.type == "cuda"
    found = found.cpu()
    assert int((found.int() - expected.int()).abs().max()) <= 1
    assert (found != expected).float().mean() < 1e-3


@pytest.mark.filterwarnings("default")  # the compiler emits warnings
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("location", ["host", "pinned", "device"])
def test_tiles_equal_those_of_the_cpu_except_rounding(compiled, location):
    tiles = random_tiles(2050)
    placed = {"host": tiles, "pinned": tiles.pin_memory(), "device": tiles.cuda()}[location]
    exact = AugmentedTiles(placed, EXACT, 0, device=CUDA, compiled=compiled)
    assert torch.equal(exact[:].cpu(), augment(tiles, EXACT, 0))
    bag, expected = (
        AugmentedTiles(placed, ALL_ENABLED, 0, device=CUDA, compiled=compiled),
        augment(tiles, ALL_ENABLED, 0),
    )
    whole = bag[:]
    assert_equal_except_rounding(whole, expected)
    for rows in (slice(3, 1100), torch.tensor([7, 3, 2000, 5])):
        assert torch.equal(bag[rows], whole[rows])


@pytest.mark.filterwarnings("default")
def test_function_is_compiled_once_for_any_number_of_tiles():
    bag = AugmentedTiles(random_tiles(100, side=48), ALL_ENABLED, 0, device=CUDA, compiled=True)
    bag[:70]
    before = counters["stats"]["unique_graphs"]
    for rows in (slice(0, 100), slice(0, 1), slice(5, 20), torch.tensor([2, 3, 50])):
        bag[rows]
    with torch.autocast("cuda", torch.bfloat16):
        bag[20:50]
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("pinned", [True, False])
def test_augmentation_does_not_synchronise(pinned):
    tiles = random_tiles(300)
    tiles = tiles.pin_memory() if pinned else tiles
    AugmentedTiles(tiles, ALL_ENABLED, 0, device=CUDA)[:]  # warm-up: kernels are loaded at first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        bag = AugmentedTiles(tiles, ALL_ENABLED, 0, device=CUDA)
        bag[10:280]
        bag[torch.tensor([5, 9, 200])]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bag_can_be_deleted_during_the_copy():
    expected, found = [], []
    for grey in range(24):
        pixels = torch.empty(64, 3, 256, 256, dtype=torch.uint8, pin_memory=True).fill_(grey)
        torch.cuda._sleep(2_000_000)  # delays the copy until after the next bag is created
        found.append(AugmentedTiles(pixels, EXACT, 0, device=CUDA)[:].float().mean())
        expected.append(grey)
        del pixels
    assert torch.stack(found).tolist() == expected


def test_gpu_holds_only_a_few_tiles_of_a_large_bag():
    tiles = random_tiles(4000, side=128).pin_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bag = AugmentedTiles(tiles, ALL_ENABLED, 0, device=CUDA)
    for start in range(0, 4000, 16):
        bag[start : start + 16]
    assert torch.cuda.max_memory_allocated() - before < tiles.nbytes / 2
