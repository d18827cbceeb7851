"""Opening of slides: unsupported and damaged files, and slides of a folder."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from slide_files import GLASS, REAL, needs_real_slides, section, write_slide

from tapfm.errors import TileReadError, UnreadableSlideError
from tapfm.slides.opening import _read_series_uid as read_series_uid
from tapfm.slides.opening import find_slides, list_slide_files, open_slide
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import UnsupportedTiffError, open_tiff

# --- unsupported and damaged files


def test_truncated_slide_is_an_error_with_the_number_of_missing_tiles(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(1500, 1200), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        # the directory is before the tiles here, so the header stays intact
        offsets = file.pages[0].dataoffsets
    assert min(offsets) > 0
    path.write_bytes(path.read_bytes()[: sorted(offsets)[-5]])
    with pytest.raises(UnreadableSlideError, match=r"slide\.svs is truncated: 5 of 30 tiles"):
        open_slide(path)


@pytest.mark.parametrize("length", [0, 3, 7, 100, 400])
def test_truncated_header_is_an_unreadable_slide_error(tmp_path, length):
    path = write_slide(tmp_path / "slide.svs", section(600, 600))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UnreadableSlideError, match=r"slide\.svs"):
        open_slide(path)


@needs_real_slides
def test_broken_slide_is_an_error_with_the_file_name():
    with pytest.raises(UnreadableSlideError, match=r"broken\.svs is not in a slide format"):
        open_slide(REAL / "broken.svs")


def test_undecodable_tile_does_not_affect_other_tiles(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(1024, 1024), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[0]
    data = bytearray(path.read_bytes())
    data[offset : offset + 64] = bytes(64)
    path.write_bytes(data)
    for slide in (open_tiff(path), OpenSlideSlide(path)):
        with pytest.raises(TileReadError, match=r"slide\.svs"):
            slide.read(0, 0, 100, 100)
        # an OpenSlide handle that failed once keeps failing, so the reader must have opened a new one
        assert slide.read(600, 600, 100, 100).std() > 0


def test_truncated_jpeg_tile_is_an_error(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(1024, 1024), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        offset, length = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset + length // 2 : offset + length] = bytes(length - length // 2)
    path.write_bytes(data)
    for slide in (open_tiff(path), OpenSlideSlide(path)):
        with pytest.raises(TileReadError):
            slide.read(0, 0, 256, 256)


def test_truncated_greyscale_jpeg_tile_is_an_error(tmp_path):
    path = write_slide(tmp_path / "a.tif", section(512, 512)[..., 0], downsamples=(1,), aperio=False)
    with tifffile.TiffFile(path) as file:
        offset, length = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset + length // 2 : offset + length] = bytes(length - length // 2)
    path.write_bytes(data)
    with pytest.raises(TileReadError, match="truncated"):
        open_tiff(path).read(0, 0, 256, 256)


def test_tile_of_wrong_size_is_an_error(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(512, 512), downsamples=(1,))
    small = write_slide(tmp_path / "small.svs", section(64, 64), downsamples=(1,), tile_px=64)
    with tifffile.TiffFile(path) as file, tifffile.TiffFile(small) as other:
        offset, length = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
        tile = small.read_bytes()[other.pages[0].dataoffsets[0] :][: other.pages[0].databytecounts[0]]
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = tile[:-2] + bytes(length - len(tile)) + tile[-2:]
    path.write_bytes(data)
    with pytest.raises(TileReadError, match="expected 256 x 256 pixels, got 64 x 64"):
        open_tiff(path).read(0, 0, 256, 256)


def test_thumbnail_with_one_damaged_tile(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(2560, 2560, tissue=(0, 0, 1, 1)), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        offsets = file.pages[0].dataoffsets
    data = bytearray(path.read_bytes())
    data[offsets[33] : offsets[33] + 64] = bytes(64)
    path.write_bytes(data)
    for slide in (open_tiff(path), OpenSlideSlide(path)):
        thumbnail = slide.thumbnail(160).pixels
        white = (thumbnail == 255).all(axis=2)
        assert white[50:62, 50:62].all()  # the tile at 768, 768, and little around it
        assert white.sum() <= 24 * 24
    for tile in range(0, 100, 9):
        data[offsets[tile] : offsets[tile] + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(TileReadError):
        open_tiff(path).thumbnail(160)


def test_unsupported_tiff_is_opened_with_openslide(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(600, 600), downsamples=(1,))
    with tifffile.TiffFile(path, mode="r+") as file:
        counts = list(file.pages[0].databytecounts)
        file.pages[0].tags["TileByteCounts"].overwrite([0, *counts[1:]])
    with pytest.raises(UnsupportedTiffError, match="empty tiles"):
        open_tiff(path)
    assert open_slide(path).metadata.reader == "openslide"


def test_16_bit_tiff_is_rejected(tmp_path):
    tifffile.imwrite(tmp_path / "deep.tif", np.zeros((300, 300, 3), np.uint16), photometric="rgb")
    with pytest.raises(UnreadableSlideError, match="uint16 pixels"):
        open_slide(tmp_path / "deep.tif")


def test_missing_file_and_empty_folder_are_errors(tmp_path):
    with pytest.raises(UnreadableSlideError, match="does not exist"):
        open_slide(tmp_path / "absent.svs")
    with pytest.raises(UnreadableSlideError, match=r"contains no \.dcm files"):
        open_slide(tmp_path)


def test_invalid_image_file_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"not an image")
    with pytest.raises(UnreadableSlideError, match=r"a\.png cannot be decoded"):
        open_slide(tmp_path / "a.png")


# --- finding slides


def test_find_slides(tmp_path, monkeypatch):
    parts = ("c.d.mrxs", "c.d/Data0001.jpg", "c.d/deep/Data0002.dat", "d.vms", "d-0-0.jpg", "dcm/1.dcm", "dcm/2.dcm")
    for name in (
        "b/x.svs",
        "a.ndpi",
        "c.mrxs",
        "c.1/y.svs",
        ".trash/z.svs",
        "tiles/.tapfm-output",
        "tiles/overlays/o.png",
        *parts,
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("notes.txt", ".hidden.svs", "table.csv"):
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in find_slides(tmp_path)]
    assert found == ["a.ndpi", "b/x.svs", "c.1/y.svs", "c.d.mrxs", "c.mrxs", "d.vms", "dcm"]
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in find_slides(Path())] == found
    names = {str(path): [each.name for each in list_slide_files(path)] for path in find_slides(Path())}
    assert names["c.d.mrxs"] == ["c.d.mrxs", "Data0001.jpg", "Data0002.dat"]
    assert names["d.vms"] == ["d-0-0.jpg", "d.vms"]
    assert names["dcm"] == ["1.dcm", "2.dcm"]
    assert names["a.ndpi"] == ["a.ndpi"]


@needs_real_slides
def test_two_dicom_series_in_a_folder_are_rejected(tmp_path):
    for file in (REAL / "CMU-1-Small-Region-DICOM").iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data)
        series = read_series_uid(file)
        assert series is not None
        (tmp_path / f"other-{file.name.upper()}").write_bytes(data.replace(series, series[:-1] + b"7"))
    assert len(list_slide_files(tmp_path)) == 8
    with pytest.raises(UnreadableSlideError, match="2 DICOM series"):
        open_slide(tmp_path)


def test_generated_slides_have_the_glass_colour_as_background(tmp_path):
    slide = open_slide(write_slide(tmp_path / "slide.svs", section(600, 600)))
    assert np.abs(slide.read(0, 0, 50, 50).mean(axis=(0, 1)) - GLASS).max() < 2
