"""Tiling of one slide: exact positions on known tissue, and counts of removed tiles."""

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
from tapfm.tiles.reading import TileRequest
from tapfm.tiles.stream import TileStream
from tapfm.tiles.tiling import _group_into_blocks as group_into_blocks
from tapfm.tiles.tiling import _read_block as read_block
from tapfm.tiles.tiling import no_tiles_error, tile_slide

SPEC = TileSpec()


def open_and_tile(path, spec=SPEC, mpp=None, tissue_path=None):
    slide = open_slide(path)
    return slide, tile_slide(slide, resolve_scale(slide.metadata, mpp), spec, tissue_path)


@pytest.mark.parametrize("mpp", [0.23, 0.25, 0.2645, 0.33, 0.5])
def test_known_tissue_gives_exact_tiles(tmp_path, mpp):
    side_px0 = SPEC.side_px0(mpp)
    stride_px0 = 112 / mpp
    # tissue from the third column and second row on, four by three tiles
    width, height = round(8 * stride_px0) + 5, round(6 * stride_px0) + 5
    left, top, right, bottom = (round(n * stride_px0) for n in (2, 1, 6, 4))
    pixels = section(width, height, tissue=(left / width, top / height, right / width, bottom / height))
    path = write_slide(tmp_path / "s.svs", pixels, mpp=mpp, objective=20 if mpp > 0.3 else 40)
    _, result = open_and_tile(path, TileSpec(min_tissue=0.5))
    expected = [[round(c * stride_px0), round(r * stride_px0)] for r in range(1, 4) for c in range(2, 6)]
    assert result.side_px0 == side_px0
    assert result.kept.tolist() == expected
    assert result.counts[TileStatus.BACKGROUND] == len(result.positions) - 12
    area_mm2 = (right - left) * (bottom - top) * mpp**2 / 1e6
    assert result.tissue_mm2 == pytest.approx(area_mm2, rel=0.1)


@pytest.mark.parametrize(("mpp", "objective"), [(0.5, 20), (0.25, 40), (0.2645, 40)])
def test_red_square_is_one_exact_tile(tmp_path, mpp, objective):
    stride_px0, side_px0 = 112 / mpp, SPEC.side_px0(mpp)
    size = round(7 * stride_px0) + 3
    pixels = section(size, size, tissue=(0, 0, 1, 1))
    x, y = round(4 * stride_px0), round(2 * stride_px0)
    pixels[y : y + side_px0, x : x + side_px0] = (255, 0, 0)
    options = {"compression": "zlib", "aperio": False} if mpp != 0.25 else {"level": 100}
    path = write_slide(tmp_path / "s.tif", pixels, mpp=mpp, objective=objective, **options)
    slide, result = open_and_tile(path, TileSpec(drop_pen=False))
    red = [
        position
        for position in result.kept.tolist()
        if (np.abs(slide.read(*position, result.side_px0, 224).astype(int) - (255, 0, 0)) <= 3).all()
    ]
    assert red == [[x, y]]
    # shifted by one pixel, the tile is no longer all red
    for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        assert (slide.read(x + dx, y + dy, side_px0, 224)[..., 1] > 3).any()


def test_leica_slide_with_bounds_and_gaps(tmp_path):
    areas = [
        (512, 256, section(1120, 1120, tissue=(0, 0, 1, 1))),
        (2304, 1024, section(672, 448, seed=1, tissue=(0, 0, 1, 1))),
    ]
    slide, result = open_and_tile(write_scn(tmp_path / "s.scn", areas, (4096, 2048)))
    assert result.positions.min(axis=0).tolist() == [512, 256]
    first = [[512 + 224 * c, 256 + 224 * r] for r in range(5) for c in range(5)]
    inside = [position for position in result.kept.tolist() if position[0] < 1632]
    assert sorted(inside) == sorted(first)
    for x, y in result.kept.tolist():
        assert (slide.read(x, y, 224, 224) != 255).any(axis=2).mean() > 0.25  # not in the gap
    gap = result.statuses[(result.positions[:, 0] >= 1632) & (result.positions[:, 0] + 224 <= 2304)]
    assert set(gap.tolist()) == {TileStatus.BACKGROUND}


