"""Augmentation on a GPU: the CPU's tiles but for the odd rounding, from the host, without waiting for the device."""

import pytest
import torch
from torch._dynamo.utils import counters

from tapfm.tiles.augment import Augmentation, AugmentedTiles, augment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CUDA = torch.device("cuda")
EXACT = Augmentation(blur=0)
EVERYTHING = Augmentation(stain_jitter=0.1)


def random_tiles(count, side=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def refuse_other_than_roundings(found, expected):
    assert found.device.type == "cuda"
    found = found.cpu()
    assert int((found.int() - expected.int()).abs().max()) <= 1
    assert (found != expected).float().mean() < 1e-3


@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("place", ["host", "pinned", "device"])
def test_tiles_come_out_as_on_the_cpu_but_for_the_odd_rounding(compiled, place):
    tiles = random_tiles(2050)
    there = {"host": tiles, "pinned": tiles.pin_memory(), "device": tiles.cuda()}[place]
    exact = AugmentedTiles(there, EXACT, 0, device=CUDA, compiled=compiled)
    assert torch.equal(exact[:].cpu(), augment(tiles, EXACT, 0))
    bag, expected = AugmentedTiles(there, EVERYTHING, 0, device=CUDA, compiled=compiled), augment(tiles, EVERYTHING, 0)
    whole = bag[:]
    refuse_other_than_roundings(whole, expected)
    for rows in (slice(3, 1100), torch.tensor([7, 3, 2000, 5])):
        assert torch.equal(bag[rows], whole[rows])


@pytest.mark.filterwarnings("default")
def test_compiled_code_is_made_once_for_any_number_of_tiles():
    bag = AugmentedTiles(random_tiles(100, side=48), EVERYTHING, 0, device=CUDA, compiled=True)
    bag[:70]
    before = counters["stats"]["unique_graphs"]
    for rows in (slice(0, 100), slice(0, 1), slice(5, 20), torch.tensor([2, 3, 50])):
        bag[rows]
    with torch.autocast("cuda", torch.bfloat16):
        bag[20:50]
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.parametrize("pinned", [True, False])
def test_nothing_waits_for_the_device(pinned):
    tiles = random_tiles(300)
    tiles = tiles.pin_memory() if pinned else tiles
    AugmentedTiles(tiles, EVERYTHING, 0, device=CUDA)[:]  # once, for what is loaded at first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        bag = AugmentedTiles(tiles, EVERYTHING, 0, device=CUDA)
        bag[10:280]
        bag[torch.tensor([5, 9, 200])]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_bag_may_be_forgotten_while_its_pixels_are_on_their_way():
    expected, found = [], []
    for grey in range(24):
        pixels = torch.empty(64, 3, 256, 256, dtype=torch.uint8, pin_memory=True).fill_(grey)
        torch.cuda._sleep(2_000_000)  # the copy comes later than the next bag
        found.append(AugmentedTiles(pixels, EXACT, 0, device=CUDA)[:].float().mean())
        expected.append(grey)
        del pixels
    assert torch.stack(found).tolist() == expected


def test_the_device_holds_a_few_tiles_of_a_large_bag():
    tiles = random_tiles(4000, side=128).pin_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bag = AugmentedTiles(tiles, EVERYTHING, 0, device=CUDA)
    for start in range(0, 4000, 16):
        bag[start : start + 16]
    assert torch.cuda.max_memory_allocated() - before < tiles.nbytes / 2
