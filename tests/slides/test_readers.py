"""Slide readers: all return the same pixels and metadata; unsupported files are rejected."""

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image
from slide_files import REAL, needs_real_slides, section, write_ome, write_scn, write_slide

from tapfm.errors import UnreadableSlideError
from tapfm.slides.opening import open_slide
from tapfm.slides.readers.jpeg import _find_frame_header as find_frame_header
from tapfm.slides.readers.jpeg import decode_jpeg
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import UnsupportedTiffError, open_tiff
from tapfm.slides.readers.tiff import _read_ome_metadata as read_ome_metadata
from tapfm.slides.slide import Box


def random_regions(slide, level, count, seed=0):
    rng = np.random.default_rng(seed)
    size = slide.metadata.levels[level]
    for _ in range(count):
        yield (
            int(rng.integers(-60, size.width_px)),
            int(rng.integers(-60, size.height_px)),
            int(rng.integers(1, 400)),
            int(rng.integers(1, 400)),
        )


def assert_equal_pixels(path, count=60):
    tiff, reference = open_tiff(path), OpenSlideSlide(path)
    assert [(each.width_px, each.height_px) for each in tiff.metadata.levels] == [
        (each.width_px, each.height_px) for each in reference.metadata.levels
    ]
    assert [each.downsample for each in tiff.metadata.levels] == [each.downsample for each in reference.metadata.levels]
    for level in range(len(tiff.metadata.levels)):
        for region in random_regions(tiff, level, count):
            np.testing.assert_array_equal(
                tiff.read_level(level, *region), reference.read_level(level, *region), str(region)
            )
    return tiff, reference


# --- our TIFF reader compared with OpenSlide


@needs_real_slides
@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs", "CMU-1-Small-Region.jpeg.tiff"])
def test_real_slides_have_the_pixels_and_metadata_of_openslide(name):
    tiff, reference = assert_equal_pixels(REAL / name, count=150)
    for field in ("vendor", "format", "mpp_in_file", "objective_power", "bounds"):
        assert getattr(tiff.metadata, field) == pytest.approx(getattr(reference.metadata, field)), field


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": (2, 2)},
        {"subsampling": (2, 1)},
        {"subsampling": (1, 1), "tile_px": 240},
        {"compression": "lzw", "aperio": False},
        {"compression": "lzw", "predictor": True, "aperio": False},
        {"compression": "zlib", "aperio": False},
        {"compression": "zlib", "predictor": True, "aperio": False},
        {"compression": None, "aperio": False},
        {"compression": 33005},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_each_compression_has_the_pixels_of_openslide(tmp_path, options):
    # 33005 is Aperio's code of JPEG 2000 in RGB; tifffile writes 34712, which OpenSlide does not support
    jpeg2000 = options.get("compression") == 33005
    path = tmp_path / "slide.svs"
    if jpeg2000:
        options = options | {"compression": "jpeg2000"}
    write_slide(path, section(900, 700), downsamples=(1, 2), **options)
    if jpeg2000:
        set_compression(path, 33005)
    assert_equal_pixels(path)


def test_aperio_jpeg_2000_in_ycbcr_has_the_colours_of_openslide(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(600, 500), downsamples=(1,), compression="jpeg2000")
    set_compression(path, 33003)
    tiff, reference = open_tiff(path), OpenSlideSlide(path)
    for region in random_regions(tiff, 0, 30):
        difference = tiff.read_level(0, *region).astype(int) - reference.read_level(0, *region)
        assert np.abs(difference).max() <= 1  # OpenSlide rounds differently


def test_undecodable_aperio_jpeg_2000_is_opened_with_openslide(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(600, 500), downsamples=(1,), compression="zlib")
    set_compression(path, 33003)
    with pytest.raises(UnsupportedTiffError, match="JPEG 2000"):
        open_tiff(path)
    assert open_slide(path).metadata.reader == "openslide"


def set_compression(path, number):
    with tifffile.TiffFile(path, mode="r+") as file:
        for page in file.pages:
            page.tags["Compression"].overwrite(number)