def test_pen_tiles_are_removed_and_counted(tmp_path):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    pixels[448:896, 448:1344] = (30, 60, 170)
    path = write_slide(tmp_path / "s.svs", pixels)
    _, filtered = open_and_tile(path)
    # 8 tiles of ink, and adjacent tiles in its margin
    with_pen = {tuple(p) for p in filtered.positions[filtered.statuses == TileStatus.PEN].tolist()}
    assert {(448 + 224 * c, 448 + 224 * r) for r in range(2) for c in range(4)} <= with_pen
    assert len(with_pen) <= 24
    assert filtered.counts[TileStatus.KEPT] == 100 - len(with_pen)
    _, unfiltered = open_and_tile(path, TileSpec(drop_pen=False))
    assert unfiltered.counts[TileStatus.KEPT] == 100


def test_blurred_tiles_are_removed_and_counted(tmp_path):
    pixels = section(2240, 1120, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    pixels[:, 1120:] = cv2.GaussianBlur(pixels, (0, 0), 10)[:, 1120:]  # 5 um
    path = write_slide(tmp_path / "s.svs", pixels)
    _, result = open_and_tile(path)
    assert result.counts[TileStatus.BLUR] == 25
    assert (result.positions[result.statuses == TileStatus.BLUR][:, 0] >= 1120).all()
    assert result.warnings == ()
    _, unfiltered = open_and_tile(path, TileSpec(drop_blur=False))
    assert unfiltered.counts[TileStatus.KEPT] == 50


def make_half_blurred_tissue(width_px, height_px, mpp):
    """Return an image of tissue whose centre is blurred by 5 um."""
    pixels = section(width_px, height_px, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    left, top, right, bottom = width_px // 4, height_px // 3, width_px * 3 // 4, height_px * 3 // 4
    pixels[top:bottom, left:right] = cv2.GaussianBlur(pixels, (0, 0), 5 / mpp)[top:bottom, left:right]
    return pixels


@pytest.mark.parametrize(
    ("mpp", "overlap_px", "exact"),
    [(0.5, 0, True), (0.25, 0, True), (0.5, 112, True), (0.25, 50, False), (0.2495, 0, False), (0.33, 30, False)],
)
def test_blur_detection_in_blocks_equals_tile_by_tile(tmp_path, mpp, overlap_px, exact):
    path = write_slide(
        tmp_path / "s.svs", make_half_blurred_tissue(2600, 1900, mpp), mpp=mpp, objective=20 if mpp > 0.3 else 40
    )
    slide, result = open_and_tile(path, TileSpec(overlap_px=overlap_px))
    checked = np.flatnonzero(np.isin(result.statuses, (TileStatus.KEPT, TileStatus.BLUR)))
    focus_px = round(result.side_px0 * mpp / FOCUS_MPP)
    single = np.stack([slide.read(x, y, result.side_px0, focus_px) for x, y in result.positions[checked].tolist()])
    statuses = [TileStatus.BLUR if detect_blur(tile[np.newaxis])[0] else TileStatus.KEPT for tile in single]
    assert result.statuses[checked].tolist() == statuses
    assert 0 < statuses.count(TileStatus.BLUR) < len(statuses)
    in_order = np.concatenate(group_into_blocks(slide.metadata, result.positions, checked, result.side_px0, focus_px))
    assert sorted(in_order.tolist()) == checked.tolist()
    block = read_block(slide, result.positions[checked], result.side_px0, focus_px)
    if exact:
        np.testing.assert_array_equal(block, single)
    else:
        np.testing.assert_allclose(sharpness(block), sharpness(single), rtol=0.1)


def test_distant_tiles_are_not_read_as_one_block(tmp_path):
    slide = open_slide(write_slide(tmp_path / "s.svs", section(2240, 2240)))
    assert read_block(slide, np.array([[0, 0], [1792, 1792]]), 224, 56) is None
    assert read_block(slide, np.array([[0, 0], [224, 0]]), 224, 56).shape == (2, 56, 56, 3)


def test_block_size_is_limited_without_a_pyramid(tmp_path):
    slide = open_slide(write_slide(tmp_path / "s.svs", section(1000, 1000), downsamples=(1,)))
    positions = np.array([[x, y] for y in range(0, 16_000, 2000) for x in range(0, 16_000, 2000)])
    blocks = group_into_blocks(slide.metadata, positions, np.arange(len(positions)), 2000, 250)
    assert [len(block) for block in blocks] == [4] * 16
    assert np.ptp(positions[blocks[0]], axis=0).tolist() == [2000, 2000]


def test_number_of_threads_does_not_change_the_result(tmp_path):
    pixels = section(2240, 1120, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    pixels[300:900, :1700] = cv2.GaussianBlur(pixels, (0, 0), 10)[300:900, :1700]
    slide = open_slide(write_slide(tmp_path / "s.svs", pixels))
    scale = resolve_scale(slide.metadata, None)
    one, several = (tile_slide(slide, scale, SPEC, threads=threads) for threads in (1, 7))
    assert one.counts[TileStatus.BLUR] > 0
    assert one.counts[TileStatus.KEPT] > 0
    np.testing.assert_array_equal(one.statuses, several.statuses)


def test_filter_that_removes_most_tiles_gives_a_warning(tmp_path):
    pixels = cv2.GaussianBlur(section(1120, 1120, tissue=(0, 0, 1, 1)), (0, 0), 10)
    _, result = open_and_tile(write_slide(tmp_path / "s.svs", pixels))
    (warning,) = result.warnings
    assert "blur filter removed 25 of 25 tissue tiles" in warning
    assert "25 out of focus" in str(no_tiles_error(result, "s.svs", SPEC))


def test_scanner_padding_is_counted(tmp_path):
    pixels = section(1120, 1120, tissue=(0, 0, 1, 1))
    pixels[:, :448] = 0
    _, result = open_and_tile(write_slide(tmp_path / "s.svs", pixels))
    assert result.counts[TileStatus.PADDING] == 10
    assert result.counts[TileStatus.KEPT] == 15


def test_slide_without_tissue_is_an_error(tmp_path):
    _, result = open_and_tile(write_slide(tmp_path / "s.svs", section(1120, 1120, tissue=(0, 0, 0, 0))))
    assert len(result.kept) == 0
    error = no_tiles_error(result, "s.svs", SPEC)
    assert "has no tissue: none of its 25 tile positions" in error.message
    assert "--tissue-mask" in error.hint
    annotated = no_tiles_error(result, "s.svs", SPEC, tmp_path / "s.geojson")
    assert "s.geojson" in annotated.hint
    assert "--tissue" not in annotated.hint


def test_slide_smaller_than_a_tile_is_an_error(tmp_path):
    _, result = open_and_tile(write_slide(tmp_path / "s.svs", section(200, 200), downsamples=(1,)))
    assert "200 x 200 pixels and is smaller than one tile of 224 x 224" in str(no_tiles_error(result, "s.svs", SPEC))


def test_min_tissue_threshold(tmp_path):
    pixels = np.full((896, 896, 3), GLASS, np.uint8)
    pixels[224:, 224 : 224 + 112] = EOSIN  # half of three tiles
    path = write_slide(tmp_path / "s.svs", pixels, compression="zlib", aperio=False)
    assert open_and_tile(path, TileSpec(min_tissue=0.4, drop_blur=False))[1].kept.tolist() == [
        [224, 224],
        [224, 448],
        [224, 672],
    ]
    assert len(open_and_tile(path, TileSpec(min_tissue=0.7, drop_blur=False))[1].kept) == 0


def test_coarse_slide_gives_enlarged_tiles_and_a_warning(tmp_path):
    _, result = open_and_tile(
        write_slide(tmp_path / "s.svs", section(1120, 1120, tissue=(0, 0, 1, 1)), mpp=1.0, objective=10)
    )
    assert result.side_px0 == 112
    assert "1 um per pixel is coarser than the requested 0.5" in result.warnings[0]


def test_implausibly_coarse_scale_is_rejected(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(1120, 1120))
    with pytest.raises(ScaleError) as error:
        open_and_tile(path, mpp=250)
    assert "0.25 at 40x" in error.value.hint
    assert len(open_and_tile(path, TileSpec(mpp=4.0, tile_px=64), mpp=4.0)[1].positions) == 17 * 17


@pytest.mark.parametrize("mpp", [0.23, 0.33, 0.5])
def test_full_tissue_tiles_are_kept_with_min_tissue_1(tmp_path, mpp):
    pixels = section(1500, 1500, tissue=(0, 0, 1, 1))
    path = write_slide(tmp_path / "s.svs", pixels, mpp=mpp, objective=20 if mpp > 0.3 else 40)
    _, result = open_and_tile(path, TileSpec(min_tissue=1.0))
    assert len(result.kept) == len(result.positions) > 8


def write_slide_to_damage(tmp_path):
    # tissue is detected on level 1, sharpness on level 0, whose tiles coincide with the grid
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    return write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 16))


def test_few_unreadable_tiles_are_removed_and_counted(tmp_path):
    _, result = open_and_tile(damage(write_slide_to_damage(tmp_path), [5, 17, 99]))
    assert result.counts[TileStatus.UNREADABLE] == 3
    assert result.counts[TileStatus.KEPT] == 97
    assert result.positions[result.statuses == TileStatus.UNREADABLE].tolist() == [
        [1120, 0],
        [1568, 224],
        [2016, 2016],
    ]


def test_many_unreadable_tiles_are_an_error(tmp_path):
    with pytest.raises(TileReadError, match=r"s\.svs: 6 of 100 tiles cannot be decoded"):
        open_and_tile(damage(write_slide_to_damage(tmp_path), range(0, 60, 10)))


@pytest.mark.parametrize("spec", [TileSpec(), TileSpec(drop_blur=False)])
def test_damage_of_level_0_only_is_detected(tmp_path, spec):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    path = write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 4))
    with pytest.raises(TileReadError, match=r"100 of 100 tiles cannot be decoded"):
        open_and_tile(damage(path, range(100)), spec)


