"""Every format that OpenSlide opens: NDPI, MRXS, SCN, BIF, VMS, DICOM, Philips TIFF, and SVS / TIFF as the fallback."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import openslide
from PIL import Image

from tapfm.errors import TileReadError, UnreadableSlideError
from tapfm.slides.readers.numbers import one_mpp, positive_number
from tapfm.slides.scaling import make_thumbnail, read_tile
from tapfm.slides.slide import CACHE_BYTES, COPY_AGAIN, WHITE, Box, Colour, Level, Pixels, SlideFacts, Thumbnail

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
    """A slide that OpenSlide opens."""

    def __init__(self, path: Path, cache_bytes: int = CACHE_BYTES) -> None:
        self._path, self._cache_bytes = path, cache_bytes
        self._lock = threading.Lock()
        self._handle = self._open()
        self.facts = _facts_of(path, self._handle)

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        """Read a square of level-0 pixels as a tile."""
        return read_tile(self, x_px0, y_px0, side_px0, tile_px)

    def thumbnail(self, longest_px: int) -> Thumbnail:
        """Make a picture of where the scanner put pixels."""
        return make_thumbnail(self, longest_px)

    def close(self) -> None:
        """Give back the file and the cache."""
        self._handle.close()

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Read pixels of one level; where the scanner left none, the slide's background."""
        handle = self._handle
        downsample = handle.level_downsamples[level]  # its own idea of it, by which it divides what it is given
        corner = (round(x_px * downsample), round(y_px * downsample))
        try:
            region = handle.read_region(corner, level, (width_px, height_px))
        except openslide.OpenSlideError as error:
            # After an error OpenSlide answers nothing else on that handle: the next tile needs a new one.
            with self._lock:
                if self._handle is handle:
                    self._handle = self._open()
            raise TileReadError(
                f"{self._path.name}: the region at ({corner[0]}, {corner[1]}), level {level}, "
                f"cannot be decoded ({error}).",
                hint=COPY_AGAIN,
            ) from error
        if region.getchannel("A").getextrema()[0] < 255:
            region = Image.alpha_composite(Image.new("RGBA", region.size, (*self.facts.background, 255)), region)
        return np.asarray(region.convert("RGB"))

    def _open(self) -> openslide.OpenSlide:
        try:
            handle = openslide.OpenSlide(self._path)
        except openslide.OpenSlideError as error:
            raise UnreadableSlideError(
                f"{self._path.name} cannot be opened ({error}).",
                hint="Copy it again from where it was scanned; if it opens in a viewer, its format is not one we read.",
            ) from error
        handle.set_cache(openslide.OpenSlideCache(self._cache_bytes))
        return handle


def _facts_of(path: Path, handle: openslide.OpenSlide) -> SlideFacts:
    """Read what OpenSlide says of a slide."""
    properties = handle.properties
    vendor = properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")
    levels = tuple(Level.of(*size, *handle.dimensions) for size in handle.level_dimensions)
    mpp_x = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_X))
    mpp_y = positive_number(properties.get(openslide.PROPERTY_NAME_MPP_Y))
    mpp, note = one_mpp(mpp_x, mpp_y)
    return SlideFacts(
        path=path,
        format=_FORMATS.get(vendor, vendor),
        vendor=vendor,
        reader="openslide",
        levels=levels,
        mpp_in_file=mpp,
        objective_power=positive_number(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER)),
        bounds=_bounds_of(properties, levels[0]),
        background=_background_of(properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR)),
        note=note,
    )


def _bounds_of(properties: openslide._PropertyMap, full: Level) -> Box:
    """Read where the scanner put pixels, cut to the slide."""
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


def _background_of(text: str | None) -> Colour:
    """Read OpenSlide's RRGGBB; white where the file does not say."""
    if text is None or re.fullmatch(r"[0-9A-Fa-f]{6}", text) is None:
        return WHITE
    red, green, blue = bytes.fromhex(text)
    return red, green, blue