def test_scattered_reads_decode_fewer_rows_with_the_same_pixels(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(2048, 2048), downsamples=(1,), subsampling=(2, 2))
    whole = open_tiff(path)
    expected = whole.read_level(0, 0, 0, 2048, 2048)
    decoded_rows = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        x, y, side = *rng.integers(0, 1800, 2).tolist(), int(rng.integers(1, 240))
        scattered = open_tiff(path)
        np.testing.assert_array_equal(scattered.read_level(0, x, y, side, side), expected[y : y + side, x : x + side])
        for (_, index), pixels in scattered._cache.items():  # all cached rows are exact, not only the requested ones
            decoded_rows.append(len(pixels))
            top, left = 256 * (index // 8), 256 * (index % 8)
            np.testing.assert_array_equal(pixels, expected[top : top + len(pixels), left : left + 256])
        # a larger region, of which parts are in the cache
        np.testing.assert_array_equal(scattered.read_level(0, x, y, 248, 248), expected[y : y + 248, x : x + 248])
    assert np.mean(decoded_rows) < 230


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100, 239, 255, 256])
@pytest.mark.parametrize("subsampling", [(1, 1), (2, 1), (2, 2)])
def test_partially_decoded_jpeg_has_exact_rows(tmp_path, rows, subsampling):
    path = write_slide(tmp_path / "slide.svs", section(256, 256), downsamples=(1,), subsampling=subsampling)
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        data = path.read_bytes()[page.dataoffsets[0] :][: page.databytecounts[0]]
        whole = decode_jpeg(data, page.jpegtables, "YCBCR")
        part = decode_jpeg(data, page.jpegtables, "YCBCR", rows)
    assert rows <= len(part) <= 256
    assert len(part) < 256 or rows > 220
    np.testing.assert_array_equal(part, whole[: len(part)])


def test_progressive_jpeg_is_decoded_completely(tmp_path):
    Image.fromarray(section(128, 128)).save(tmp_path / "p.jpg", progressive=True)
    assert find_frame_header((tmp_path / "p.jpg").read_bytes()) is None


@needs_real_slides
def test_jpeg_2000_unsupported_by_openslide_shows_the_same_tissue():
    with pytest.raises(openslide.OpenSlideError):
        openslide.OpenSlide(REAL / "CMU-1-Small-Region.jp2.tiff")
    converted = open_slide(REAL / "CMU-1-Small-Region.jp2.tiff")
    original = open_slide(REAL / "CMU-1-Small-Region.svs")
    difference = converted.read(700, 900, 448, 224).astype(int) - original.read(700, 900, 448, 224)
    assert np.abs(difference).mean() < 3


@needs_real_slides
def test_blocks_are_read_at_their_positions():
    # each 8 x 8 block of this image encodes its column and row
    blocks = tifffile.imread(REAL / "XYC-half-mpp.tiff").reshape(64, 8, 64, 8, 3).swapaxes(1, 2)
    assert len(np.unique(blocks.reshape(4096, -1), axis=0)) == 4096
    slide = open_slide(REAL / "XYC-half-mpp.tiff")
    for row, column in np.random.default_rng(0).integers(0, 64, (300, 2)).tolist():
        np.testing.assert_array_equal(slide.read(8 * column, 8 * row, 8, 8), blocks[row, column])


@needs_real_slides
def test_real_ome_tiff_has_the_pixels_of_tifffile():
    whole = tifffile.imread(REAL / "XYC-grid.ome.tiff")
    slide = open_slide(REAL / "XYC-grid.ome.tiff")
    assert slide.metadata.format == "OME-TIFF"
    for x, y in np.random.default_rng(0).integers(0, 400, (50, 2)).tolist():
        np.testing.assert_array_equal(slide.read(x, y, 100, 100), whole[y : y + 100, x : x + 100])


@needs_real_slides
def test_dicom_shows_the_same_tissue_as_svs():
    dicom, svs = open_slide(REAL / "CMU-1-Small-Region-DICOM"), open_slide(REAL / "CMU-1-Small-Region.svs")
    assert (dicom.metadata.format, dicom.metadata.mpp_in_file) == ("DICOM", 0.499)
    difference = dicom.read(700, 900, 448, 224).astype(int) - svs.read(700, 900, 448, 224)
    assert np.abs(difference).mean() < 3


def test_ome_tiff_pyramid_and_scale(tmp_path):
    pixels = section(1000, 800)
    slide = open_slide(write_ome(tmp_path / "slide.ome.tiff", pixels, mpp=0.25))
    assert (slide.metadata.format, slide.metadata.reader, slide.metadata.mpp_in_file) == ("OME-TIFF", "tiff", 0.25)
    assert [level.downsample for level in slide.metadata.levels] == [1, 2, 4]
    np.testing.assert_array_equal(slide.read_level(0, 100, 50, 300, 200), pixels[50:250, 100:400])