def test_damage_that_only_openslide_reports_is_detected(tmp_path):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1))
    path = write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 4))
    with tifffile.TiffFile(path) as file:
        offsets, lengths = file.pages[0].dataoffsets, file.pages[0].databytecounts
    data = bytearray(path.read_bytes())
    for tile in range(0, 100, 4):  # an end marker in the middle of the data: libjpeg only warns
        middle = offsets[tile] + lengths[tile] // 2
        data[middle : middle + 2] = b"\xff\xd9"
    path.write_bytes(data)
    with pytest.raises(TileReadError, match="25 of 100 tiles cannot be decoded"):
        open_and_tile(path)


def test_unreadable_fraction_is_of_all_checked_tiles(tmp_path):
    pixels = section(2240, 2240, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    pixels[:, 224:] = cv2.GaussianBlur(pixels, (0, 0), 10)[:, 224:]
    path = write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 16))
    _, result = open_and_tile(damage(path, [0, 10]))  # 2 of 100 checked tiles, of which 10 are sharp
    assert result.counts[TileStatus.UNREADABLE] == 2
    assert result.counts[TileStatus.KEPT] == 8


def test_tissue_annotation_replaces_detection(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(1120, 1120, tissue=(0, 0, 1, 1)))
    polygon = [[224, 224], [672, 224], [672, 448], [224, 448], [224, 224]]
    (tmp_path / "s.geojson").write_text(f'{{"type": "Polygon", "coordinates": [{polygon}]}}')
    _, result = open_and_tile(path, TileSpec(min_tissue=0.5), tissue_path=tmp_path / "s.geojson")
    assert result.kept.tolist() == [[224, 224], [448, 224]]


