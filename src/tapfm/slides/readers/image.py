"""PNG, JPEG and other plain pictures: decoded once, held in memory. Their scale has to be given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from tapfm.errors import UnreadableSlideError
from tapfm.slides.scaling import make_thumbnail, read_tile
from tapfm.slides.slide import COPY_AGAIN, WHITE, Box, Level, Pixels, SlideFacts, Thumbnail

SUFFIXES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WebP"}
_LARGEST_PX = 500_000_000  # 1.5 GB in memory; a larger picture belongs into a pyramid


_GUARD = threading.Lock()


@contextmanager
def open_picture(path: Path) -> Iterator[Image.Image]:
    """Open a picture of any size we can hold; Pillow's own guard against decompression bombs warns far below that."""
    with _GUARD:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            image = Image.open(path)
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise UnreadableSlideError(f"{path.name} cannot be decoded ({error}).", hint=COPY_AGAIN) from error
        finally:
            Image.MAX_IMAGE_PIXELS = before
    with image:
        if image.width * image.height > _LARGEST_PX:
            raise UnreadableSlideError(
                f"{path.name} has {image.width:,} x {image.height:,} pixels, too many for a plain picture.",
                hint=f"Convert it to a pyramid: vips tiffsave {path.name} {path.stem}.tiff "
                "--tile --pyramid --compression jpeg",
            )
        try:
            yield image
        except (OSError, SyntaxError) as error:  # decoding happens when pixels are asked for
            raise UnreadableSlideError(f"{path.name} cannot be decoded ({error}).", hint=COPY_AGAIN) from error


class ImageSlide:
    """A plain picture of tissue."""

    def __init__(self, path: Path) -> None:
        with open_picture(path) as image:
            if image.mode.startswith(("I", "F")):
                raise UnreadableSlideError(
                    f"{path.name} has more than 8 bits per channel.", hint="Convert it to 8 bits per channel, RGB."
                )
            picture = image.convert("RGBA") if image.has_transparency_data else image
            if picture.mode == "RGBA":
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, (*WHITE, 255)), picture)
            self._pixels: Pixels = np.array(picture.convert("RGB"))
        height_px, width_px = self._pixels.shape[:2]
        self.facts = SlideFacts(
            path=path,
            format=SUFFIXES[path.suffix.lower()],
            vendor="plain image",
            reader="image",
            levels=(Level.of(width_px, height_px, width_px, height_px),),
            mpp_in_file=None,  # their dots per inch say how to print them
            objective_power=None,
            bounds=Box(0, 0, width_px, height_px),
        )

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        """Read a square as a tile."""
        return read_tile(self, x_px0, y_px0, side_px0, tile_px)

    def thumbnail(self, longest_px: int) -> Thumbnail:
        """Make a picture of the whole picture."""
        return make_thumbnail(self, longest_px)

    def close(self) -> None:
        """Give back the memory."""
        self._pixels = np.empty((0, 0, 3), np.uint8)

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Cut out a region; white outside. There is one level only."""
        assert level == 0
        region = np.full((height_px, width_px, 3), WHITE, np.uint8)
        full_height_px, full_width_px = self._pixels.shape[:2]
        left, top = max(x_px, 0), max(y_px, 0)
        right, bottom = min(x_px + width_px, full_width_px), min(y_px + height_px, full_height_px)
        if left < right and top < bottom:
            region[top - y_px : bottom - y_px, left - x_px : right - x_px] = self._pixels[top:bottom, left:right]
        return region