def test_objective_of_ome_image_with_several_objectives(tmp_path):
    path = write_ome(tmp_path / "a.ome.tif", section(600, 600))
    with tifffile.TiffFile(path) as file:
        xml = file.ome_metadata
    objectives = "".join(f'<Objective ID="Objective:{i}" NominalMagnification="{n}"/>' for i, n in enumerate((5, 20)))
    page = type("Page", (), {"imagewidth": 600, "imagelength": 600, "samplesperpixel": 3})
    several = xml.replace("<Image ", f'<Instrument ID="Instrument:0">{objectives}</Instrument><Image ', 1)
    assert read_ome_metadata(several, page)[:2] == (0.5, None)
    named = several.replace("<Pixels ", '<ObjectiveSettings ID="Objective:1"/><Pixels ', 1)
    assert read_ome_metadata(named, page)[:2] == (0.5, 20)
    assert read_ome_metadata(named.replace('SizeX="600"', 'SizeX="600.0"'), page)[:2] == (0.5, 20)


def test_ome_tiff_with_several_planes_is_rejected(tmp_path):
    grey = section(300, 300)[..., 0]
    for axes, planes in (("CYX", np.stack([grey] * 3)), ("ZYX", np.stack([grey] * 2))):
        tifffile.imwrite(tmp_path / "a.ome.tif", planes, ome=True, metadata={"axes": axes}, photometric="minisblack")
        with pytest.raises(UnreadableSlideError, match=r"OME planes C = . Z = |OME planes C = ., Z = "):
            open_slide(tmp_path / "a.ome.tif")


