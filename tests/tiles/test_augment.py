"""Augmentation: exact flips and turns, a true Gaussian, stains that keep glass white, the same draws everywhere."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from tapfm.errors import SettingError, TileError
from tapfm.tiles import augment as module
from tapfm.tiles.augment import Augmentation, AugmentedTiles, augment
from tapfm.tiles.augment import _apply_parameters as change
from tapfm.tiles.augment import _sample_parameters as draw

OFF = Augmentation(flip=0, rotate_90=False, blur=0)
PAPER = Augmentation()
EVERYTHING = Augmentation(stain_jitter=0.1)
BLUR_ONLY = Augmentation(flip=0, rotate_90=False, blur=1)
STAINS_ONLY = Augmentation(flip=0, rotate_90=False, blur=0, stain_jitter=0.2)


AT_ONCE = 16


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Bags of a few dozen tiles are changed in several slices."""
    monkeypatch.setattr(module, "_CPU_SLICE_PIXELS", AT_ONCE * 16**2)
    monkeypatch.setattr(module, "_SLICE_PIXELS", AT_ONCE * 16**2)


def random_tiles(count, side=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def difference(a, b):
    return int((a.int() - b.int()).abs().max())


def ways(tile):
    """A tile in its eight orientations, (turns, flipped) -> tile."""
    flipped = torch.from_numpy(tile.numpy()[:, :, ::-1].copy())
    return {(turns, f): each.rot90(turns, (1, 2)) for turns in range(4) for f, each in enumerate((tile, flipped))}


def gaussian(tile, sigma):
    """A Gaussian blur of one (3, h, w) tile in float64, wide and mirrored at the edges."""
    reach = 7
    offsets = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    kernel /= kernel.sum()
    pixels = np.pad(tile.numpy().astype(float), ((0, 0), (reach, reach), (reach, reach)), mode="reflect")
    for axis in (1, 2):
        pixels = np.apply_along_axis(np.convolve, axis, pixels, kernel, mode="valid")
    return pixels


def plainly(tiles, setting, *address):
    """The same, tile by tile: each operation on its own, and only where it was drawn."""
    drawn, result = draw(len(tiles), setting, *address), []
    reach = min(math.ceil(3 * setting.blur_radius[1]), tiles.shape[-1] - 1)
    stains = np.array([module._HAEMATOXYLIN, module._EOSIN, np.cross(module._HAEMATOXYLIN, module._EOSIN)])
    stains /= np.linalg.norm(stains, axis=1, keepdims=True)
    for tile, flip, turns, blur, blur_px, scale, shift in zip(tiles, *drawn, strict=True):
        tile = (tile.flip(-1) if flip else tile).rot90(int(turns), (1, 2))
        if blur:
            weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / blur_px) ** 2)
            weights = torch.from_numpy((weights / weights.sum()).astype(np.float32))
            for axis, margin in ((2, (reach, reach, 0, 0)), (1, (0, 0, reach, reach))):
                padded = F.pad(tile.float(), margin, mode="reflect")
                tile = torch.zeros(tile.shape)
                for start, weight in enumerate(weights):
                    tile.addcmul_(padded.narrow(axis, start, tile.shape[-1]), weight)
            tile = tile.round().to(torch.uint8)
        if setting.stain_jitter:
            mixing = torch.from_numpy((np.linalg.inv(stains) @ (scale[:, None] * stains)).astype(np.float32))
            light = (tile.float() + 1) / 256
            mixed = torch.from_numpy((shift @ stains).astype(np.float32))[:, None, None] * (1 - light.mean(0))
            for colour in range(3):
                mixed.addcmul_(-light[colour].log(), mixing[colour, :, None, None])
            tile = ((-mixed).exp() * 256 - 1).round().clamp(0, 255).to(torch.uint8)
        result.append(tile)
    return torch.stack(result)


@pytest.mark.parametrize(
    "setting",
    [PAPER, EVERYTHING, Augmentation(blur=0), Augmentation(blur=0, stain_jitter=0.3), Augmentation(blur_radius=(1, 3))],
)
@pytest.mark.parametrize("side", [2, 15, 16])
def test_all_at_once_gives_the_bytes_of_one_operation_after_the_other(setting, side):
    tiles = random_tiles(2 * AT_ONCE + 5, side)
    assert torch.equal(augment(tiles, setting, 4), plainly(tiles, setting, 4))


def test_a_bag_gives_the_same_tiles_however_it_is_asked():
    tiles = random_tiles(2 * AT_ONCE + 5)
    whole, bag = augment(tiles, EVERYTHING, 0), AugmentedTiles(tiles, EVERYTHING, 0)
    assert len(bag) == len(tiles)
    some = torch.tensor([30, 2, 2, 17, 5, *range(20)])
    for _ in range(2):
        assert torch.equal(bag[:], whole)
        assert torch.equal(bag[3:20], whole[3:20])
        assert torch.equal(bag[20:64], whole[20:64])
        assert torch.equal(bag[::3], whole[::3])
        assert torch.equal(bag[some], whole[some])
    assert len(bag[4:4]) == len(bag[torch.zeros(0, dtype=torch.int64)]) == 0


