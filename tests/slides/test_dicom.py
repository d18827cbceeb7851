"""DICOM slides with the photometric interpretation YBR_FULL, which OpenSlide refuses."""

import shutil
from contextlib import closing

import numpy as np
import openslide
import pydicom
import pytest
from cohort_files import read_rows
from command_line import tapfm
from dicom_files import edit_dicom, write_dicom
from slide_files import REAL, needs_real_slides, section

from tapfm.errors import TileReadError, UnreadableSlideError
from tapfm.slides.opening import open_slide

PIXELS = section(900, 700, tissue=(0, 0, 1, 1))


def test_openslide_refuses_ybr_full(tmp_path):
    write_dicom(tmp_path, PIXELS)
    with pytest.raises(openslide.OpenSlideError, match="YBR_FULL"):
        openslide.OpenSlide(tmp_path / "0.dcm")


@pytest.mark.parametrize("subsampling", ["444", "422", "420"])
@pytest.mark.parametrize("offset_table", ["basic", "extended", None])
def test_jpeg_has_the_pixels_and_metadata_of_openslide(tmp_path, subsampling, offset_table):
    options = {"subsampling": subsampling, "offset_table": offset_table}
    ours = open_slide(write_dicom(tmp_path / "refused", PIXELS, **options))
    # the same JPEG frames under a name of the colour space that OpenSlide supports
    reference = open_slide(write_dicom(tmp_path / "supported", PIXELS, photometric="YBR_FULL_422", **options))
    assert (ours.metadata.reader, reference.metadata.reader) == ("pydicom", "openslide")
    for field in ("format", "vendor", "levels", "mpp_in_file", "objective_power", "bounds", "note"):
        assert getattr(ours.metadata, field) == getattr(reference.metadata, field), field
    for level, (width_px, height_px) in enumerate([(900, 700), (225, 175)]):
        area = (level, -20, -30, width_px + 50, height_px + 60)
        np.testing.assert_array_equal(ours.read_level(*area), reference.read_level(*area))
    rng = np.random.default_rng(0)
    for x, y in rng.integers(-50, 850, (50, 2)).tolist():
        np.testing.assert_array_equal(ours.read_level(0, x, y, 97, 111), reference.read_level(0, x, y, 97, 111))


@pytest.mark.parametrize("syntax", [pydicom.uid.ExplicitVRLittleEndian, pydicom.uid.ImplicitVRLittleEndian])
def test_uncompressed_pixels_are_those_of_the_image(tmp_path, syntax):
    write_dicom(tmp_path, PIXELS, compression=None)
    for path in tmp_path.iterdir():
        header = pydicom.dcmread(path)
        header.file_meta.TransferSyntaxUID = syntax
        header.save_as(path, implicit_vr=syntax.is_implicit_VR, little_endian=True)
    slide = open_slide(tmp_path)
    assert np.abs(slide.read_level(0, 0, 0, 900, 700).astype(int) - PIXELS).max() <= 1  # rounding of YCbCr
    assert (slide.read_level(0, 890, 690, 20, 20)[10:] == 255).all()


def test_label_and_other_slides_in_the_folder_are_ignored(tmp_path):
    write_dicom(tmp_path / "a", PIXELS)
    write_dicom(tmp_path / "b", PIXELS[:300, :300])
    for path in (tmp_path / "b").iterdir():
        shutil.copy(path, tmp_path / "a" / f"b-{path.name}")
    (tmp_path / "a" / "notes.dcm").write_text("not a DICOM file")
    sizes = {name: open_slide(tmp_path / "a" / name).metadata.levels[0].width_px for name in ("1.dcm", "b-1.dcm")}
    assert sizes == {"1.dcm": 900, "b-1.dcm": 300}


def test_slide_with_a_label_in_ybr_full_and_other_levels_is_readable(tmp_path):
    write_dicom(tmp_path, PIXELS, photometric="YBR_FULL_422")
    edit_dicom(tmp_path / "2.dcm", PhotometricInterpretation="YBR_FULL")
    slide = open_slide(tmp_path)
    assert slide.metadata.reader == "pydicom"
    assert np.abs(slide.read_level(0, 0, 0, 900, 700).astype(int) - PIXELS).mean() < 4


def test_slide_without_pixel_spacing_has_no_scale(tmp_path):
    assert open_slide(write_dicom(tmp_path, PIXELS, mpp=None)).metadata.mpp_in_file is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"transfer_syntax": pydicom.uid.JPEG2000}, "JPEG 2000"),
        ({"DimensionOrganizationType": "TILED_SPARSE"}, "grid of tiles"),
        ({"NumberOfFrames": 90}, "grid of tiles"),  # two focal planes
        ({"PhotometricInterpretation": "YBR_PARTIAL_420"}, "YBR_PARTIAL_420"),
        ({"BitsAllocated": 16}, "8 bits"),
        ({"ImageType": ["ORIGINAL", "PRIMARY", "OVERVIEW", "NONE"]}, "no image of the type VOLUME"),
    ],
)
def test_unsupported_ybr_full_slide_is_an_error_with_a_command_that_converts_it(tmp_path, changes, reason):
    edit_dicom(write_dicom(tmp_path, PIXELS, downsamples=(1,)) / "0.dcm", **changes)
    with pytest.raises(UnreadableSlideError) as error:
        open_slide(tmp_path)
    assert "YBR_FULL" in error.value.message
    assert reason in error.value.message
    assert "bfconvert" in error.value.hint


