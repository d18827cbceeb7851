"""What is refused and why, what damage costs, and which files of a folder are slides."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from slide_files import GLASS, REAL, needs_real_slides, section, write_slide

from tapfm.errors import TileReadError, UnreadableSlideError
from tapfm.slides.opening import _read_series_uid as read_series_uid
from tapfm.slides.opening import find_slides, list_slide_files, open_slide
from tapfm.slides.readers.openslide import OpenSlideSlide
from tapfm.slides.readers.tiff import TiffSlide
from tapfm.slides.readers.tiff_structure import UnsupportedTiffError

# --- what cannot be read


def test_a_truncated_slide_is_refused_with_the_number_of_lost_tiles(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(1500, 1200), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        # the directory lies in front of the tiles here, so that the header stays whole
        offsets = file.pages[0].dataoffsets
    assert min(offsets) > 0
    path.write_bytes(path.read_bytes()[: sorted(offsets)[-5]])
    with pytest.raises(UnreadableSlideError, match=r"slide\.svs ends before 5 of its 30 tiles"):
        open_slide(path)


@pytest.mark.parametrize("kept", [0, 3, 7, 100, 400])
def test_a_header_that_breaks_off_is_an_error_of_ours(tmp_path, kept):
    path = write_slide(tmp_path / "slide.svs", section(600, 600))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UnreadableSlideError, match=r"slide\.svs"):
        open_slide(path)


@needs_real_slides
def test_a_broken_slide_is_an_error_that_names_it():
    with pytest.raises(UnreadableSlideError, match=r"broken\.svs is not a slide"):
        open_slide(REAL / "broken.svs")


def test_a_tile_that_cannot_be_decoded_costs_that_tile(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(1024, 1024), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        offset = file.pages[0].dataoffsets[0]
    data = bytearray(path.read_bytes())
    data[offset : offset + 64] = bytes(64)
    path.write_bytes(data)
    ours, theirs = TiffSlide(path), OpenSlideSlide(path)
    for slide in (ours, theirs):
        with pytest.raises(TileReadError, match=r"slide\.svs"):
            slide.read(0, 0, 100, 100)
        # OpenSlide answers nothing more on a handle that failed once: ours is a new one
        assert slide.read(600, 600, 100, 100).std() > 0


def test_a_tile_that_breaks_off_is_not_painted_grey(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(1024, 1024), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        offset, length = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset + length // 2 : offset + length] = bytes(length - length // 2)
    path.write_bytes(data)
    for slide in (TiffSlide(path), OpenSlideSlide(path)):
        with pytest.raises(TileReadError):
            slide.read(0, 0, 256, 256)


def test_grey_tiles_that_break_off_are_refused_too(tmp_path):
    path = write_slide(tmp_path / "a.tif", section(512, 512)[..., 0], downsamples=(1,), aperio=False)
    with tifffile.TiffFile(path) as file:
        offset, length = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset + length // 2 : offset + length] = bytes(length - length // 2)
    path.write_bytes(data)
    with pytest.raises(TileReadError, match="breaks off"):
        TiffSlide(path).read(0, 0, 256, 256)


def test_a_tile_that_is_smaller_than_it_should_be(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(512, 512), downsamples=(1,))
    small = write_slide(tmp_path / "small.svs", section(64, 64), downsamples=(1,), tile_px=64)
    with tifffile.TiffFile(path) as file, tifffile.TiffFile(small) as other:
        offset, length = file.pages[0].dataoffsets[0], file.pages[0].databytecounts[0]
        tile = small.read_bytes()[other.pages[0].dataoffsets[0] :][: other.pages[0].databytecounts[0]]
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = tile[:-2] + bytes(length - len(tile)) + tile[-2:]
    path.write_bytes(data)
    with pytest.raises(TileReadError, match="64 x 64 pixels, not 256 x 256"):
        TiffSlide(path).read(0, 0, 256, 256)


def test_one_bad_tile_does_not_cost_the_picture_of_a_slide_without_a_pyramid(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(2560, 2560, tissue=(0, 0, 1, 1)), downsamples=(1,))
    with tifffile.TiffFile(path) as file:
        offsets = file.pages[0].dataoffsets
    data = bytearray(path.read_bytes())
    data[offsets[33] : offsets[33] + 64] = bytes(64)
    path.write_bytes(data)
    for slide in (TiffSlide(path), OpenSlideSlide(path)):
        picture = slide.thumbnail(160).pixels
        white = (picture == 255).all(axis=2)
        assert white[50:62, 50:62].all()  # the tile at 768, 768, and no more than a little around it
        assert white.sum() <= 24 * 24
    for tile in range(0, 100, 9):
        data[offsets[tile] : offsets[tile] + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(TileReadError):
        TiffSlide(path).thumbnail(160)


def test_what_the_fast_reader_is_not_sure_of_goes_to_openslide(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(600, 600), downsamples=(1,))
    with tifffile.TiffFile(path, mode="r+") as file:
        counts = list(file.pages[0].databytecounts)
        file.pages[0].tags["TileByteCounts"].overwrite([0, *counts[1:]])
    with pytest.raises(UnsupportedTiffError, match="empty tiles"):
        TiffSlide(path)
    assert open_slide(path).metadata.reader == "openslide"


def test_sixteen_bits_are_refused_with_the_reason(tmp_path):
    tifffile.imwrite(tmp_path / "deep.tif", np.zeros((300, 300, 3), np.uint16), photometric="rgb")
    with pytest.raises(UnreadableSlideError, match="uint16 pixels"):
        open_slide(tmp_path / "deep.tif")


def test_a_missing_file_and_an_empty_folder(tmp_path):
    with pytest.raises(UnreadableSlideError, match="no file"):
        open_slide(tmp_path / "absent.svs")
    with pytest.raises(UnreadableSlideError, match=r"without \.dcm files"):
        open_slide(tmp_path)


def test_a_picture_that_is_none(tmp_path):
    (tmp_path / "a.png").write_bytes(b"not a picture")
    with pytest.raises(UnreadableSlideError, match=r"a\.png cannot be decoded"):
        open_slide(tmp_path / "a.png")


# --- finding


def test_slides_of_a_folder(tmp_path, monkeypatch):
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
def test_two_dicom_series_in_a_folder_are_not_taken_for_one(tmp_path):
    for file in (REAL / "CMU-1-Small-Region-DICOM").iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data)
        series = read_series_uid(file)
        assert series is not None
        (tmp_path / f"other-{file.name.upper()}").write_bytes(data.replace(series, series[:-1] + b"7"))
    assert len(list_slide_files(tmp_path)) == 8
    with pytest.raises(UnreadableSlideError, match="2 DICOM series"):
        open_slide(tmp_path)


def test_background_is_the_colour_of_glass_in_generated_slides(tmp_path):
    slide = open_slide(write_slide(tmp_path / "slide.svs", section(600, 600)))
    assert np.abs(slide.read(0, 0, 50, 50).mean(axis=(0, 1)) - GLASS).max() < 2
