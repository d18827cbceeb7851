"""One slide: exact tiles on known tissue, one red tile on its exact pixels, every removal counted."""

import cv2
import numpy as np
import pytest
import tifffile
from slide_files import EOSIN, GLASS, REAL, damage, needs_real_slides, section, write_scn, write_slide

from tapfm.errors import ScaleError, TileReadError
from tapfm.slides.opening import open_slide
from tapfm.slides.quality import FOCUS_MPP, detect_blur
from tapfm.slides.quality import _sharpness as sharpness
from tapfm.slides.scale import Scale, resolve_scale
from tapfm.tiles.grid import TileSpec, TileStatus
from tapfm.tiles.tiling import _group_into_blocks as group_into_blocks
from tapfm.tiles.tiling import _read_block as read_block
from tapfm.tiles.tiling import no_tiles_error, tile_slide

SPEC = TileSpec()


def tiled(path, spec=SPEC, mpp=None, tissue_path=None):
    slide = open_slide(path)
    return slide, tile_slide(slide, resolve_scale(slide.metadata, mpp), spec, tissue_path)


@pytest.mark.parametrize("mpp", [0.23, 0.25, 0.2645, 0.33, 0.5])
def test_tissue_of_a_known_place_has_exactly_its_tiles(tmp_path, mpp):
    side_px0 = SPEC.side_px0(mpp)
    stride_px0 = 112 / mpp
    # tissue from the third column and second row on, four by three tiles
    width, height = round(8 * stride_px0) + 5, round(6 * stride_px0) + 5
    left, top, right, bottom = (round(n * stride_px0) for n in (2, 1, 6, 4))
    pixels = section(width, height, tissue=(left / width, top / height, right / width, bottom / height))
    path = write_slide(tmp_path / "s.svs", pixels, mpp=mpp, objective=20 if mpp > 0.3 else 40)
    _, result = tiled(path, TileSpec(min_tissue=0.5))
    expected = [[round(c * stride_px0), round(r * stride_px0)] for r in range(1, 4) for c in range(2, 6)]
    assert result.side_px0 == side_px0
    assert result.kept.tolist() == expected
    assert result.counts[TileStatus.BACKGROUND] == len(result.positions) - 12
    area_mm2 = (right - left) * (bottom - top) * mpp**2 / 1e6
    assert result.tissue_mm2 == pytest.approx(area_mm2, rel=0.1)


@pytest.mark.parametrize(("mpp", "objective"), [(0.5, 20), (0.25, 40), (0.2645, 40)])
def test_one_red_tile_is_found_at_its_exact_pixels(tmp_path, mpp, objective):
    stride_px0, side_px0 = 112 / mpp, SPEC.side_px0(mpp)
    size = round(7 * stride_px0) + 3
    pixels = section(size, size, tissue=(0, 0, 1, 1))
    x, y = round(4 * stride_px0), round(2 * stride_px0)
    pixels[y : y + side_px0, x : x + side_px0] = (255, 0, 0)
    options = {"compression": "zlib", "aperio": False} if mpp != 0.25 else {"level": 100}
    path = write_slide(tmp_path / "s.tif", pixels, mpp=mpp, objective=objective, **options)
    slide, result = tiled(path, TileSpec(drop_pen=False))
    red = [
        position
        for position in result.kept.tolist()
        if (np.abs(slide.read(*position, result.side_px0, 224).astype(int) - (255, 0, 0)) <= 3).all()
    ]
    assert red == [[x, y]]
    # one pixel beside it, the tile is no longer all red
    for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        assert (slide.read(x + dx, y + dy, side_px0, 224)[..., 1] > 3).any()


def test_bounds_and_gaps_of_a_leica_slide(tmp_path):
    areas = [
        (512, 256, section(1120, 1120, tissue=(0, 0, 1, 1))),
        (2304, 1024, section(672, 448, seed=1, tissue=(0, 0, 1, 1))),
    ]
    slide, result = tiled(write_scn(tmp_path / "s.scn", areas, (4096, 2048)))
    assert result.positions.min(axis=0).tolist() == [512, 256]
    first = [[512 + 224 * c, 256 + 224 * r] for r in range(5) for c in range(5)]
    inside = [position for position in result.kept.tolist() if position[0] < 1632]
    assert sorted(inside) == sorted(first)
    for x, y in result.kept.tolist():
        assert (slide.read(x, y, 224, 224) != 255).any(axis=2).mean() > 0.25  # none lies in the gap
    gap = result.statuses[(result.positions[:, 0] >= 1632) & (result.positions[:, 0] + 224 <= 2304)]
    assert set(gap.tolist()) == {TileStatus.BACKGROUND}


