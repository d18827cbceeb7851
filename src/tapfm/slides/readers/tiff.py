"""Reader for TIFF, SVS and OME-TIFF: several times faster than OpenSlide, with the same pixels.

tifffile reads levels, offsets of their tiles and metadata; imagecodecs decodes the tiles. Files that might not be
decoded correctly raise `UnsupportedTiffError`; `open_slide` then uses OpenSlide, except for OME-TIFF.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import tifffile

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

_JPEG = 7
_APERIO_JPEG2000_YCBCR = 33003  # such tiles do not state their colour space
_APERIO = "Aperio"  # start of the image description
_REDUCED_RESOLUTION_FLAG = 1  # flag of NewSubfileType: reduced-resolution image
_GREY, _RGB, _YCBCR = 1, 2, 6  # photometric interpretation (grey: 0 is black)
_MAX_SEGMENT_PX = 500_000_000  # 1.5 GB when decoded
_UNSUPPORTED_COMPRESSIONS = {6}  # old-style JPEG, whose tables are elsewhere in the file
_ASPECT_TOLERANCE = 0.02  # of the aspect ratios of two levels, whose sizes are rounded
_MICRONS_PER_UNIT = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6, "Å": 1e-4}


class UnsupportedTiffError(Exception):
    """This reader does not support a file; the message is the reason."""


def open_tiff(path: Path, cache_bytes: int = CACHE_BYTES) -> SegmentedSlide:
    """Open a TIFF, SVS or OME-TIFF."""
    return SegmentedSlide(*_read_tiff_structure(path), cache_bytes)


def _open_tiff(path: Path) -> Any:
    """Open a file with tifffile. Disables all log messages of tifffile below CRITICAL, until the process ends."""
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    return tifffile.TiffFile(path)


def _read_tiff_structure(path: Path) -> tuple[SlideMetadata, tuple[LevelSegments, ...]]:
    """Return the metadata of a TIFF slide and the segments of each level."""
    try:
        with _open_tiff(path) as file:
            pages = [page for page in file.pages if isinstance(page, tifffile.TiffPage)]
            if not pages:
                raise UnreadableSlideError(
                    f"{path.name} is a TIFF file that contains no image.", hint=DAMAGED_FILE_HINT
                )
            largest = max(pages, key=lambda page: page.imagewidth * page.imagelength)
            description = largest.description or pages[0].description or ""
            # Aperio does not flag its pyramid levels; in other files, a page without the flag is a separate image
            unflagged = description.startswith(_APERIO)
            candidates = [page for page in pages if unflagged or page.subfiletype & _REDUCED_RESOLUTION_FLAG]
            levels = _select_pyramid_pages(largest, [*candidates, *(largest.pages or [])])
            ome = file.ome_metadata if file.is_ome else None
            segments = tuple(_read_segments(path, page, largest) for page in levels)
            check_not_truncated(path.name, segments)
            if largest.compression == _APERIO_JPEG2000_YCBCR:
                _check_first_tile(file, segments[0])
            vendor, mpp, objective, note = _read_vendor_metadata(description, ome, largest)
    except (UnsupportedTiffError, UnreadableSlideError):
        raise
    except Exception as error:  # a damaged file can make the parser raise anything
        raise UnreadableSlideError(f"{path.name} is a damaged TIFF file ({error}).", hint=DAMAGED_FILE_HINT) from error
    top = segments[0].level
    metadata = SlideMetadata(
        path=path,
        format={"aperio": "SVS", "ome": "OME-TIFF"}.get(vendor, "TIFF"),
        vendor=vendor,
        reader="tiff",
        levels=tuple(each.level for each in segments),
        mpp_in_file=mpp,
        objective_power=objective,
        bounds=Box(0, 0, top.width_px, top.height_px),
        note=note,
    )
    return metadata, segments


def _select_pyramid_pages(largest: Any, pages: list[Any]) -> list[Any]:
    """Return the largest page and its pyramid levels, without label, macro and thumbnail images."""
    levels = {(largest.imagewidth, largest.imagelength): largest}
    for page in pages:
        if not page.is_tiled or page.imagewidth >= largest.imagewidth:
            continue
        ratio = (largest.imagewidth / page.imagewidth) / (largest.imagelength / page.imagelength)
        if abs(ratio - 1) < max(_ASPECT_TOLERANCE, 2 / min(page.imagewidth, page.imagelength)):
            levels.setdefault((page.imagewidth, page.imagelength), page)
    return sorted(levels.values(), key=lambda page: -page.imagewidth)


def _check_first_tile(file: Any, segments: LevelSegments) -> None:
    """Raise UnsupportedTiffError if the first tile cannot be decoded, for example because of subsampled chroma."""
    file.filehandle.seek(segments.offsets[0])
    try:
        segments.decode(file.filehandle.read(segments.lengths[0]), 0, None)
    except Exception as error:  # each codec raises its own exceptions
        raise UnsupportedTiffError("JPEG 2000 tiles that cannot be decoded") from error


def _read_segments(path: Path, page: Any, largest: Any) -> LevelSegments:
    """Return the segments of a page; raise UnsupportedTiffError if they cannot be decoded."""
    if page.compression in _UNSUPPORTED_COMPRESSIONS:
        raise UnsupportedTiffError(f"compression {int(page.compression)}")
    if page.dtype != np.uint8:
        raise UnsupportedTiffError(f"{page.dtype} pixels")
    if (int(page.photometric), page.samplesperpixel) not in ((_GREY, 1), (_RGB, 3), (_RGB, 4), (_YCBCR, 3)):
        raise UnsupportedTiffError(
            f"{page.samplesperpixel} channels of photometric interpretation {int(page.photometric)}"
        )
    if int(page.photometric) == _YCBCR and page.compression not in (_JPEG, _APERIO_JPEG2000_YCBCR):
        raise UnsupportedTiffError("YCbCr pixels without JPEG compression")
    if not all(page.databytecounts):
        raise UnsupportedTiffError("empty tiles")  # OpenSlide fills them from other levels
    tiled = page.is_tiled
    width_px = page.tilewidth if tiled else page.imagewidth
    height_px = page.tilelength if tiled else min(page.rowsperstrip, page.imagelength)
    per_row, per_column = -(-page.imagewidth // width_px), -(-page.imagelength // height_px)
    planes = page.samplesperpixel if int(page.planarconfig) == 2 else 1
    if not len(page.dataoffsets) == len(page.databytecounts) == per_row * per_column * planes:
        raise UnsupportedTiffError(f"{len(page.dataoffsets)} tiles instead of {per_row * per_column * planes}")
    if width_px * height_px > _MAX_SEGMENT_PX:
        raise UnsupportedTiffError(f"strips of {width_px:,} x {height_px:,} pixels, too large to decode at once")
    return LevelSegments(
        path=path,
        level=Level.from_sizes(page.imagewidth, page.imagelength, largest.imagewidth, largest.imagelength),
        segment_width_px=width_px,
        segment_height_px=height_px,
        segments_per_row=per_row,
        offsets=tuple(page.dataoffsets),
        lengths=tuple(page.databytecounts),
        decode=_make_decoder(page, planes),
        planes=planes,
        fourth_channel=int(page.extrasamples[0]) if page.samplesperpixel == 4 and page.extrasamples else 0,
    )


def _make_decoder(page: Any, planes: int) -> SegmentDecoder:
    """Return the decoder of the segments of a page."""
    decode_segment, tables, compression = page.decode, page.jpegtables, page.compression
    colour_space = _jpeg_colour_space(page) if compression == _JPEG and planes == 1 else None

    def decode(data: bytes, index: int, rows: int | None) -> Pixels:
        if compression == _JPEG:
            check_complete(data)
        if colour_space is not None:
            return decode_jpeg(data, tables, colour_space, rows)
        decoded = decode_segment(data, index, jpegtables=tables)[0]
        if decoded is None:
            raise ValueError("no data")
        pixels: Pixels = decoded[0]
        return ycbcr_to_rgb(pixels) if compression == _APERIO_JPEG2000_YCBCR else pixels

    return decode


def _jpeg_colour_space(page: Any) -> str | None:
    """Return the colour space in which the JPEG tiles of a page are coded."""
    if page.samplesperpixel != 3:
        return None
    # JFIF is always YCbCr, but is often tagged as RGB in a TIFF
    return "YCBCR" if int(page.photometric) == _YCBCR or page.is_jfif else "RGB"


def _read_vendor_metadata(description: str, ome: str | None, page: Any) -> tuple[str, float | None, float | None, str]:
    """Return vendor, microns per pixel, objective power, and a note about unusual metadata."""
    if ome is not None:
        return ("ome", *_read_ome_metadata(ome, page))
    if description.startswith(_APERIO):
        fields = dict(re.findall(r"\|\s*([^|=]+?)\s*=\s*([^|]*?)\s*(?=\||$)", description))
        return "aperio", parse_positive_number(fields.get("MPP")), parse_positive_number(fields.get("AppMag")), ""
    mpp, note = combine_mpp(*map(_resolution_to_mpp, page.resolution, [int(page.resolutionunit)] * 2))
    return "generic-tiff", mpp, None, note


def _resolution_to_mpp(per_unit: float, unit: int) -> float | None:
    """Convert pixels per centimetre or inch to microns per pixel; values of 0 and 1 mean unknown."""
    microns = {2: 25400.0, 3: 10000.0}.get(unit)
    return microns / per_unit if microns is not None and per_unit > 1 else None


def _read_ome_metadata(xml: str, page: Any) -> tuple[float | None, float | None, str]:
    """Return microns per pixel, objective power and a note from the OME-XML of the image in `page`.

    Raises UnsupportedTiffError if the image has several planes.
    """
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return None, None, ""
    images = [image for image in root.findall(".//{*}Image") if image.find("{*}Pixels") is not None]
    matching = [image for image in images if _ome_image_size(image) == (page.imagewidth, page.imagelength)]
    if not matching and len(images) != 1:
        return None, None, ""
    image = matching[0] if matching else images[0]
    pixels = image.find("{*}Pixels")
    assert pixels is not None
    planes = {axis: int(pixels.get(f"Size{axis}", "1")) for axis in "CZT"}
    if planes["Z"] > 1 or planes["T"] > 1 or planes["C"] > page.samplesperpixel:
        raise UnsupportedTiffError("OME planes " + ", ".join(f"{axis} = {count}" for axis, count in planes.items()))
    sizes = [
        size * unit
        for axis in "XY"
        if (size := parse_positive_number(pixels.get(f"PhysicalSize{axis}"))) is not None
        and (unit := _MICRONS_PER_UNIT.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))) is not None
    ]
    mpp, note = combine_mpp(sizes[0], sizes[-1]) if sizes else (None, "")
    similar = [each for each in images if 2 * math.prod(_ome_image_size(each)) > math.prod(_ome_image_size(image))]
    if len(similar) > 1:
        note = f"the file contains {len(similar)} images of similar size; only the largest is read"
    return mpp, _read_ome_objective(root, image), note


def _read_ome_objective(root: ElementTree.Element, image: ElementTree.Element) -> float | None:
    """Return the magnification of the objective of an OME image; None if it is not defined."""
    objectives = root.findall(".//{*}Objective")
    settings = image.find("{*}ObjectiveSettings")
    if settings is not None:
        objectives = [each for each in objectives if each.get("ID") == settings.get("ID")]
    return parse_positive_number(objectives[0].get("NominalMagnification")) if len(objectives) == 1 else None


def _ome_image_size(image: ElementTree.Element) -> tuple[int, int]:
    pixels = image.find("{*}Pixels")
    assert pixels is not None
    return int(float(pixels.get("SizeX", "0"))), int(float(pixels.get("SizeY", "0")))


def is_tiff(path: Path) -> bool:
    """Return whether a file starts like a TIFF or BigTIFF, in either byte order."""
    with path.open("rb") as file:
        return file.read(4) in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def has_ome_metadata(path: Path) -> bool:
    """Return whether a TIFF contains OME-XML."""
    try:
        with _open_tiff(path) as file:
            return bool(file.is_ome)
    except Exception:  # a damaged file: read_tiff_structure raises the error
        return False