# --- tiles past the right and bottom edge

PAD = TileSpec(edge_tiles="pad")


def positions_with(result, status):
    return result.positions[result.statuses == status].tolist()


def write_tissue(folder, width, height):
    """Write a slide that is covered by tissue."""
    return write_slide(folder / "s.svs", section(width, height, tissue=(0, 0, 1, 1)))


def test_edge_tiles_with_tissue_are_counted_and_skipped(tmp_path):
    path = write_tissue(tmp_path, 1000, 700)  # 4 x 3 tiles, 104 px at the right, 28 px at the bottom
    _, result = open_and_tile(path)
    inside = [[x, y] for y in (0, 224, 448) for x in (0, 224, 448, 672)]
    right = [[896, y] for y in (0, 224, 448)]  # the tiles of the lower row have too little tissue
    assert result.kept.tolist() == inside
    assert positions_with(result, TileStatus.EDGE) == right
    assert result.counts[TileStatus.PADDED] == 0
    assert len(result.positions) == 15
    assert not result.padded.any()
    assert result.tissue_mm2 == pytest.approx(1000 * 700 * 0.25e-6, rel=0.02)
    assert result.removed_edge_mm2 == pytest.approx(104 * 672 * 0.25e-6, rel=0.1)  # of the thumbnail, 8 um per pixel


