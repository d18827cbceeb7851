"""Augmentation: exact flips and rotations, Gaussian blur, stain jitter that keeps glass white, reproducibility."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from tapfm.errors import SettingError, TileError
from tapfm.tiles import augment as module
from tapfm.tiles.augment import Augmentation, AugmentedTiles, augment
from tapfm.tiles.augment import _apply_parameters as apply_parameters
from tapfm.tiles.augment import _sample_parameters as sample_parameters

OFF = Augmentation(flip=0, rotate_90=False, blur=0)
PAPER = Augmentation()
ALL_ENABLED = Augmentation(stain_jitter=0.1)
BLUR_ONLY = Augmentation(flip=0, rotate_90=False, blur=1)
STAINS_ONLY = Augmentation(flip=0, rotate_90=False, blur=0, stain_jitter=0.2)

TILES_PER_SLICE = 16


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Small slices, so that bags of a few dozen tiles are augmented in several slices."""
    monkeypatch.setattr(module, "_CPU_SLICE_PIXELS", TILES_PER_SLICE * 16**2)
    monkeypatch.setattr(module, "_SLICE_PIXELS", TILES_PER_SLICE * 16**2)


def random_tiles(count, side=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def max_difference(a, b):
    return int((a.int() - b.int()).abs().max())


def orientations(tile):
    """Return the eight orientations of a tile by (turns, flipped)."""
    flipped = torch.from_numpy(tile.numpy()[:, :, ::-1].copy())
    return {(turns, f): each.rot90(turns, (1, 2)) for turns in range(4) for f, each in enumerate((tile, flipped))}


def gaussian_blur(tile, sigma):
    """Blur a (3, h, w) tile in float64, with a wide kernel and reflection at the edges."""
    half_width = 7
    offsets = np.arange(-half_width, half_width + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    kernel /= kernel.sum()
    pixels = np.pad(
        tile.numpy().astype(float), ((0, 0), (half_width, half_width), (half_width, half_width)), mode="reflect"
    )
    for axis in (1, 2):
        pixels = np.apply_along_axis(np.convolve, axis, pixels, kernel, mode="valid")
    return pixels


def augment_one_by_one(tiles, setting, *rng_key):
    """Reference implementation: augment tile by tile, each operation only if it was sampled."""
    parameters, result = sample_parameters(len(tiles), setting, *rng_key), []
    half_width = min(math.ceil(3 * setting.blur_radius[1]), tiles.shape[-1] - 1)
    stains = np.array([module._HAEMATOXYLIN, module._EOSIN, np.cross(module._HAEMATOXYLIN, module._EOSIN)])
    stains /= np.linalg.norm(stains, axis=1, keepdims=True)
    for tile, flip, turns, blur, blur_px, scale, shift in zip(tiles, *parameters, strict=True):
        tile = (tile.flip(-1) if flip else tile).rot90(int(turns), (1, 2))
        if blur:
            weights = np.exp(-0.5 * (np.arange(-half_width, half_width + 1) / blur_px) ** 2)
            weights = torch.from_numpy((weights / weights.sum()).astype(np.float32))
            for axis, margin in ((2, (half_width, half_width, 0, 0)), (1, (0, 0, half_width, half_width))):
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
    [
        PAPER,
        ALL_ENABLED,
        Augmentation(blur=0),
        Augmentation(blur=0, stain_jitter=0.3),
        Augmentation(blur_radius=(1, 3)),
    ],
)
@pytest.mark.parametrize("side", [2, 15, 16])
def test_augment_equals_reference_implementation(setting, side):
    tiles = random_tiles(2 * TILES_PER_SLICE + 5, side)
    assert torch.equal(augment(tiles, setting, 4), augment_one_by_one(tiles, setting, 4))


def test_same_tiles_for_any_index():
    tiles = random_tiles(2 * TILES_PER_SLICE + 5)
    whole, bag = augment(tiles, ALL_ENABLED, 0), AugmentedTiles(tiles, ALL_ENABLED, 0)
    assert len(bag) == len(tiles)
    rows = torch.tensor([30, 2, 2, 17, 5, *range(20)])
    for _ in range(2):
        assert torch.equal(bag[:], whole)
        assert torch.equal(bag[3:20], whole[3:20])
        assert torch.equal(bag[20:64], whole[20:64])
        assert torch.equal(bag[::3], whole[::3])
        assert torch.equal(bag[rows], whole[rows])
    assert len(bag[4:4]) == len(bag[torch.zeros(0, dtype=torch.int64)]) == 0


def test_tiles_are_augmented_in_slices(monkeypatch):
    sizes = []

    def record_size(tiles, *rest):
        sizes.append(len(tiles))
        return apply_parameters(tiles, *rest)

    monkeypatch.setattr(module, "_apply_parameters", record_size)
    AugmentedTiles(random_tiles(100), PAPER, 0)[10:50]
    assert sizes == [TILES_PER_SLICE, TILES_PER_SLICE, 40 - 2 * TILES_PER_SLICE]


def test_function_is_compiled_once_for_any_number_of_tiles(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(module, "_compile_apply", lambda: compiled)
    compiled = torch.compile(apply_parameters, backend=counter, fullgraph=True)
    tiles = random_tiles(TILES_PER_SLICE + 7)
    bag, expected = AugmentedTiles(tiles, ALL_ENABLED, 0, compiled=True), augment(tiles, ALL_ENABLED, 0)
    assert torch.equal(bag[:], expected)
    for rows in (slice(0, 5), slice(3, 4), torch.tensor([1, 9, 20]), slice(0, 0)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(bag[rows], expected[rows])
    assert counter.frame_count == 1


@pytest.mark.parametrize("augmentation", [OFF, PAPER, ALL_ENABLED], ids=["off", "paper", "everything"])
def test_same_address_gives_same_tiles_and_input_is_unchanged(augmentation):
    tiles = random_tiles(2 * TILES_PER_SLICE + 5)
    before = tiles.clone()
    first = augment(tiles, augmentation, 0, 3, "case-1")
    assert torch.equal(tiles, before)
    assert first.dtype == torch.uint8
    assert first.shape == tiles.shape
    assert first.data_ptr() != tiles.data_ptr()
    assert torch.equal(first, augment(tiles, augmentation, 0, 3, "case-1"))
    assert torch.equal(first, tiles) == (augmentation is OFF)


def test_epoch_and_slide_change_the_augmentation():
    tiles = random_tiles(20)
    first = augment(tiles, PAPER, 0, 3, "case-1")
    assert not torch.equal(first, augment(tiles, PAPER, 0, 4, "case-1"))
    assert not torch.equal(first, augment(tiles, PAPER, 0, 3, "case-2"))


def test_tile_does_not_depend_on_later_tiles():
    tiles = random_tiles(TILES_PER_SLICE + 30)
    first = augment(tiles[:21], ALL_ENABLED, 0)
    assert torch.equal(first, augment(tiles, ALL_ENABLED, 0)[:21])


def test_memory_format_and_autocast_do_not_change_the_result():
    tiles = random_tiles(20)
    expected = augment(tiles, ALL_ENABLED, 0)
    assert torch.equal(augment(tiles.contiguous(memory_format=torch.channels_last), ALL_ENABLED, 0), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(tiles, ALL_ENABLED, 0), expected)


def test_disabling_blur_does_not_change_flips_and_rotations():
    with_blur, without = sample_parameters(50, PAPER, 0), sample_parameters(50, Augmentation(blur=0), 0)
    np.testing.assert_array_equal(with_blur.flip, without.flip)
    np.testing.assert_array_equal(with_blur.turns, without.turns)
    assert with_blur.blur.any()
    assert not without.blur.any()


def test_eight_orientations_are_equally_frequent():
    tiles = random_tiles(800, side=4)
    augmented = augment(tiles, Augmentation(blur=0), 0)
    found = []
    for before, after in zip(tiles, augmented, strict=True):
        found += [orientation for orientation, tile in orientations(before).items() if torch.equal(tile, after)]
    assert len(found) == 800
    counts = [found.count(orientation) for orientation in orientations(tiles[0])]
    assert all(70 < count < 130 for count in counts), counts  # 100 each


def test_flip_probability_1_flips_all_tiles():
    tiles = random_tiles(30)
    assert torch.equal(augment(tiles, Augmentation(flip=1, rotate_90=False, blur=0), 0), tiles.flip(3))


def test_half_of_the_tiles_are_blurred():
    tiles = random_tiles(600, side=8)
    setting = Augmentation(flip=0, rotate_90=False, blur_radius=(0.7, 0.8))  # strong enough to change every tile
    changed = (augment(tiles, setting, 0) != tiles).flatten(1).any(1)
    assert 250 < int(changed.sum()) < 350
    np.testing.assert_array_equal(changed.numpy(), sample_parameters(600, setting, 0).blur)


def test_blur_radii_are_uniform_in_their_range():
    radii = sample_parameters(2000, BLUR_ONLY, 0).blur_px
    assert radii.min() >= 0.1
    assert radii.max() <= 0.8
    quarters, _ = np.histogram(radii, 4, (0.1, 0.8))
    assert (np.abs(quarters - 500) < 80).all()


@pytest.mark.parametrize("blur_radius", [(0.1, 0.8), (0.01, 0.02), (1.5, 2.0)])
def test_each_tile_is_blurred_with_its_radius(blur_radius):
    setting = Augmentation(flip=0, rotate_90=False, blur=1, blur_radius=blur_radius)
    tiles = random_tiles(12, side=20)
    result = augment(tiles, setting, 5)
    for before, after, sigma in zip(tiles, result, sample_parameters(12, setting, 5).blur_px, strict=True):
        # rounding, and the truncation of the kernel
        assert np.abs(after.numpy() - gaussian_blur(before, sigma)).max() < 1


def test_blur_of_the_paper_is_exact_up_to_rounding():
    setting = Augmentation(flip=0, rotate_90=False)
    tiles = random_tiles(9 * TILES_PER_SLICE, side=8)  # a slice has four times as many tiles as with side 16
    result, parameters = augment(tiles, setting, 5), sample_parameters(len(tiles), setting, 5)
    assert 10 < parameters.blur.sum() < len(tiles) - 10
    for row in np.flatnonzero(parameters.blur):
        assert np.abs(result[row].numpy() - gaussian_blur(tiles[row], parameters.blur_px[row])).max() < 0.501


@pytest.mark.parametrize("grey", [0, 1, 127, 255])
def test_blur_does_not_change_a_uniform_tile(grey):
    tiles = torch.full((10, 3, 12, 12), grey, dtype=torch.uint8)
    assert torch.equal(augment(tiles, BLUR_ONLY, 0), tiles)


def test_tile_smaller_than_the_kernel_is_blurred():
    tiles = torch.full((2, 3, 2, 2), 9, dtype=torch.uint8)
    assert torch.equal(augment(tiles, BLUR_ONLY, 0), tiles)


def test_stain_jitter_keeps_glass_white():
    white = torch.full((50, 3, 4, 4), 255, dtype=torch.uint8)
    assert torch.equal(augment(white, STAINS_ONLY, 0), white)
    scanned = torch.full((50, 3, 4, 4), 243, dtype=torch.uint8)  # the white of a scanner
    assert max_difference(augment(scanned, STAINS_ONLY, 0), scanned) <= 6


def test_stain_jitter_keeps_black_ink():
    black = torch.zeros(50, 3, 4, 4, dtype=torch.uint8)
    assert max_difference(augment(black, STAINS_ONLY, 0), black) <= 8


def test_stain_jitter_is_limited_and_differs_between_tiles():
    pink_and_blue = torch.tensor([[214, 120, 170], [110, 80, 150]], dtype=torch.uint8)
    tiles = pink_and_blue.T[None, :, None].repeat(200, 1, 2, 1)
    weak = augment(tiles, Augmentation(flip=0, rotate_90=False, blur=0, stain_jitter=0.01), 0)
    strong = augment(tiles, STAINS_ONLY, 0)
    assert 0 < max_difference(weak, tiles) <= 5 < max_difference(strong, tiles)
    assert len(strong[:, :, 0, 0].unique(dim=0)) > 150
    mean_change = strong.float().mean(0) - tiles[0].float()
    assert mean_change.abs().max() < 3  # no systematic change of brightness


def test_stain_jitter_of_pure_haematoxylin():
    density = np.array([0.650, 0.704, 0.286])
    tile = torch.from_numpy(np.rint(256 * np.exp(-density) - 1).astype(np.uint8))[None, :, None, None]
    result = augment(tile.repeat(100, 1, 1, 1), STAINS_ONLY, 0)
    parameters = sample_parameters(100, STAINS_ONLY, 0)
    # there is no eosin or residual to scale, but all three are shifted in proportion to the absorbed light
    absorbed = 1 - np.exp(-density).mean()
    eosin = np.array([0.072, 0.990, 0.105])
    stains = [each / np.linalg.norm(each) for each in (density, eosin, np.cross(density, eosin))]
    for after, scale, shift in zip(
        result[:, :, 0, 0].numpy(), parameters.stain_scale, parameters.stain_shift, strict=True
    ):
        expected = density * scale[0] + absorbed * sum(s * v for s, v in zip(shift, stains, strict=True))
        assert np.abs(after - np.clip(256 * np.exp(-expected) - 1, 0, 255)).max() < 1.5


def test_empty_bag():
    assert augment(random_tiles(0), ALL_ENABLED, 0).shape == (0, 3, 16, 16)


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
def test_settings_outside_their_range_are_rejected(setting, message):
    with pytest.raises(SettingError, match=message):
        Augmentation(**setting)


@pytest.mark.parametrize(
    "tiles",
    [torch.zeros(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(2, 3, 8, 6, dtype=torch.uint8)],
)
def test_wrong_dtype_or_shape_is_rejected(tiles):
    with pytest.raises(TileError, match="shape"):
        augment(tiles, PAPER, 0)
