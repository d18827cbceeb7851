"""The structure of a TIFF, SVS or OME-TIFF: levels, where their tiles lie in the file, resolution; without any pixel.

tifffile reads it. What `TiffSlide` may not decode correctly is refused here (`UnsupportedTiffError`): then OpenSlide
opens the file.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import tifffile

from tapfm.errors import UnreadableSlideError
from tapfm.slides.readers.numbers import one_mpp, positive_number
from tapfm.slides.slide import COPY_AGAIN, Box, Level, SlideFacts

JPEG = 7
APERIO_JPEG2000_YCBCR = 33003
_APERIO = "Aperio"  # how its descriptions begin
_REDUCED = 1  # TIFF's mark of a smaller copy
_GREY, _RGB, _YCBCR = 1, 2, 6  # TIFF's numbers for what a page's channels mean (grey: 0 is black)
_LARGEST_SEGMENT_PX = 500_000_000  # 1.5 GB decoded at once; a file of such strips belongs into a pyramid
# TIFF's own numbers: old-style JPEG needs tables from elsewhere in the file
_NOT_DECODED = {6}
_ASPECT_TOLERANCE = 0.02  # between the levels of a pyramid; sizes are rounded
_MICRONS = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6, "Å": 1e-4}


class UnsupportedTiffError(Exception):
    """A TIFF that this reader leaves to OpenSlide, with the reason."""


@dataclass(frozen=True)
class LevelSegments:
    """The tiles (or strips) of one level: where each lies in the file and how it is decoded."""

    level: Level
    width_px: int
    height_px: int
    across: int
    planes: int  # 3 where red, green and blue are kept apart
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    compression: int
    fourth_channel: int
    jpeg_colours: str | None  # colour space of plain JPEG tiles; None for all others
    tables: bytes | None
    decode: Any  # tifffile's decoder of this page

    @property
    def per_plane(self) -> int:
        """Segments of one colour plane."""
        return len(self.offsets) // self.planes


def _open_tiff(path: Path) -> Any:
    """Open a file with tifffile; what it would log of odd metadata is for its developers."""
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    return tifffile.TiffFile(path)


def read_structure(path: Path) -> tuple[SlideFacts, tuple[LevelSegments, ...]]:
    """Read the metadata of the file, without any pixel."""
    try:
        with _open_tiff(path) as file:
            pages = [page for page in file.pages if isinstance(page, tifffile.TiffPage)]
            if not pages:
                raise UnreadableSlideError(f"{path.name} is a TIFF file without an image.", hint=COPY_AGAIN)
            first = max(pages, key=lambda page: page.imagewidth * page.imagelength)
            description = first.description or pages[0].description or ""
            # Aperio does not mark the smaller copies of its picture; elsewhere an unmarked page is another picture
            unmarked = description.startswith(_APERIO)
            copies = [page for page in pages if unmarked or page.subfiletype & _REDUCED]
            levels = _pyramid(first, [*copies, *(first.pages or [])])
            ome = file.ome_metadata if file.is_ome else None
            segments = tuple(_segments_of(page, first) for page in levels)
            vendor, mpp, objective, note = _metadata(description, ome, first)
    except (UnsupportedTiffError, UnreadableSlideError):
        raise
    except Exception as error:  # whatever a damaged file makes the parser raise
        raise UnreadableSlideError(f"{path.name} is a damaged TIFF file ({error}).", hint=COPY_AGAIN) from error
    size_bytes = path.stat().st_size
    ends = [o + n > size_bytes for s in segments for o, n in zip(s.offsets, s.lengths, strict=True)]
    if any(ends):
        raise UnreadableSlideError(
            f"{path.name} ends before {sum(ends):,} of its {len(ends):,} tiles: it was not copied whole.",
            hint=COPY_AGAIN,
        )
    top = segments[0].level
    facts = SlideFacts(
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
    return facts, segments


def _pyramid(first: Any, pages: list[Any]) -> list[Any]:
    """Pick the pages that show the same picture as the first one, smaller; the rest are label, macro, thumbnail."""
    levels = {(first.imagewidth, first.imagelength): first}
    for page in pages:
        if not page.is_tiled or page.imagewidth >= first.imagewidth:
            continue
        ratio = (first.imagewidth / page.imagewidth) / (first.imagelength / page.imagelength)
        if abs(ratio - 1) < max(_ASPECT_TOLERANCE, 2 / min(page.imagewidth, page.imagelength)):
            levels.setdefault((page.imagewidth, page.imagelength), page)
    return sorted(levels.values(), key=lambda page: -page.imagewidth)


def _segments_of(page: Any, first: Any) -> LevelSegments:
    """Take what decoding needs out of a page, or refuse it."""
    if page.compression in _NOT_DECODED:
        raise UnsupportedTiffError(f"compression {int(page.compression)}")
    if page.dtype != np.uint8:
        raise UnsupportedTiffError(f"{page.dtype} pixels")
    if (int(page.photometric), page.samplesperpixel) not in ((_GREY, 1), (_RGB, 3), (_RGB, 4), (_YCBCR, 3)):
        raise UnsupportedTiffError(
            f"{page.samplesperpixel} channels of photometric interpretation {int(page.photometric)}"
        )
    if int(page.photometric) == _YCBCR and page.compression not in (JPEG, APERIO_JPEG2000_YCBCR):
        raise UnsupportedTiffError("YCbCr pixels outside JPEG")
    if not all(page.databytecounts):
        raise UnsupportedTiffError("empty tiles")  # OpenSlide fills these from other levels
    tiled = page.is_tiled
    width_px = page.tilewidth if tiled else page.imagewidth
    height_px = page.tilelength if tiled else min(page.rowsperstrip, page.imagelength)
    across, down = -(-page.imagewidth // width_px), -(-page.imagelength // height_px)
    planes = page.samplesperpixel if int(page.planarconfig) == 2 else 1
    if not len(page.dataoffsets) == len(page.databytecounts) == across * down * planes:
        raise UnsupportedTiffError(f"{len(page.dataoffsets)} tiles where {across * down * planes} are needed")
    if width_px * height_px > _LARGEST_SEGMENT_PX:
        raise UnsupportedTiffError(f"strips of {width_px:,} x {height_px:,} pixels, too large to decode at once")
    return LevelSegments(
        level=Level.of(page.imagewidth, page.imagelength, first.imagewidth, first.imagelength),
        width_px=width_px,
        height_px=height_px,
        across=across,
        planes=planes,
        offsets=tuple(page.dataoffsets),
        lengths=tuple(page.databytecounts),
        compression=int(page.compression),
        fourth_channel=int(page.extrasamples[0]) if page.samplesperpixel == 4 and page.extrasamples else 0,
        jpeg_colours=_jpeg_colours(page) if page.compression == JPEG and planes == 1 else None,
        tables=page.jpegtables,
        decode=page.decode,
    )


def _jpeg_colours(page: Any) -> str | None:
    """Say in which colours a page's JPEG tiles are coded."""
    if page.samplesperpixel != 3:
        return None
    # JFIF is always YCbCr; writers that put it into TIFF often tag it as the RGB it decodes to
    return "YCBCR" if int(page.photometric) == _YCBCR or page.is_jfif else "RGB"


