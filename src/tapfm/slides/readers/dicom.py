"""Reader for DICOM slides with the photometric interpretation YBR_FULL, which OpenSlide refuses.

pydicom reads the headers, imagecodecs decodes the frames. Each level is one file with all frames of the level, row by
row (TILED_FULL), as baseline JPEG or uncompressed. Other files raise `UnsupportedDicomError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pydicom
from pydicom.encaps import parse_basic_offsets, parse_fragments
from pydicom.errors import InvalidDicomError
from pydicom.uid import (
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    VLWholeSlideMicroscopyImageStorage,
)

from tapfm.errors import UnreadableSlideError
from tapfm.slides.readers.jpeg import check_complete, decode_jpeg
from tapfm.slides.readers.parsing import combine_mpp, parse_positive_number
from tapfm.slides.readers.segments import (
    LevelSegments,
    SegmentDecoder,
    SegmentedSlide,
    check_not_truncated,
    ycbcr_to_rgb,
)
from tapfm.slides.slide import CACHE_BYTES, DAMAGED_FILE_HINT, Box, Level, Pixels, SlideMetadata

_TAGS = (
    *("SOPClassUID", "SeriesInstanceUID", "ImageType", "DimensionOrganizationType"),
    *("TotalPixelMatrixColumns", "TotalPixelMatrixRows"),
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "BitsAllocated", "PlanarConfiguration"),
    *("PhotometricInterpretation", "ExtendedOffsetTable"),
    *("SharedFunctionalGroupsSequence", "OpticalPathSequence"),
)
_UNCOMPRESSED = (ImplicitVRLittleEndian, ExplicitVRLittleEndian)
_JPEG_COLOUR_SPACES = {"YBR_FULL": "YCBCR", "YBR_FULL_422": "YCBCR", "RGB": "RGB"}
_ITEM = struct.Struct("<HHL")  # group, element and length before each compressed frame
_ITEM_TAG = (0xFFFE, 0xE000)


class UnsupportedDicomError(Exception):
    """This reader does not support a slide with the photometric interpretation YBR_FULL; the message is the reason."""


@dataclass(frozen=True)
class _Image:
    """The header of a DICOM file, and the offset of its pixel data element."""

    path: Path
    header: Any  # pydicom.Dataset
    pixel_data_offset: int

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return int(self.header.TotalPixelMatrixColumns), int(self.header.TotalPixelMatrixRows)


def open_ybr_dicom(path: Path, files: Sequence[Path], cache_bytes: int = CACHE_BYTES) -> SegmentedSlide | None:
    """Open the slide of the file at `path`, or return None if no image of the slide is YBR_FULL.

    files: the files in the same folder, which may also belong to other slides.
    """
    try:
        images = [image for file in files if (image := _read_image(file)) is not None]
        series = next((each.header.SeriesInstanceUID for each in images if each.path == path), None)
        images = [each for each in images if each.header.SeriesInstanceUID == series]
        if not any(each.header.PhotometricInterpretation == "YBR_FULL" for each in images):
            return None
        volumes = [each for each in images if "VOLUME" in each.header.ImageType]  # not label, overview or thumbnail
        volumes.sort(key=lambda each: each.size_px, reverse=True)
        if not volumes:
            raise UnsupportedDicomError("it has no image of the type VOLUME")
        if len({each.size_px for each in volumes}) < len(volumes):
            raise UnsupportedDicomError("it has several images of the same size")
        segments = tuple(_read_segments(each, volumes[0].size_px) for each in volumes)
        metadata = _read_metadata(path, volumes[0].header, segments)
    except UnsupportedDicomError:
        raise
    except Exception as error:  # a damaged file can make pydicom raise anything
        raise UnreadableSlideError(
            f"{path.name} is a damaged DICOM slide ({error}).", hint=DAMAGED_FILE_HINT
        ) from error
    check_not_truncated(path.name, segments)
    return SegmentedSlide(metadata, segments, cache_bytes)


def _read_image(path: Path) -> _Image | None:
    """Read the header of a file; None if it is not an image of a slide."""
    with path.open("rb") as file:
        try:
            header = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=list(_TAGS))
        except InvalidDicomError:
            return None
        is_slide = header.get("SOPClassUID") == VLWholeSlideMicroscopyImageStorage
        return _Image(path, header, file.tell()) if is_slide else None


def _read_metadata(path: Path, header: Any, segments: tuple[LevelSegments, ...]) -> SlideMetadata:
    """Return the metadata of a slide from the header of its largest level."""
    spacing_mm: Any = None
    for groups in header.get("SharedFunctionalGroupsSequence") or ():
        for measures in groups.get("PixelMeasuresSequence") or ():
            spacing_mm = measures.get("PixelSpacing")
    mpp_y, mpp_x = (1000 * float(each) or None for each in spacing_mm) if spacing_mm else (None, None)
    mpp, note = combine_mpp(mpp_x, mpp_y)
    optical_paths = header.get("OpticalPathSequence") or ()
    power = optical_paths[0].get("ObjectiveLensPower") if optical_paths else None
    top = segments[0].level
    return SlideMetadata(
        path=path,
        format="DICOM",
        vendor="dicom",
        reader="pydicom",
        levels=tuple(each.level for each in segments),
        mpp_in_file=mpp,
        objective_power=None if power is None else parse_positive_number(str(power)),
        bounds=Box(0, 0, top.width_px, top.height_px),
        note=note,
    )


def _read_segments(image: _Image, size_px0: tuple[int, int]) -> LevelSegments:
    """Return the segments of a level; raise UnsupportedDicomError if they cannot be decoded."""
    header, (width_px, height_px) = image.header, image.size_px
    syntax, photometric = header.file_meta.TransferSyntaxUID, str(header.PhotometricInterpretation)
    jpeg = syntax == JPEGBaseline8Bit
    if not jpeg and syntax not in _UNCOMPRESSED:
        raise UnsupportedDicomError(f"its transfer syntax is {syntax.name}")
    if photometric not in (_JPEG_COLOUR_SPACES if jpeg else ("YBR_FULL", "RGB")):
        raise UnsupportedDicomError(f"one of its levels has the photometric interpretation {photometric}")
    if (header.SamplesPerPixel, header.BitsAllocated, header.get("PlanarConfiguration", 0)) != (3, 8, 0):
        raise UnsupportedDicomError("it does not have three interleaved channels of 8 bits")
    rows, columns = int(header.Rows), int(header.Columns)
    per_row, per_column = -(-width_px // columns), -(-height_px // rows)
    frames = int(header.get("NumberOfFrames", 1))
    if header.get("DimensionOrganizationType") != "TILED_FULL" or frames != per_row * per_column:
        raise UnsupportedDicomError("its frames are not a single complete grid of tiles (TILED_FULL)")
    with image.path.open("rb") as file:
        if jpeg:
            offsets, lengths = _find_jpeg_frames(file, image, frames)
        else:
            first = image.pixel_data_offset + (8 if syntax == ImplicitVRLittleEndian else 12)
            frame_bytes = rows * columns * 3
            offsets, lengths = [first + i * frame_bytes for i in range(frames)], [frame_bytes] * frames
    return LevelSegments(
        path=image.path,
        level=Level.from_sizes(width_px, height_px, *size_px0),
        segment_width_px=columns,
        segment_height_px=rows,
        segments_per_row=per_row,
        offsets=tuple(offsets),
        lengths=tuple(lengths),
        decode=_make_jpeg_decoder(_JPEG_COLOUR_SPACES[photometric])
        if jpeg
        else _make_array_decoder(rows, columns, ycbcr=photometric == "YBR_FULL"),
    )


def _find_jpeg_frames(file: BinaryIO, image: _Image, frames: int) -> tuple[list[int], list[int]]:
    """Return offsets and lengths of the compressed frames, including the item header of each."""
    header = image.header
    file.seek(image.pixel_data_offset + 12)
    starts = parse_basic_offsets(file)
    first = file.tell()  # offsets in the tables are relative to it
    if "ExtendedOffsetTable" in header:
        starts = np.frombuffer(header.ExtendedOffsetTable, "<u8").tolist()
    elif not starts:
        starts = [each - first for each in parse_fragments(file)[1]]
    if len(starts) != frames:
        raise UnsupportedDicomError(f"it has {len(starts):,} fragments for {frames:,} frames")
    file.seek(first + starts[-1])
    item = file.read(_ITEM.size)
    last_bytes = _ITEM.unpack(item)[2] if len(item) == _ITEM.size else 0  # 0 if the file is truncated
    ends = [*starts[1:], starts[-1] + _ITEM.size + last_bytes]
    return [first + start for start in starts], [end - start for start, end in zip(starts, ends, strict=True)]


def _make_jpeg_decoder(colour_space: str) -> SegmentDecoder:
    def decode(data: bytes, _: int, rows: int | None) -> Pixels:
        group, element, length = _ITEM.unpack_from(data)
        if (group, element) != _ITEM_TAG or length != len(data) - _ITEM.size:
            raise ValueError("the frame has several fragments, or its offset is wrong")
        check_complete(data)
        return decode_jpeg(data[_ITEM.size :], None, colour_space, rows)

    return decode


def _make_array_decoder(rows: int, columns: int, *, ycbcr: bool) -> SegmentDecoder:
    def decode(data: bytes, _: int, __: int | None) -> Pixels:
        pixels = np.frombuffer(data, np.uint8).reshape(rows, columns, 3)
        return ycbcr_to_rgb(pixels) if ycbcr else pixels

    return decode