def test_edge_tiles_are_kept_and_marked_with_pad(tmp_path):
    _, result = open_and_tile(write_tissue(tmp_path, 1000, 700), PAD)
    kept = [[x, y] for y in (0, 224, 448) for x in (0, 224, 448, 672, 896)]
    assert result.kept.tolist() == kept
    assert result.kept[result.padded].tolist() == [[896, 0], [896, 224], [896, 448]]
    assert (result.counts[TileStatus.KEPT], result.counts[TileStatus.PADDED]) == (12, 3)
    assert result.counts[TileStatus.BACKGROUND] == 5  # the lower row, 12.5% of each tile
    assert result.counts[TileStatus.EDGE] == result.removed_edge_mm2 == 0


@pytest.mark.parametrize(("min_tissue", "count"), [(0.4, 3), (0.5, 0)])
@pytest.mark.parametrize("edge_tiles", ["skip", "pad"])
def test_tissue_fraction_of_an_edge_tile_is_that_of_the_whole_tile(tmp_path, edge_tiles, min_tissue, count):
    _, result = open_and_tile(write_tissue(tmp_path, 1000, 700), TileSpec(min_tissue=min_tissue, edge_tiles=edge_tiles))
    # 104 of 224 px: 46%
    assert result.counts[TileStatus.EDGE if edge_tiles == "skip" else TileStatus.PADDED] == count
    assert result.counts[TileStatus.KEPT] == 12


def test_tissue_at_the_edge_is_not_counted_twice_if_tiles_overlap(tmp_path):
    path = write_tissue(tmp_path, 1000, 672)
    _, result = open_and_tile(path, TileSpec(overlap_px=112))
    assert positions_with(result, TileStatus.EDGE) == [[784, y] for y in range(0, 449, 112)]
    # complete tiles end at 896
    assert result.removed_edge_mm2 == pytest.approx(104 * 672 * 0.25e-6, rel=0.1)


def test_edge_is_that_of_the_scanned_area(tmp_path):
    areas = [(512, 256, section(600, 448, tissue=(0, 0, 1, 1)))]
    path = write_scn(tmp_path / "s.scn", areas, (4096, 2048))
    _, skipped = open_and_tile(path)
    assert positions_with(skipped, TileStatus.EDGE) == [[960, 256], [960, 480]]
    slide, padded = open_and_tile(path, PAD)
    assert padded.kept[padded.padded].tolist() == [[960, 256], [960, 480]]
    tile = slide.read(960, 256, 224, 224)
    assert (tile[:, 152:] == 255).all()
    assert (tile[:, :150] != 255).any(axis=2).mean() > 0.9