def test_ink_is_counted_and_left_out(tmp_path):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    pixels[448:896, 448:1344] = (30, 60, 170)
    path = write_slide(tmp_path / "s.svs", pixels)
    _, clean = tiled(path)
    # the ink's own 8 tiles, and those around that its fringe reaches into
    inked = {tuple(p) for p in clean.positions[clean.statuses == TileStatus.PEN].tolist()}
    assert {(448 + 224 * c, 448 + 224 * r) for r in range(2) for c in range(4)} <= inked
    assert len(inked) <= 24
    assert clean.counts[TileStatus.KEPT] == 100 - len(inked)
    _, kept = tiled(path, TileSpec(drop_pen=False))
    assert kept.counts[TileStatus.KEPT] == 100


def test_blur_is_counted_and_left_out(tmp_path):
    pixels = section(2240, 1120, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    pixels[:, 1120:] = cv2.GaussianBlur(pixels, (0, 0), 10)[:, 1120:]  # 5 um
    path = write_slide(tmp_path / "s.svs", pixels)
    _, result = tiled(path)
    assert result.counts[TileStatus.BLUR] == 25
    assert (result.positions[result.statuses == TileStatus.BLUR][:, 0] >= 1120).all()
    assert result.warnings == ()
    _, kept = tiled(path, TileSpec(drop_blur=False))
    assert kept.counts[TileStatus.KEPT] == 50


def half_blurred(width_px, height_px, mpp):
    """Paint tissue that is out of focus by 5 um in its middle."""
    pixels = section(width_px, height_px, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    left, top, right, bottom = width_px // 4, height_px // 3, width_px * 3 // 4, height_px * 3 // 4
    pixels[top:bottom, left:right] = cv2.GaussianBlur(pixels, (0, 0), 5 / mpp)[top:bottom, left:right]
    return pixels


@pytest.mark.parametrize(
    ("mpp", "overlap_px", "exact"),
    [(0.5, 0, True), (0.25, 0, True), (0.5, 112, True), (0.25, 50, False), (0.2495, 0, False), (0.33, 30, False)],
)
def test_focus_is_judged_in_blocks_as_tile_by_tile(tmp_path, mpp, overlap_px, exact):
    path = write_slide(tmp_path / "s.svs", half_blurred(2600, 1900, mpp), mpp=mpp, objective=20 if mpp > 0.3 else 40)
    slide, result = tiled(path, TileSpec(overlap_px=overlap_px))
    checked = np.flatnonzero(np.isin(result.statuses, (TileStatus.KEPT, TileStatus.BLUR)))
    focus_px = round(result.side_px0 * mpp / FOCUS_MPP)
    alone = np.stack([slide.read(x, y, result.side_px0, focus_px) for x, y in result.positions[checked].tolist()])
    statuses = [TileStatus.BLUR if detect_blur(tile[np.newaxis])[0] else TileStatus.KEPT for tile in alone]
    assert result.statuses[checked].tolist() == statuses
    assert 0 < statuses.count(TileStatus.BLUR) < len(statuses)
    in_order = np.concatenate(group_into_blocks(slide.metadata, result.positions, checked, result.side_px0, focus_px))
    assert sorted(in_order.tolist()) == checked.tolist()
    block = read_block(slide, result.positions[checked], result.side_px0, focus_px)
    if exact:
        np.testing.assert_array_equal(block, alone)
    else:
        np.testing.assert_allclose(sharpness(block), sharpness(alone), rtol=0.1)


def test_tiles_far_apart_are_not_read_as_one_picture(tmp_path):
    slide = open_slide(write_slide(tmp_path / "s.svs", section(2240, 2240)))
    assert read_block(slide, np.array([[0, 0], [1792, 1792]]), 224, 56) is None
    assert read_block(slide, np.array([[0, 0], [224, 0]]), 224, 56).shape == (2, 56, 56, 3)


def test_blocks_of_large_tiles_of_a_slide_without_a_pyramid_fit_into_memory(tmp_path):
    slide = open_slide(write_slide(tmp_path / "s.svs", section(1000, 1000), downsamples=(1,)))
    positions = np.array([[x, y] for y in range(0, 16_000, 2000) for x in range(0, 16_000, 2000)])
    blocks = group_into_blocks(slide.metadata, positions, np.arange(len(positions)), 2000, 250)
    assert [len(block) for block in blocks] == [4] * 16
    assert np.ptp(positions[blocks[0]], axis=0).tolist() == [2000, 2000]


def test_threads_judge_as_one_does(tmp_path):
    pixels = section(2240, 1120, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    pixels[300:900, :1700] = cv2.GaussianBlur(pixels, (0, 0), 10)[300:900, :1700]
    slide = open_slide(write_slide(tmp_path / "s.svs", pixels))
    scale = resolve_scale(slide.metadata, None)
    one, several = (tile_slide(slide, scale, SPEC, threads=threads) for threads in (1, 7))
    assert one.counts[TileStatus.BLUR] > 0
    assert one.counts[TileStatus.KEPT] > 0
    np.testing.assert_array_equal(one.statuses, several.statuses)


def test_a_filter_that_takes_nearly_everything_is_told(tmp_path):
    pixels = cv2.GaussianBlur(section(1120, 1120, tissue=(0, 0, 1, 1)), (0, 0), 10)
    _, result = tiled(write_slide(tmp_path / "s.svs", pixels))
    assert result.warnings == ("blur removed 25 of 25 tissue tiles: look at the overlay",)
    assert "removed 25 by blur" in str(no_tiles_error(result, "s.svs", SPEC))


def test_scanner_padding_is_named(tmp_path):
    pixels = section(1120, 1120, tissue=(0, 0, 1, 1))
    pixels[:, :448] = 0
    _, result = tiled(write_slide(tmp_path / "s.svs", pixels))
    assert result.counts[TileStatus.PADDING] == 10
    assert result.counts[TileStatus.KEPT] == 15


def test_glass_has_no_tile_and_says_so(tmp_path):
    _, result = tiled(write_slide(tmp_path / "s.svs", section(1120, 1120, tissue=(0, 0, 0, 0))))
    assert len(result.kept) == 0
    assert "has no tissue: none of 25 places is covered to 25%" in str(no_tiles_error(result, "s.svs", SPEC))


def test_a_slide_smaller_than_a_tile_says_so(tmp_path):
    _, result = tiled(write_slide(tmp_path / "s.svs", section(200, 200), downsamples=(1,)))
    assert "200 x 200 pixels, less than one tile of 224 x 224" in str(no_tiles_error(result, "s.svs", SPEC))


def test_min_tissue_decides_at_its_edge(tmp_path):
    pixels = np.full((896, 896, 3), GLASS, np.uint8)
    pixels[224:, 224 : 224 + 112] = EOSIN  # half of three tiles
    path = write_slide(tmp_path / "s.svs", pixels, compression="zlib", aperio=False)
    assert tiled(path, TileSpec(min_tissue=0.4, drop_blur=False))[1].kept.tolist() == [
        [224, 224],
        [224, 448],
        [224, 672],
    ]
    assert len(tiled(path, TileSpec(min_tissue=0.7, drop_blur=False))[1].kept) == 0


def test_tiles_of_a_coarser_slide_are_enlarged_with_a_warning(tmp_path):
    _, result = tiled(write_slide(tmp_path / "s.svs", section(1120, 1120, tissue=(0, 0, 1, 1)), mpp=1.0, objective=10))
    assert result.side_px0 == 112
    assert "1 um per pixel is coarser than the 0.5 asked for" in result.warnings[0]


def test_a_scale_in_wrong_units_is_refused_before_it_makes_a_million_tiles(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(1120, 1120))
    with pytest.raises(ScaleError) as error:
        tiled(path, mpp=250)
    assert "0.25 at 40x" in error.value.hint
    assert len(tiled(path, TileSpec(mpp=4.0, tile_px=64), mpp=4.0)[1].positions) == 17 * 17


@pytest.mark.parametrize("mpp", [0.23, 0.33, 0.5])
def test_tiles_that_are_all_tissue_are_kept_at_a_min_tissue_of_1(tmp_path, mpp):
    pixels = section(1500, 1500, tissue=(0, 0, 1, 1))
    path = write_slide(tmp_path / "s.svs", pixels, mpp=mpp, objective=20 if mpp > 0.3 else 40)
    _, result = tiled(path, TileSpec(min_tissue=1.0))
    assert len(result.kept) == len(result.positions) > 8


def slide_for_damage(tmp_path):
    # tissue is found on level 1; sharpness is judged from level 0, whose tiles here are those of the grid
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    return write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 16))


def test_a_few_unreadable_tiles_are_left_out_and_counted(tmp_path):
    _, result = tiled(damage(slide_for_damage(tmp_path), [5, 17, 99]))
    assert result.counts[TileStatus.UNREADABLE] == 3
    assert result.counts[TileStatus.KEPT] == 97
    assert result.positions[result.statuses == TileStatus.UNREADABLE].tolist() == [
        [1120, 0],
        [1568, 224],
        [2016, 2016],
    ]


def test_many_unreadable_tiles_fail_the_slide(tmp_path):
    with pytest.raises(TileReadError, match=r"s\.svs: 6 of 100 tiles cannot be decoded"):
        tiled(damage(slide_for_damage(tmp_path), range(0, 60, 10)))


@pytest.mark.parametrize("spec", [TileSpec(), TileSpec(drop_blur=False)])
def test_damage_in_level_0_is_found_though_tissue_and_focus_are_judged_on_level_1(tmp_path, spec):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    path = write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 4))
    with pytest.raises(TileReadError, match=r"100 of 100 tiles cannot be decoded"):
        tiled(damage(path, range(100)), spec)


