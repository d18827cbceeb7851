"""Slides stored in segments (the tiles or strips of a TIFF, the frames of a DICOM file) that are decoded independently.

`tiff.py` and `dicom.py` find the segments and provide their decoders. An LRU cache holds the decoded segments.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tapfm.errors import TileReadError, UnreadableSlideError
from tapfm.slides.region_reading import make_thumbnail, read_tile
from tapfm.slides.slide import CACHE_BYTES, DAMAGED_FILE_HINT, WHITE, Level, Pixels, SlideMetadata, Thumbnail

_PREMULTIPLIED, _TRANSPARENCY = 1, 2  # TIFF codes for the meaning of a fourth channel

# Decodes the bytes of a segment, given its index and the number of upper rows that are needed (None: all rows).
# Returns (height, width, channels) pixels with at least these rows. May raise any exception.
SegmentDecoder = Callable[[bytes, int, int | None], Pixels]


@dataclass(frozen=True)
class LevelSegments:
    """The segments of one level: their offsets in a file and how to decode them."""

    path: Path
    level: Level
    segment_width_px: int
    segment_height_px: int
    segments_per_row: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    decode: SegmentDecoder
    planes: int = 1  # 3 if red, green and blue are stored separately
    fourth_channel: int = 0  # its meaning, as a TIFF code

    @property
    def segments_per_plane(self) -> int:
        """Number of segments of one colour plane."""
        return len(self.offsets) // self.planes


def check_not_truncated(name: str, segments: Sequence[LevelSegments]) -> None:
    """Raise UnreadableSlideError if segments of a slide lie beyond the end of their file."""
    missing = total = 0
    for each in segments:
        size_bytes = each.path.stat().st_size
        total += len(each.offsets)
        missing += sum(o + n > size_bytes for o, n in zip(each.offsets, each.lengths, strict=True))
    if missing:
        raise UnreadableSlideError(
            f"{name} is truncated: {missing:,} of {total:,} tiles are missing.", hint=DAMAGED_FILE_HINT
        )


class SegmentedSlide:
    """A slide stored in segments."""

    def __init__(
        self, metadata: SlideMetadata, segments: tuple[LevelSegments, ...], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.metadata, self._segments = metadata, segments  # one entry per level
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[int, int], Pixels] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        self._files = {path: path.open("rb", buffering=0) for path in dict.fromkeys(each.path for each in segments)}

    def read(self, x_px0: int, y_px0: int, side_px0: int, tile_px: int) -> Pixels:
        return read_tile(self, x_px0, y_px0, side_px0, tile_px)

    def thumbnail(self, longest_px: int) -> Thumbnail:
        return make_thumbnail(self, longest_px)

    def close(self) -> None:
        self._close_files()
        self._cache.clear()
        self._cached_bytes = 0

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> Pixels:
        """Assemble a region from decoded segments; white outside the level."""
        segments = self._segments[level]
        region = np.empty((height_px, width_px, 3), np.uint8)
        right, bottom = x_px + width_px, y_px + height_px
        left, top = max(x_px, 0), max(y_px, 0)
        inside_right, inside_bottom = min(right, segments.level.width_px), min(bottom, segments.level.height_px)
        if (left, top, inside_right, inside_bottom) != (x_px, y_px, right, bottom):
            region[:] = WHITE
        if left >= inside_right or top >= inside_bottom:
            return region
        columns = range(left // segments.segment_width_px, (inside_right - 1) // segments.segment_width_px + 1)
        rows = range(top // segments.segment_height_px, (inside_bottom - 1) // segments.segment_height_px + 1)
        # If no segment of this region is cached, reads are probably scattered and the rest of the segments is unlikely
        # to be needed before they leave the cache. So they are decoded only down to the last row of the region.
        scattered = not any(
            (level, row * segments.segments_per_row + column) in self._cache for row in rows for column in columns
        )
        for row in rows:
            segment_top = row * segments.segment_height_px
            y_from, y_to = max(top, segment_top), min(inside_bottom, segment_top + segments.segment_height_px)
            for column in columns:
                segment_left = column * segments.segment_width_px
                x_from, x_to = max(left, segment_left), min(inside_right, segment_left + segments.segment_width_px)
                pixels = self._load_segment(
                    level, row * segments.segments_per_row + column, y_to - segment_top, scattered
                )
                region[y_from - y_px : y_to - y_px, x_from - x_px : x_to - x_px] = pixels[
                    y_from - segment_top : y_to - segment_top, x_from - segment_left : x_to - segment_left
                ]
        return region

    def _load_segment(self, level: int, index: int, rows: int, scattered: bool) -> Pixels:
        """Return at least the upper `rows` of a segment, from the cache or the file."""
        key = (level, index)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None and len(cached) >= rows:
                self._cache.move_to_end(key)
                return cached
        # a segment that is read a second time is decoded in full
        pixels = self._decode_segment(self._segments[level], index, rows if scattered and cached is None else None)
        with self._lock:
            replaced = self._cache.pop(key, None)
            self._cached_bytes += pixels.nbytes - (replaced.nbytes if replaced is not None else 0)
            self._cache[key] = pixels
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return pixels

    def _decode_segment(self, segments: LevelSegments, index: int, rows: int | None) -> Pixels:
        try:
            planes = [
                segments.decode(self._read_bytes(segments, plane), plane, rows)
                for plane in range(index, len(segments.offsets), segments.segments_per_plane)
            ]
            pixels = planes[0] if len(planes) == 1 else np.concatenate(planes, axis=2)
        except TileReadError:
            raise
        except Exception as error:  # each codec raises its own exceptions
            raise self._read_error(segments, index, str(error)) from error
        # segments at the right and bottom edge may be cropped
        width_px = min(
            segments.segment_width_px,
            segments.level.width_px - index % segments.segments_per_row * segments.segment_width_px,
        )
        height_px = min(
            segments.segment_height_px,
            segments.level.height_px - index // segments.segments_per_row * segments.segment_height_px,
        )
        if pixels.shape[0] < min(height_px, rows or height_px) or pixels.shape[1] < width_px:
            size = f"{pixels.shape[1]} x {pixels.shape[0]}"
            raise self._read_error(segments, index, f"expected {width_px} x {height_px} pixels, got {size}")
        if pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        elif pixels.shape[2] == 4:
            pixels = _blend_on_white(pixels, segments.fourth_channel)
        return pixels

    def _read_bytes(self, segments: LevelSegments, index: int) -> bytes:
        length = segments.lengths[index]
        file = self._files[segments.path]
        with self._lock:
            file.seek(segments.offsets[index])
            data = file.read(length)
        if data is None or len(data) < length:
            raise self._read_error(segments, index, "unexpected end of file")
        return data

    def _read_error(self, segments: LevelSegments, index: int, reason: str) -> TileReadError:
        return TileReadError(
            f"{segments.path.name}: tile {index} of the file cannot be decoded ({reason}).",
            hint=DAMAGED_FILE_HINT,
        )


def _blend_on_white(pixels: Pixels, fourth_channel: int) -> Pixels:
    """Return RGB of four channels: blended onto white if the fourth is alpha, otherwise the first three."""
    colours, alpha = pixels[..., :3], pixels[..., 3:].astype(np.uint16)
    if fourth_channel == _PREMULTIPLIED:
        return np.minimum(colours + (255 - alpha), 255).astype(np.uint8)
    if fourth_channel == _TRANSPARENCY:
        return ((colours * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    return colours


def ycbcr_to_rgb(pixels: Pixels) -> Pixels:
    """Convert YCbCr of full range, as in JPEG files, to RGB."""
    y, cb, cr = (pixels[..., i].astype(np.float32) for i in range(3))
    cb, cr = cb - 128, cr - 128
    rgb = np.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb], axis=-1)
    return np.clip(np.rint(rgb), 0, 255).astype(np.uint8)