def _metadata(description: str, ome: str | None, page: Any) -> tuple[str, float | None, float | None, str]:
    """Read vendor, microns per pixel, objective power, and a note of what is odd, from what the file carries."""
    if ome is not None:
        return ("ome", *_ome_metadata(ome, page))
    if description.startswith(_APERIO):
        fields = dict(re.findall(r"\|\s*([^|=]+?)\s*=\s*([^|]*?)\s*(?=\||$)", description))
        return "aperio", positive_number(fields.get("MPP")), positive_number(fields.get("AppMag")), ""
    mpp, note = one_mpp(*map(_mpp_of_resolution, page.resolution, [int(page.resolutionunit)] * 2))
    return "generic-tiff", mpp, None, note


def _mpp_of_resolution(per_unit: float, unit: int) -> float | None:
    """Turn TIFF's pixels per centimetre or inch into microns per pixel; 0 and 1 are what writers put for unknown."""
    microns = {2: 25400.0, 3: 10000.0}.get(unit)
    return microns / per_unit if microns is not None and per_unit > 1 else None


def _ome_metadata(xml: str, page: Any) -> tuple[float | None, float | None, str]:
    """Read PhysicalSize and NominalMagnification of the image that `page` is, and refuse what is not one RGB plane."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return None, None, ""
    images = [image for image in root.findall(".//{*}Image") if image.find("{*}Pixels") is not None]
    ours = [image for image in images if _size_of(image) == (page.imagewidth, page.imagelength)]
    if not ours and len(images) != 1:
        return None, None, ""
    image = ours[0] if ours else images[0]
    pixels = image.find("{*}Pixels")
    assert pixels is not None
    planes = {axis: int(pixels.get(f"Size{axis}", "1")) for axis in "CZT"}
    if planes["Z"] > 1 or planes["T"] > 1 or planes["C"] > page.samplesperpixel:
        raise UnsupportedTiffError("OME planes " + ", ".join(f"{axis} = {count}" for axis, count in planes.items()))
    sizes = [
        size * unit
        for axis in "XY"
        if (size := positive_number(pixels.get(f"PhysicalSize{axis}"))) is not None
        and (unit := _MICRONS.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))) is not None
    ]
    mpp, note = one_mpp(sizes[0], sizes[-1]) if sizes else (None, "")
    similar = [each for each in images if 2 * math.prod(_size_of(each)) > math.prod(_size_of(image))]
    if len(similar) > 1:
        note = f"the file has {len(similar)} large images; the first of the largest is read"
    return mpp, _ome_objective(root, image), note


def _ome_objective(root: ElementTree.Element, image: ElementTree.Element) -> float | None:
    """Read the magnification of the objective that an OME image was taken with; None where that is not said."""
    objectives = root.findall(".//{*}Objective")
    settings = image.find("{*}ObjectiveSettings")
    if settings is not None:
        objectives = [each for each in objectives if each.get("ID") == settings.get("ID")]
    return positive_number(objectives[0].get("NominalMagnification")) if len(objectives) == 1 else None


def _size_of(image: ElementTree.Element) -> tuple[int, int]:
    """Read the size of an OME image."""
    pixels = image.find("{*}Pixels")
    assert pixels is not None
    return int(float(pixels.get("SizeX", "0"))), int(float(pixels.get("SizeY", "0")))


def is_tiff(path: Path) -> bool:
    """Look at the first bytes: classic TIFF or BigTIFF, either byte order."""
    with path.open("rb") as file:
        return file.read(4) in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def has_ome_metadata(path: Path) -> bool:
    """Say whether a TIFF carries OME-XML."""
    try:
        with _open_tiff(path) as file:
            return bool(file.is_ome)
    except Exception:  # a damaged file: reading its structure will say how
        return False
