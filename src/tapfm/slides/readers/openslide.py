"""Reader for the formats of OpenSlide, such as NDPI, MRXS, DICOM and CZI; fallback for SVS and TIFF."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import openslide
from PIL import Image

from tapfm.errors import TileReadError, UnreadableSlideError
from tapfm.slides.readers.parsing import combine_mpp, parse_positive_number
from tapfm.slides.region_reading import make_thumbnail, read_tile
from tapfm.slides.slide import (
    CACHE_BYTES,
    DAMAGED_FILE_HINT,
    WHITE,
    Box,
    Colour,
    Level,
    Pixels,
    SlideMetadata,
    Thumbnail,
)

_FORMATS = {
    "aperio": "SVS",
    "dicom": "DICOM",
    "generic-tiff": "TIFF",
    "hamamatsu": "NDPI / VMS",
    "leica": "SCN",
    "mirax": "MRXS",
    "philips-tiff": "Philips TIFF",
    "sakura": "SVSLIDE",
    "trestle": "Trestle TIFF",
    "ventana": "BIF",
    "zeiss": "CZI",
}


class OpenSlideSlide:
    """A slide opened with OpenSlide."""

    def __init__(self, path: Path, cache_bytes: int = CACHE_BYTES) -> None:
        self._path, self._cache_bytes = path, cache_bytes
        self._lock = threading.Lock()
        self._handle = self._open()
        self.metadata = _read_metadata(path, self._handle)

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        return read_tile(self, x_px0, y_px0, side_px0, tile_px)

    def thumbnail(self, longest_px: int) -> Thumbnail:
        return make_thumbnail(self, longest_px)

    def close(self) -> None:
        self._handle.close()

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Read a region of one level.

        Areas that were not scanned get the slide's background colour; outside the slide, pixels are white.
        """
        handle = self._handle
        downsample = handle.level_downsamples[level]  # OpenSlide's own value, which it uses to convert positions
        corner = (round(x_px * downsample), round(y_px * downsample))
        try:
            region = handle.read_region(corner, level, (width_px, height_px))
        except openslide.OpenSlideError as error:
            # After an error, an OpenSlide handle fails on every call. Open a new one for the next tile.
            with self._lock:
                if self._handle is handle:
                    self._handle = self._open()
            raise TileReadError(
                f"{self._path.name}: the region at ({corner[0]}, {corner[1]}), level {level}, "
                f"cannot be decoded ({error}).",
                hint=DAMAGED_FILE_HINT,
            ) from error
        if region.getchannel("A").getextrema()[0] < 255:
            region = Image.alpha_composite(Image.new("RGBA", region.size, (*self.metadata.background, 255)), region)
        pixels = np.asarray(region.convert("RGB"))
        size = self.metadata.levels[level]
        rows = slice(max(-y_px, 0), max(min(size.height_px - y_px, height_px), 0))
        columns = slice(max(-x_px, 0), max(min(size.width_px - x_px, width_px), 0))
        inside = pixels[rows, columns]
        if inside.shape == pixels.shape:
            return pixels
        padded = np.full_like(pixels, WHITE)
        padded[rows, columns] = inside
        return padded

    def _open(self) -> openslide.OpenSlide:
        try:
            handle = openslide.OpenSlide(self._path)
        except openslide.OpenSlideError as error:
            raise UnreadableSlideError(
                f"{self._path.name} cannot be opened ({error}).",
                hint="Copy the file again from the scanner. If other viewers open it, its format is not supported.",
            ) from error
        handle.set_cache(openslide.OpenSlideCache(self._cache_bytes))
        return handle


def _read_metadata(path: Path, handle: openslide.OpenSlide) -> SlideMetadata:
    properties = handle.properties
    vendor = properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")
    levels = tuple(Level.from_sizes(*size, *handle.dimensions) for size in handle.level_dimensions)
    mpp_x = parse_positive_number(properties.get(openslide.PROPERTY_NAME_MPP_X))
    mpp_y = parse_positive_number(properties.get(openslide.PROPERTY_NAME_MPP_Y))
    mpp, note = combine_mpp(mpp_x, mpp_y)
    return SlideMetadata(
        path=path,
        format=_FORMATS.get(vendor, vendor),
        vendor=vendor,
        reader="openslide",
        levels=levels,
        mpp_in_file=mpp,
        objective_power=parse_positive_number(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER)),
        bounds=_read_bounds(properties, levels[0]),
        background=_parse_background(properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR)),
        note=note,
    )


def _read_bounds(properties: openslide._PropertyMap, full: Level) -> Box:
    """Return the scanned area, clipped to the slide; the whole slide if it is not defined."""
    names = (
        openslide.PROPERTY_NAME_BOUNDS_X,
        openslide.PROPERTY_NAME_BOUNDS_Y,
        openslide.PROPERTY_NAME_BOUNDS_WIDTH,
        openslide.PROPERTY_NAME_BOUNDS_HEIGHT,
    )
    try:
        x, y, width, height = (int(properties[name]) for name in names)
    except (KeyError, ValueError):
        return Box(0, 0, full.width_px, full.height_px)
    x, y = max(x, 0), max(y, 0)
    width, height = min(width, full.width_px - x), min(height, full.height_px - y)
    if width <= 0 or height <= 0:
        return Box(0, 0, full.width_px, full.height_px)
    return Box(x, y, width, height)


def _parse_background(text: str | None) -> Colour:
    """Parse a colour written as RRGGBB; white if it is missing or invalid."""
    if text is None or re.fullmatch(r"[0-9A-Fa-f]{6}", text) is None:
        return WHITE
    red, green, blue = bytes.fromhex(text)
    return red, green, blue