def test_damage_that_only_openslide_sees_is_found(tmp_path):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    path = write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 4))
    with tifffile.TiffFile(path) as file:
        offsets, lengths = file.pages[0].dataoffsets, file.pages[0].databytecounts
    data = bytearray(path.read_bytes())
    for tile in range(0, 100, 4):  # the picture ends in its middle, and has its end as well: libjpeg only warns
        middle = offsets[tile] + lengths[tile] // 2
        data[middle : middle + 2] = b"\xff\xd9"
    path.write_bytes(data)
    with pytest.raises(TileReadError, match="25 of 100 tiles cannot be decoded"):
        tiled(path)


def test_what_is_unreadable_is_counted_over_what_was_looked_at(tmp_path):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    pixels[:, 224:] = cv2.GaussianBlur(pixels, (0, 0), 10)[:, 224:]
    path = write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 16))
    _, result = tiled(damage(path, [0, 10]))  # 2 of 100, though of 10 that are sharp
    assert result.counts[TileStatus.UNREADABLE] == 2
    assert result.counts[TileStatus.KEPT] == 8


def test_drawn_tissue_replaces_what_would_be_found(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(1120, 1120, tissue=(0, 0, 1, 1)))
    polygon = [[224, 224], [672, 224], [672, 448], [224, 448], [224, 224]]
    (tmp_path / "s.geojson").write_text(f'{{"type": "Polygon", "coordinates": [{polygon}]}}')
    _, result = tiled(path, TileSpec(min_tissue=0.5), tissue_path=tmp_path / "s.geojson")
    assert result.kept.tolist() == [[224, 224], [448, 224]]


@needs_real_slides
@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs", "CMU-1-Small-Region-DICOM", "CMU-1-Small-Region.jp2.tiff"])
def test_the_same_real_tissue_has_the_same_tiles_in_every_format(name):
    slide = open_slide(REAL / name)
    result = tile_slide(slide, Scale(0.499, "manifest"), SPEC)
    reference = tile_slide(open_slide(REAL / "CMU-1-Small-Region.svs"), Scale(0.499, "file"), SPEC)
    assert len(result.positions) == 117
    assert len(reference.kept) == 61
    assert abs(len(result.kept) - len(reference.kept)) <= 1  # each was compressed once more
    assert result.counts[TileStatus.PEN] == result.counts[TileStatus.BLUR] == 0
