"""Reading of regions at any size from the best level, and thumbnails."""

import numpy as np
import pytest
from slide_files import damage, section, write_slide

from tapfm.errors import TileReadError
from tapfm.slides.opening import open_slide
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import open_tiff
from tapfm.slides.region_reading import _resize as resize
from tapfm.slides.region_reading import best_level, make_thumbnail, read_region
from tapfm.slides.slide import Level

LEVELS = (Level(1000, 1000, 1, 1), Level(250, 250, 4.0002, 4.0002), Level(62, 62, 16.2, 16.0))


@pytest.mark.parametrize(
    ("downsample", "level"), [(0.5, 0), (1, 0), (2, 0), (3.9, 0), (4, 1), (4.2, 1), (16, 1), (16.1, 2), (100, 2)]
)
def test_best_level_is_the_coarsest_that_is_fine_enough(downsample, level):
    assert best_level(LEVELS, downsample) == level


def test_integer_ratio_averages_blocks():
    pixels = section(448, 448, tissue=(0, 0, 1, 1))
    expected = pixels.reshape(224, 2, 224, 2, 3).mean(axis=(1, 3))
    resized = resize(pixels, (0, 0, 448, 448), 224, 224)
    assert np.abs(resized - expected).max() <= 0.5


def test_equal_size_returns_the_same_pixels():
    pixels = section(224, 224)
    assert resize(pixels, (0, 0, 224, 224), 224, 224) is pixels


@pytest.mark.parametrize("side_px", [423, 487, 339, 225, 100])
def test_other_ratios_do_not_shift_the_image(side_px):
    ramp = np.linspace(0, 255, side_px)
    pixels = np.rint(np.dstack([np.broadcast_to(ramp, (side_px, side_px))] * 3)).astype(np.uint8)
    scaled = resize(pixels, (0, 0, side_px, side_px), 224, 224)[..., 0].mean(axis=0)
    expected = ((np.arange(224) + 0.5) / 224 * side_px - 0.5) / (side_px - 1) * 255
    assert np.abs(scaled - expected)[3:-3].max() < 1.0  # a shift would change the ramp


def test_downsampling_is_antialiased():
    # a chequerboard of single pixels becomes grey at any ratio
    board = (np.indices((423, 423)).sum(axis=0) % 2 * 255).astype(np.uint8)
    resized = resize(np.dstack([board] * 3), (0, 0, 423, 423), 100, 100)
    assert np.abs(resized.astype(int) - 127).max() < 25


def test_subpixel_positions_are_exact(tmp_path):
    # a ramp shows a shift by one level-0 pixel; most positions are between the pixels of level 1
    ramp = np.linspace(0, 255, 2048)
    pixels = np.rint(np.dstack([np.broadcast_to(ramp, (1024, 2048))] * 3)).astype(np.uint8)
    slide = open_slide(write_slide(tmp_path / "s.tif", pixels, downsamples=(1, 4), compression="zlib", aperio=False))
    for x_px0 in (400, 401, 402, 403, 777):
        tile = slide.read(x_px0, 100, 896, 224)[..., 0].mean(axis=0)
        expected = ((x_px0 + (np.arange(224) + 0.5) * 4) - 0.5) / 2047 * 255
        assert np.abs(tile - expected)[3:-3].mean() < 0.3


@pytest.mark.parametrize(
    ("size", "full", "downsamples"),
    [
        ((2500, 37), (40_000, 600), (16, 16)),  # 37.5 rounded down: still 16
        ((225, 275), (901, 1103), (4, 4)),
        ((500, 250), (1000, 1000), (2, 4)),
        ((400, 300), (1000, 751), (2.5, 751 / 300)),
    ],
)
def test_downsamples_of_rounded_levels(size, full, downsamples):
    level = Level.from_sizes(*size, *full)
    assert (level.downsample_x, level.downsample_y) == pytest.approx(downsamples)


def test_positions_at_the_far_end_of_a_narrow_slide(tmp_path):
    pixels = np.full((152, 40_000, 3), 240, np.uint8)
    pixels[:, 36_000:38_000] = (200, 100, 150)
    path = write_slide(tmp_path / "s.svs", pixels, downsamples=(1, 16))
    for reader in (open_tiff, OpenSlideSlide):
        row = reader(path).thumbnail(2500).pixels[4, :, 1]
        assert np.flatnonzero(row < 170)[[0, -1]] == pytest.approx([2250, 2374], abs=2)


def test_edge_of_a_rounded_level_has_no_white(tmp_path):
    pixels = np.full((1003, 2003, 3), (120, 60, 120), np.uint8)
    slide = open_slide(write_slide(tmp_path / "s.tif", pixels, downsamples=(1, 4), compression="zlib", aperio=False))
    assert [level.width_px for level in slide.metadata.levels] == [2003, 500]
    for pixels_read in (slide.read(2003 - 448, 1003 - 448, 448, 112), slide.thumbnail(500).pixels):
        assert (pixels_read == (120, 60, 120)).all()
    assert (slide.read(2003 - 400, 0, 448, 112)[:, -10:] == 255).all()  # white outside the slide
    assert (slide.read(2002, 1002, 1, 1) == (120, 60, 120)).all()
    # the rounded level does not contain this strip, so the last column of the level is read
    assert (read_region(slide, 1999, 0, 4, 400, 1, 100) == (120, 60, 120)).all()


@pytest.mark.parametrize("downsamples", [(1,), (1, 4), (1, 2, 4, 8)])
def test_tile_is_the_same_for_any_pyramid(tmp_path, downsamples):
    pixels = section(2048, 1024, tissue=(0, 0, 1, 1))
    slide = open_slide(
        write_slide(tmp_path / "s.tif", pixels, downsamples=downsamples, compression="zlib", aperio=False)
    )
    tile = slide.read(333, 111, 448 * 2, 224).astype(int)
    reference = pixels[111 : 111 + 896, 333 : 333 + 896].reshape(224, 4, 224, 4, 3).mean(axis=(1, 3))
    assert np.abs(tile - reference).mean() < (6 if len(downsamples) > 1 else 0.6)


def test_thumbnail_without_a_pyramid_is_the_block_mean(tmp_path):
    pixels = section(9000, 1200, nuclei_per_mpx=50)
    slide = open_slide(write_slide(tmp_path / "s.svs", pixels, downsamples=(1,)))
    thumbnail = slide.thumbnail(90)
    assert thumbnail.pixels.shape == (12, 90, 3)
    assert thumbnail.downsample == (100, 100)
    reference = pixels.reshape(12, 100, 90, 100, 3).mean(axis=(1, 3))
    assert np.abs(thumbnail.pixels - reference).mean() < 3


def test_threads_give_the_same_thumbnail_and_damage(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(9000, 1200), downsamples=(1,))
    slide = open_slide(path)
    np.testing.assert_array_equal(make_thumbnail(slide, 800, 3).pixels, make_thumbnail(slide, 800).pixels)
    slide = open_slide(damage(path, [2, 170]))
    damaged = make_thumbnail(slide, 800, 3).pixels
    assert (damaged == 255).all(axis=2).any()
    np.testing.assert_array_equal(damaged, make_thumbnail(slide, 800).pixels)
    slide = open_slide(damage(path, range(0, 180, 9)))
    with pytest.raises(TileReadError):
        make_thumbnail(slide, 800, 3)
