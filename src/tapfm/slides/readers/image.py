"""Reader for PNG, JPEG and other plain images, decoded once and held in memory.

Plain images contain no microns per pixel; the cohort table must give them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from tapfm.errors import UnreadableSlideError
from tapfm.slides.region_reading import make_thumbnail, read_tile
from tapfm.slides.slide import DAMAGED_FILE_HINT, WHITE, Box, Level, Pixels, SlideMetadata, Thumbnail

SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WebP"}
_MAX_PIXELS = 500_000_000  # 1.5 GB in memory
_MAX_IMAGE_PIXELS_LOCK = threading.Lock()


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image of up to _MAX_PIXELS, with Pillow's much lower size limit disabled."""
    with _MAX_IMAGE_PIXELS_LOCK:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(path)
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise UnreadableSlideError(f"{path.name} cannot be decoded ({error}).", hint=DAMAGED_FILE_HINT) from error
        finally:
            Image.MAX_IMAGE_PIXELS = before
    with image:
        if image.width * image.height > _MAX_PIXELS:
            raise UnreadableSlideError(
                f"{path.name} has {image.width:,} x {image.height:,} pixels, too many for a plain image.",
                hint="If it is a tissue mask, save it at a lower resolution. If it is a slide, convert it to a "
                f"pyramidal TIFF: vips tiffsave {path.name} {path.stem}.tiff --tile --pyramid --compression jpeg",
            )
        try:
            yield image
        except (OSError, SyntaxError) as error:  # Pillow decodes when the pixels are accessed
            raise UnreadableSlideError(f"{path.name} cannot be decoded ({error}).", hint=DAMAGED_FILE_HINT) from error


class ImageSlide:
    """A slide stored as a plain image."""

    def __init__(self, path: Path) -> None:
        with open_image(path) as image:
            if image.mode.startswith(("I", "F")):
                raise UnreadableSlideError(
                    f"{path.name} has more than 8 bits per channel.", hint="Convert it to RGB with 8 bits per channel."
                )
            converted = image.convert("RGBA") if image.has_transparency_data else image
            if converted.mode == "RGBA":
                converted = Image.alpha_composite(Image.new("RGBA", converted.size, (*WHITE, 255)), converted)
            self._pixels: Pixels = np.array(converted.convert("RGB"))
        height_px, width_px = self._pixels.shape[:2]
        self.metadata = SlideMetadata(
            path=path,
            format=SUFFIXES[path.suffix.lower()],
            vendor="plain image",
            reader="image",
            levels=(Level.from_sizes(width_px, height_px, width_px, height_px),),
            mpp_in_file=None,  # the dots per inch of an image are a print setting
            objective_power=None,
            bounds=Box(0, 0, width_px, height_px),
        )

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        return read_tile(self, x_px0, y_px0, side_px0, tile_px)

    def thumbnail(self, longest_px: int) -> Thumbnail:
        return make_thumbnail(self, longest_px)

    def close(self) -> None:
        """Free the memory."""
        self._pixels = np.empty((0, 0, 3), np.uint8)

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Return a region of the only level; white outside the image."""
        assert level == 0
        region = np.full((height_px, width_px, 3), WHITE, np.uint8)
        full_height_px, full_width_px = self._pixels.shape[:2]
        left, top = max(x_px, 0), max(y_px, 0)
        right, bottom = min(x_px + width_px, full_width_px), min(y_px + height_px, full_height_px)
        if left < right and top < bottom:
            region[top - y_px : bottom - y_px, left - x_px : right - x_px] = self._pixels[top:bottom, left:right]
        return region