def test_scale_of_the_largest_ome_image_is_used(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        for size, mpp in ((200, 1.0), (900, 0.25)):
            metadata = {"axes": "YXS", "PhysicalSizeX": mpp, "PhysicalSizeY": mpp}
            file.write(section(size, size), photometric="rgb", tile=(128, 128), metadata=metadata)
    slide = open_slide(tmp_path / "a.ome.tif")
    assert (slide.metadata.width_px0, slide.metadata.mpp_in_file, slide.metadata.note) == (900, 0.25, "")
    with tifffile.TiffWriter(tmp_path / "b.ome.tif", ome=True) as file:
        for size in (800, 900):
            file.write(section(size, size), photometric="rgb", tile=(128, 128), metadata={"axes": "YXS"})
    assert "2 images" in open_slide(tmp_path / "b.ome.tif").metadata.note


def test_largest_page_is_the_slide(tmp_path):
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(section(100, 80), photometric="rgb", metadata=None)
        file.write(section(256, 256), photometric="rgb", tile=(128, 128), metadata=None)
        file.write(section(1000, 800), photometric="rgb", metadata=None)
    slide = open_slide(tmp_path / "a.tif")
    assert [(level.width_px, level.height_px) for level in slide.metadata.levels] == [(1000, 800)]


@pytest.mark.parametrize(("kind", "expected"), [("unassalpha", 178), ("assocalpha", 228), ("unspecified", 100)])
def test_fourth_channel_follows_extrasamples(tmp_path, kind, expected):
    pixels = np.full((64, 64, 4), 100, np.uint8)
    pixels[..., 3] = 127
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", extrasamples=[kind], tile=(64, 64))
    assert set(np.unique(open_slide(tmp_path / "a.tif").read_level(0, 0, 0, 64, 64))) == {expected}


def test_four_grey_channels_are_rejected(tmp_path):
    tifffile.imwrite(
        tmp_path / "a.tif", np.zeros((64, 64, 4), np.uint8), photometric="minisblack", planarconfig="contig"
    )
    with pytest.raises(UnreadableSlideError, match="4 channels"):
        open_slide(tmp_path / "a.tif")


def test_non_square_pixels_give_a_note(tmp_path):
    tifffile.imwrite(
        tmp_path / "a.tif",
        section(300, 300),
        photometric="rgb",
        tile=(128, 128),
        resolution=(20_000, 40_000),
        resolutionunit="CENTIMETER",
    )
    assert "0.5 um horizontally, 0.25 um vertically" in open_tiff(tmp_path / "a.tif").metadata.note


def test_slide_with_odd_level_sizes(tmp_path):
    path = write_slide(tmp_path / "a.svs", section(901, 1103), downsamples=(1, 4))
    tiff, reference = open_tiff(path), OpenSlideSlide(path)
    for region in random_regions(tiff, 0, 40):
        np.testing.assert_array_equal(tiff.read_level(0, *region), reference.read_level(0, *region))
    # OpenSlide takes level-0 positions and interpolates between the pixels of a level
    difference = tiff.read(100, 200, 400, 100).astype(int) - reference.read(100, 200, 400, 100)
    assert np.abs(difference).mean() < 4


def test_separate_colour_planes(tmp_path):
    pixels = section(500, 300)
    tifffile.imwrite(
        tmp_path / "planar.tif", np.moveaxis(pixels, 2, 0), planarconfig="separate", photometric="rgb", tile=(128, 128)
    )
    slide = open_tiff(tmp_path / "planar.tif")
    np.testing.assert_array_equal(slide.read_level(0, 17, 31, 400, 200), pixels[31:231, 17:417])


def test_grey_strips_and_transparency_in_tiff(tmp_path):
    grey = section(300, 200)[..., 0]
    tifffile.imwrite(tmp_path / "grey.tif", grey, photometric="minisblack", rowsperstrip=16)
    np.testing.assert_array_equal(
        open_slide(tmp_path / "grey.tif").read_level(0, 3, 5, 100, 100), np.repeat(grey[5:105, 3:103, None], 3, axis=2)
    )
    rgba = np.dstack([section(256, 256), np.full((256, 256), 255, np.uint8)])
    rgba[:100, :, 3] = 0
    tifffile.imwrite(tmp_path / "rgba.tif", rgba, photometric="rgb", extrasamples=["unassalpha"], tile=(128, 128))
    read = open_slide(tmp_path / "rgba.tif").read_level(0, 0, 0, 256, 256)
    assert (read[:100] == 255).all()
    np.testing.assert_array_equal(read[100:], rgba[100:, :, :3])


# --- bounds and transparency


def write_scn_with_two_areas(tmp_path):
    first, second = section(1024, 1024, tissue=(0, 0, 1, 1)), section(768, 512, seed=1, tissue=(0, 0, 1, 1))
    return write_scn(tmp_path / "two.scn", [(512, 256, first), (2048, 1024, second)], (4096, 2048)), first


def test_leica_slide_with_bounds_and_gaps(tmp_path):
    path, first = write_scn_with_two_areas(tmp_path)
    slide = open_slide(path)
    assert (slide.metadata.format, slide.metadata.reader) == ("SCN", "openslide")
    assert slide.metadata.bounds == Box(512, 256, 2304, 1280)
    assert (slide.metadata.mpp_in_file, slide.metadata.objective_power) == (0.5, 20)
    gap = slide.read(512 + 1024 + 100, 256, 224, 224)
    assert (gap == 255).all()
    across_the_edge = slide.read_level(0, 512 - 50, 256 - 50, 100, 100)
    assert (across_the_edge[:50] == 255).all()
    assert (across_the_edge[:, :50] == 255).all()
    inside = slide.read_level(0, 612, 356, 200, 200).astype(int)
    assert np.abs(inside - first[100:300, 100:300]).mean() < 4  # JPEG at quality 95
    thumbnail = slide.thumbnail(400)
    assert thumbnail.box == slide.metadata.bounds
    assert thumbnail.pixels.shape == (222, 400, 3)
    assert (thumbnail.pixels[0, 250] == 255).all()


def test_transparent_pixels_get_the_background_colour_of_the_slide(tmp_path):
    path, _ = write_scn_with_two_areas(tmp_path)
    slide = OpenSlideSlide(path)
    object.__setattr__(slide.metadata, "background", (200, 210, 220))
    assert (slide.read(0, 0, 224, 112) == (200, 210, 220)).all()


def test_outside_of_the_slide_is_white_whatever_its_background(tmp_path):
    path, _ = write_scn_with_two_areas(tmp_path)
    slide = OpenSlideSlide(path)
    object.__setattr__(slide.metadata, "background", (200, 210, 220))
    for level, (width, height) in enumerate([(4096, 2048), (1024, 512)]):
        region = slide.read_level(level, width - 30, height - 20, 100, 90)
        assert (region[:20, :30] == (200, 210, 220)).all()
        assert (region[20:] == 255).all()
        assert (region[:, 30:] == 255).all()
        region = slide.read_level(level, -40, -10, 100, 90)
        assert (region[10:, 40:] == (200, 210, 220)).all()
        assert (region[:10] == 255).all()
        assert (region[:, :40] == 255).all()
        assert (slide.read_level(level, width, height + 5, 7, 8) == 255).all()


# --- tiles at the right and bottom edge


def write_any_format(folder, name, pixels):
    """Write a slide without loss, and open it with one of the readers."""
    plain = {"compression": "zlib", "aperio": False}
    if name == "plain image":
        Image.fromarray(pixels).save(folder / "a.png")
        return open_slide(folder / "a.png")
    if name == "OME-TIFF":
        return open_slide(write_ome(folder / "a.ome.tif", pixels, downsamples=(1, 4)))
    if name == "strips":
        tifffile.imwrite(folder / "a.tif", pixels, photometric="rgb", compression="zlib", rowsperstrip=50)
        return open_slide(folder / "a.tif")
    path = write_slide(folder / "a.tif", pixels, downsamples=(1,) if name.endswith("level") else (1, 4), **plain)
    return OpenSlideSlide(path) if name.startswith("OpenSlide") else open_tiff(path)


@pytest.mark.parametrize(
    "name",
    ["TIFF", "TIFF with one level", "OME-TIFF", "strips", "OpenSlide", "OpenSlide with one level", "plain image"],
)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_tiles_past_the_edge_are_white_outside_and_exact_inside(tmp_path, name, factor):
    pixels = np.random.default_rng(0).integers(0, 200, (600, 1000, 3), np.uint8)
    slide = write_any_format(tmp_path, name, pixels)
    side = 224
    for x, y in ((1000 - 40 * factor, 8), (80, 600 - 24 * factor), (1000 - 56 * factor, 600 - 100 * factor)):
        tile = slide.read(x, y, side * factor, side)
        inside = pixels[y : y + side * factor, x : x + side * factor]
        height, width = inside.shape[0] // factor, inside.shape[1] // factor
        assert (tile[height:] == 255).all()
        assert (tile[:, width:] == 255).all()
        means = inside.reshape(height, factor, width, factor, 3).mean(axis=(1, 3))
        np.testing.assert_allclose(tile[:height, :width], means, atol=0.51)


@pytest.mark.parametrize("name", ["TIFF", "OpenSlide", "plain image"])
@pytest.mark.parametrize("side_px0", [423, 487, 170])
def test_tiles_past_the_edge_are_white_outside_if_the_ratio_is_not_an_integer(tmp_path, name, side_px0):
    slide = write_any_format(tmp_path, name, np.full((600, 1000, 3), (120, 60, 120), np.uint8))
    tile = slide.read(900, 500, side_px0, 224).astype(int)
    edge = 100 * 224 / side_px0
    assert (tile[int(edge) + 3 :] == 255).all()
    assert (tile[:, int(edge) + 3 :] == 255).all()
    last = int(edge) - 2
    np.testing.assert_allclose(tile[:last, :last], np.broadcast_to((120, 60, 120), (last, last, 3)), atol=1)


# --- plain images


def test_plain_images(tmp_path):
    pixels = section(400, 300)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    slide = open_slide(tmp_path / "a.png")
    assert (slide.metadata.format, slide.metadata.mpp_in_file) == ("PNG", None)
    np.testing.assert_array_equal(slide.read(10, 20, 128, 128), pixels[20:148, 10:138])
    assert (slide.read_level(0, 390, 290, 20, 20)[10:, 10:] == 255).all()
    rgba = np.dstack([pixels, np.zeros((300, 400), np.uint8)])
    Image.fromarray(rgba, "RGBA").save(tmp_path / "clear.png")
    assert (open_slide(tmp_path / "clear.png").read(0, 0, 200, 100) == 255).all()


def test_16_bit_png_is_rejected(tmp_path):
    Image.fromarray(np.full((50, 50), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(UnreadableSlideError, match="more than 8 bits"):
        open_slide(tmp_path / "deep.png")


def test_padding_after_a_jpeg_is_ignored(tmp_path):
    path = write_slide(tmp_path / "a.svs", section(256, 256), downsamples=(1,))
    with tifffile.TiffFile(path, mode="r+") as file:
        page = file.pages[0]
        data = path.read_bytes()[page.dataoffsets[0] :][: page.databytecounts[0]]
        end = path.stat().st_size
        page.tags["TileOffsets"].overwrite(end)
        page.tags["TileByteCounts"].overwrite(len(data) + 500)
    with path.open("ab") as file:
        file.write(data + bytes(500))
    assert_equal_pixels(path, count=20)