@pytest.mark.parametrize("edge_tiles", ["skip", "pad"])
def test_pen_at_the_edge(tmp_path, edge_tiles):
    pixels = section(1000, 896, tissue=(0, 0, 1, 1))
    pixels[:448, 900:] = (30, 60, 170)
    path = write_slide(tmp_path / "s.svs", pixels)
    _, result = open_and_tile(path, TileSpec(edge_tiles=edge_tiles))
    # skipped tiles are counted for one reason only
    assert result.counts[TileStatus.EDGE] == (4 if edge_tiles == "skip" else 0)
    assert ([896, 0] in positions_with(result, TileStatus.PEN)) == (edge_tiles == "pad")
    assert [896, 672] in positions_with(result, TileStatus.EDGE if edge_tiles == "skip" else TileStatus.PADDED)
    _, unfiltered = open_and_tile(path, TileSpec(edge_tiles="pad", drop_pen=False, drop_blur=False))
    assert unfiltered.counts[TileStatus.PADDED] == 4


@pytest.mark.parametrize("mpp", [0.5, 0.33])
def test_white_edge_does_not_look_like_focus(tmp_path, mpp):
    side_px0 = SPEC.side_px0(mpp)
    width, height = round(4.5 * 112 / mpp), round(3.6 * 112 / mpp)
    pixels = section(width, height, tissue=(0, 0, 1, 1), nuclei_per_mpx=2000)
    pixels[: height // 2] = cv2.GaussianBlur(pixels, (0, 0), 5 / mpp)[: height // 2]
    path = write_slide(tmp_path / "s.svs", pixels, mpp=mpp, objective=20)
    slide, result = open_and_tile(path, PAD)
    assert len(positions_with(result, TileStatus.PADDED)) >= 5
    skipped = tile_slide(slide, resolve_scale(slide.metadata), SPEC)
    assert skipped.kept.tolist() == result.kept[~result.padded].tolist(), "other tiles do not change"
    blurred = [position for position in positions_with(result, TileStatus.BLUR) if position[0] + side_px0 > width]
    assert [y for _, y in blurred] == [0]
    if mpp == 0.5:
        tile = slide.read(*blurred[0], side_px0, 56)
        assert not detect_blur(tile[np.newaxis])[0], "with its white part, the tile would be classified as sharp"


def test_narrow_edge_tiles_are_not_classified_as_out_of_focus(tmp_path):
    pixels = cv2.GaussianBlur(section(914, 672, tissue=(0, 0, 1, 1)), (0, 0), 10)  # 18 px at the edge
    _, result = open_and_tile(write_slide(tmp_path / "s.svs", pixels), TileSpec(min_tissue=0.05, edge_tiles="pad"))
    assert result.counts[TileStatus.BLUR] == 12
    assert positions_with(result, TileStatus.PADDED) == [[896, 0], [896, 224], [896, 448]]


def test_unreadable_edge_tiles_are_removed(tmp_path):
    pixels = section(2240 + 150, 2240, tissue=(0, 0, 1, 1))
    path = write_slide(tmp_path / "s.svs", pixels, tile_px=224, downsamples=(1, 16))
    _, result = open_and_tile(damage(path, [10, 54]), PAD)  # 11 blocks in each row
    assert positions_with(result, TileStatus.UNREADABLE) == [[2240, 0], [2240, 896]]
    assert result.counts[TileStatus.PADDED] == 8
    assert open_and_tile(path)[1].counts[TileStatus.UNREADABLE] == 0  # skipped tiles are not read


def test_skipped_edge_tiles_are_not_part_of_the_warning_of_a_filter(tmp_path):
    pixels = cv2.GaussianBlur(section(1120 + 150, 1120, tissue=(0, 0, 1, 1)), (0, 0), 10)
    _, result = open_and_tile(write_slide(tmp_path / "s.svs", pixels))
    (warning,) = result.warnings
    assert "blur filter removed 25 of 25 tissue tiles" in warning
    error = no_tiles_error(result, "s.svs", SPEC)
    assert "25 out of focus, 5 past the right or bottom edge" in error.message
    assert "--edge-tiles pad" in error.hint


def test_slide_smaller_than_a_tile_can_be_padded(tmp_path):
    path = write_slide(tmp_path / "s.svs", section(500, 450, tissue=(0, 0, 1, 1)), downsamples=(1,))
    _, skipped = open_and_tile(path, TileSpec(tile_px=512))
    error = no_tiles_error(skipped, "s.svs", SPEC)
    assert "smaller than one tile" in error.message
    assert "--edge-tiles pad" in error.hint
    _, padded = open_and_tile(path, TileSpec(tile_px=512, edge_tiles="pad"))
    assert (padded.kept.tolist(), padded.padded.tolist()) == ([[0, 0]], [True])
    glass = write_slide(tmp_path / "glass.svs", section(500, 450, tissue=(0, 0, 0, 0)), downsamples=(1,))
    _, skipped = open_and_tile(glass, TileSpec(tile_px=512))
    assert "--edge-tiles" not in no_tiles_error(skipped, "glass.svs", SPEC).hint


def test_padded_tiles_are_read_with_white_by_workers_too(tmp_path):
    path = write_tissue(tmp_path, 1000, 700)
    slide, result = open_and_tile(path, PAD)
    request = TileRequest("s", path, result.kept, result.side_px0, 112)
    for workers in (0, 1):
        with TileStream([request], workers=workers) as stream:
            (read,) = stream
        assert read.rows.tolist() == list(range(15))
        padded = read.pixels[result.padded]
        assert (padded[..., 52:] == 255).all()
        assert (padded[..., :52].transpose(0, 2, 3, 1) != 255).any(axis=3).all()
        np.testing.assert_array_equal(padded[0].transpose(1, 2, 0), slide.read(896, 0, 224, 112))


@needs_real_slides
def test_edge_tiles_of_a_real_slide():
    slide = open_slide(REAL / "CMU-1-Small-Region.svs")
    specs = {edge_tiles: TileSpec(tile_px=384, edge_tiles=edge_tiles) for edge_tiles in ("skip", "pad")}
    skipped, padded = (tile_slide(slide, Scale(0.499, "file"), spec) for spec in specs.values())
    assert len(skipped.kept) == 21
    assert positions_with(skipped, TileStatus.EDGE) == padded.kept[padded.padded].tolist()
    assert positions_with(skipped, TileStatus.EDGE) == [[x, 2693] for x in (385, 770, 1154, 1539)]
    assert skipped.removed_edge_mm2 / skipped.tissue_mm2 == pytest.approx(0.122, abs=0.005)
    tile = slide.read(385, 2693, padded.side_px0, 384)
    assert (tile[2967 - 2693 + 1 :] == 255).all()


@needs_real_slides
@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs", "CMU-1-Small-Region-DICOM", "CMU-1-Small-Region.jp2.tiff"])
def test_real_slide_has_same_tiles_in_every_format(name):
    slide = open_slide(REAL / name)
    result = tile_slide(slide, Scale(0.499, "cohort table"), SPEC)
    reference = tile_slide(open_slide(REAL / "CMU-1-Small-Region.svs"), Scale(0.499, "file"), SPEC)
    assert len(result.positions) == 117
    assert len(reference.kept) == 61
    assert abs(len(result.kept) - len(reference.kept)) <= 1  # the files were compressed separately
    assert result.counts[TileStatus.PEN] == result.counts[TileStatus.BLUR] == 0