def test_other_photometric_interpretations_keep_the_error_of_openslide(tmp_path):
    write_dicom(tmp_path, PIXELS)
    for path in tmp_path.iterdir():
        edit_dicom(path, PhotometricInterpretation="YBR_PARTIAL_420")
    with pytest.raises(UnreadableSlideError, match="YBR_PARTIAL_420") as error:
        open_slide(tmp_path)
    assert "YBR_FULL" not in error.value.message


def test_damaged_header_is_an_error(tmp_path):
    write_dicom(tmp_path, PIXELS)
    header = pydicom.dcmread(tmp_path / "1.dcm")
    del header.TotalPixelMatrixColumns
    header.save_as(tmp_path / "1.dcm")
    with pytest.raises(UnreadableSlideError, match=r"0\.dcm is a damaged DICOM slide .*TotalPixelMatrixColumns"):
        open_slide(tmp_path)


def test_two_images_of_the_same_size_are_an_error(tmp_path):
    write_dicom(tmp_path, PIXELS)
    shutil.copy(tmp_path / "0.dcm", tmp_path / "copy.dcm")
    edit_dicom(tmp_path / "copy.dcm", SOPInstanceUID="1.2.3")
    with pytest.raises(UnreadableSlideError, match="same size"):
        open_slide(tmp_path)


def test_frames_in_several_fragments_are_an_error(tmp_path):
    write_dicom(tmp_path, PIXELS, downsamples=(1,))
    header = pydicom.dcmread(tmp_path / "0.dcm")
    frames = list(pydicom.encaps.generate_frames(header.PixelData, number_of_frames=int(header.NumberOfFrames)))
    header.PixelData = pydicom.encaps.encapsulate(frames, fragments_per_frame=2, has_bot=False)
    header.save_as(tmp_path / "0.dcm")
    with pytest.raises(UnreadableSlideError, match="it has 96 fragments for 48 frames"):
        open_slide(tmp_path)
    header.PixelData = pydicom.encaps.encapsulate(frames, fragments_per_frame=2, has_bot=True)
    header.save_as(tmp_path / "0.dcm")
    with pytest.raises(TileReadError, match="several fragments"):  # the offsets alone do not show it
        open_slide(tmp_path).read(0, 0, 100, 100)


def test_truncated_file_and_damaged_frame_are_errors(tmp_path):
    write_dicom(tmp_path, PIXELS, downsamples=(1,))
    data = (tmp_path / "0.dcm").read_bytes()
    (tmp_path / "0.dcm").write_bytes(data[: len(data) - 20_000])
    with pytest.raises(UnreadableSlideError, match=r"0\.dcm is truncated: \d+ of 48 tiles"):
        open_slide(tmp_path)
    frame = data.index(b"\xff\xd8\xff")  # start of the first JPEG
    (tmp_path / "0.dcm").write_bytes(data[:frame] + bytes(64) + data[frame + 64 :])
    slide = open_slide(tmp_path)
    with pytest.raises(TileReadError, match=r"0\.dcm: tile 0"):
        slide.read(0, 0, 100, 100)
    assert slide.read(300, 300, 100, 100).std() > 0


def test_slides_are_tiled_in_worker_processes(tmp_path):
    for name in ("first", "second"):
        write_dicom(tmp_path / "slides" / name, section(1400, 1100))
    result = tapfm("tile", tmp_path / "slides", "--out", tmp_path / "tiles", "--workers", 2)
    assert result.returncode == 0, result.output
    rows = read_rows(tmp_path / "tiles" / "summary.csv")
    assert [row["slide_id"] for row in rows] == ["first", "second"]
    for row in rows:
        assert (row["status"], row["mpp"], row["mpp_source"]) == ("ok", "0.5", "file")
        assert int(row["tiles"]) > 5


@needs_real_slides
@pytest.mark.parametrize("compressed", [True, False])
def test_real_slide_with_the_tag_ybr_full_has_the_same_pixels(tmp_path, compressed):
    original = open_slide(REAL / "CMU-1-Small-Region-DICOM")
    for file in (REAL / "CMU-1-Small-Region-DICOM").iterdir():
        header = pydicom.dcmread(file)
        if not compressed:
            header.decompress(as_rgb=False)
        header.PhotometricInterpretation = "YBR_FULL"
        header.save_as(tmp_path / file.name)
    with closing(open_slide(tmp_path)) as slide:
        assert slide.metadata.reader == "pydicom"
        assert slide.metadata.mpp_in_file == pytest.approx(original.metadata.mpp_in_file)
        assert slide.metadata.levels == original.metadata.levels
        difference = slide.read_level(0, 0, 0, 2220, 2967).astype(int) - original.read_level(0, 0, 0, 2220, 2967)
        assert np.abs(difference).max() <= (0 if compressed else 1)