def test_a_bag_works_on_a_few_tiles_at_a_time(monkeypatch):
    seen = []

    def watched(tiles, *rest):
        seen.append(len(tiles))
        return change(tiles, *rest)

    monkeypatch.setattr(module, "_apply_parameters", watched)
    AugmentedTiles(random_tiles(100), PAPER, 0)[10:50]
    assert seen == [AT_ONCE, AT_ONCE, 40 - 2 * AT_ONCE]


def test_any_number_of_tiles_is_compiled_once(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(module, "_compile_apply", lambda: compiled)
    compiled = torch.compile(change, backend=counter, fullgraph=True)
    tiles = random_tiles(AT_ONCE + 7)
    bag, expected = AugmentedTiles(tiles, EVERYTHING, 0, compiled=True), augment(tiles, EVERYTHING, 0)
    assert torch.equal(bag[:], expected)
    for rows in (slice(0, 5), slice(3, 4), torch.tensor([1, 9, 20]), slice(0, 0)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(bag[rows], expected[rows])
    assert counter.frame_count == 1


@pytest.mark.parametrize("augmentation", [OFF, PAPER, EVERYTHING], ids=["off", "paper", "everything"])
def test_the_same_address_gives_the_same_tiles_and_the_input_stays_as_it_was(augmentation):
    tiles = random_tiles(2 * AT_ONCE + 5)
    before = tiles.clone()
    first = augment(tiles, augmentation, 0, 3, "case-1")
    assert torch.equal(tiles, before)
    assert first.dtype == torch.uint8
    assert first.shape == tiles.shape
    assert first.data_ptr() != tiles.data_ptr()
    assert torch.equal(first, augment(tiles, augmentation, 0, 3, "case-1"))
    assert torch.equal(first, tiles) == (augmentation is OFF)


def test_another_epoch_or_slide_gives_other_tiles():
    tiles = random_tiles(20)
    first = augment(tiles, PAPER, 0, 3, "case-1")
    assert not torch.equal(first, augment(tiles, PAPER, 0, 4, "case-1"))
    assert not torch.equal(first, augment(tiles, PAPER, 0, 3, "case-2"))


def test_a_tile_does_not_depend_on_the_tiles_after_it():
    tiles = random_tiles(AT_ONCE + 30)
    some = augment(tiles[:21], EVERYTHING, 0)
    assert torch.equal(some, augment(tiles, EVERYTHING, 0)[:21])


def test_a_layout_in_memory_or_a_callers_autocast_changes_nothing():
    tiles = random_tiles(20)
    expected = augment(tiles, EVERYTHING, 0)
    assert torch.equal(augment(tiles.contiguous(memory_format=torch.channels_last), EVERYTHING, 0), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(tiles, EVERYTHING, 0), expected)


def test_switching_blur_off_leaves_flips_and_turns_as_they_were():
    with_blur, without = draw(50, PAPER, 0), draw(50, Augmentation(blur=0), 0)
    np.testing.assert_array_equal(with_blur.flip, without.flip)
    np.testing.assert_array_equal(with_blur.turns, without.turns)
    assert with_blur.blur.any()
    assert not without.blur.any()


def test_without_blur_each_tile_is_one_of_its_eight_orientations_each_as_often():
    tiles = random_tiles(800, side=4)
    turned = augment(tiles, Augmentation(blur=0), 0)
    found = []
    for before, after in zip(tiles, turned, strict=True):
        found += [way for way, tile in ways(before).items() if torch.equal(tile, after)]
    assert len(found) == 800
    counts = [found.count(way) for way in ways(tiles[0])]
    assert all(70 < count < 130 for count in counts), counts  # 100 each


def test_a_certain_flip_is_the_only_thing_that_happens_where_nothing_else_is_on():
    tiles = random_tiles(30)
    assert torch.equal(augment(tiles, Augmentation(flip=1, rotate_90=False, blur=0), 0), tiles.flip(3))


def test_half_of_the_tiles_are_blurred_and_the_others_untouched():
    tiles = random_tiles(600, side=8)
    setting = Augmentation(flip=0, rotate_90=False, blur_radius=(0.7, 0.8))  # strong enough to show
    changed = (augment(tiles, setting, 0) != tiles).flatten(1).any(1)
    assert 250 < int(changed.sum()) < 350
    np.testing.assert_array_equal(changed.numpy(), draw(600, setting, 0).blur)


def test_radii_fill_their_range():
    radii = draw(2000, BLUR_ONLY, 0).blur_px
    assert radii.min() >= 0.1
    assert radii.max() <= 0.8
    quarters, _ = np.histogram(radii, 4, (0.1, 0.8))
    assert (np.abs(quarters - 500) < 80).all()


@pytest.mark.parametrize("blur_radius", [(0.1, 0.8), (0.01, 0.02), (1.5, 2.0)])
def test_each_tile_is_blurred_by_its_own_gaussian(blur_radius):
    setting = Augmentation(flip=0, rotate_90=False, blur=1, blur_radius=blur_radius)
    tiles = random_tiles(12, side=20)
    result = augment(tiles, setting, 5)
    for before, after, sigma in zip(tiles, result, draw(12, setting, 5).blur_px, strict=True):
        # rounding, and what little lies beyond the reach of the kernel
        assert np.abs(after.numpy() - gaussian(before, sigma)).max() < 1


def test_the_papers_blur_is_exact_to_the_rounding_in_every_slice_of_a_bag():
    setting = Augmentation(flip=0, rotate_90=False)
    tiles = random_tiles(9 * AT_ONCE, side=8)  # four times as many at once as of side 16
    result, drawn = augment(tiles, setting, 5), draw(len(tiles), setting, 5)
    assert 10 < drawn.blur.sum() < len(tiles) - 10
    for row in np.flatnonzero(drawn.blur):
        assert np.abs(result[row].numpy() - gaussian(tiles[row], drawn.blur_px[row])).max() < 0.501


@pytest.mark.parametrize("grey", [0, 1, 127, 255])
def test_a_tile_of_one_colour_stays_so_when_blurred(grey):
    tiles = torch.full((10, 3, 12, 12), grey, dtype=torch.uint8)
    assert torch.equal(augment(tiles, BLUR_ONLY, 0), tiles)


def test_a_tile_smaller_than_the_kernel_can_be_blurred():
    tiles = torch.full((2, 3, 2, 2), 9, dtype=torch.uint8)
    assert torch.equal(augment(tiles, BLUR_ONLY, 0), tiles)


def test_glass_stays_white_when_stains_change():
    white = torch.full((50, 3, 4, 4), 255, dtype=torch.uint8)
    assert torch.equal(augment(white, STAINS_ONLY, 0), white)
    scanned = torch.full((50, 3, 4, 4), 243, dtype=torch.uint8)  # the white of a scanner
    assert difference(augment(scanned, STAINS_ONLY, 0), scanned) <= 6


def test_ink_stays_black_when_stains_change():
    black = torch.zeros(50, 3, 4, 4, dtype=torch.uint8)
    assert difference(augment(black, STAINS_ONLY, 0), black) <= 8


def test_stains_change_within_what_was_asked_for_and_differ_from_tile_to_tile():
    pink_and_blue = torch.tensor([[214, 120, 170], [110, 80, 150]], dtype=torch.uint8)
    tiles = pink_and_blue.T[None, :, None].repeat(200, 1, 2, 1)
    weak = augment(tiles, Augmentation(flip=0, rotate_90=False, blur=0, stain_jitter=0.01), 0)
    strong = augment(tiles, STAINS_ONLY, 0)
    assert 0 < difference(weak, tiles) <= 5 < difference(strong, tiles)
    assert len(strong[:, :, 0, 0].unique(dim=0)) > 150
    mean_change = strong.float().mean(0) - tiles[0].float()
    assert mean_change.abs().max() < 3  # neither darker nor lighter on the whole


def test_a_pure_stain_keeps_its_hue_when_only_its_amount_changes():
    density = np.array([0.650, 0.704, 0.286])
    tile = torch.from_numpy(np.rint(256 * np.exp(-density) - 1).astype(np.uint8))[None, :, None, None]
    result = augment(tile.repeat(100, 1, 1, 1), STAINS_ONLY, 0)
    drawn = draw(100, STAINS_ONLY, 0)
    # haematoxylin alone: eosin and residual have nothing to scale, but all three are shifted by the light lost
    lost = 1 - np.exp(-density).mean()
    eosin = np.array([0.072, 0.990, 0.105])
    stains = [each / np.linalg.norm(each) for each in (density, eosin, np.cross(density, eosin))]
    for after, scale, shift in zip(result[:, :, 0, 0].numpy(), drawn.stain_scale, drawn.stain_shift, strict=True):
        expected = density * scale[0] + lost * sum(s * v for s, v in zip(shift, stains, strict=True))
        assert np.abs(after - np.clip(256 * np.exp(-expected) - 1, 0, 255)).max() < 1.5


def test_no_tiles_are_no_tiles():
    assert augment(random_tiles(0), EVERYTHING, 0).shape == (0, 3, 16, 16)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"flip": 1.5}, "flip is 1.5"),
        ({"blur": -0.1}, "blur is -0.1"),
        ({"blur": float("nan")}, "blur is nan"),
        ({"blur_radius": (0.8, 0.1)}, "blur_radius is 0.8 to 0.1"),
        ({"blur_radius": (0.0, 0.1)}, "0.01 to 16 px"),
        ({"stain_jitter": 1.0}, "stain_jitter is 1.0"),
    ],
)
def test_settings_outside_their_range_are_refused(setting, message):
    with pytest.raises(SettingError, match=message):
        Augmentation(**setting)


@pytest.mark.parametrize(
    "tiles",
    [torch.zeros(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(2, 3, 8, 6, dtype=torch.uint8)],
)
def test_other_tensors_are_refused(tiles):
    with pytest.raises(TileError, match="shape"):
        augment(tiles, PAPER, 0)
