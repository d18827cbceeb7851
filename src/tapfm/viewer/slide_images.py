"""JPEG images of slides, read by a thread pool, and a cache of encoded responses.

Only pixels of the image pyramid are read, never label or macro images: these can contain patient names.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import imagecodecs

from tapfm.runtime.workers import available_cores
from tapfm.slides.pool import SlidePool
from tapfm.slides.region_reading import read_blockwise
from tapfm.slides.slide import Pixels, SlideMetadata
from tapfm.viewer.deep_zoom import PyramidImage

_CACHE_BYTES = 256 * 2**20
_MAX_OPEN_SLIDES = 16
_THUMBNAIL_PX = 256
_JPEG_QUALITY = 88
_TILE_JPEG_QUALITY = 95  # tiles are shown enlarged

Result = TypeVar("Result")


class _ResponseCache:
    """Encoded images and tile values. Drops the least recently used ones above `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._responses: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable) -> bytes | None:
        data = self._responses.get(key)
        if data is not None:
            self._responses.move_to_end(key)
        return data

    def put(self, key: Hashable, data: bytes) -> None:
        self.bytes += len(data) - len(self._responses.pop(key, b""))
        self._responses[key] = data
        while self.bytes > self.max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self.bytes -= len(oldest)


class SlideImageReader:
    """Reads slides in threads for an event loop. Concurrent requests for the same data are computed once."""

    def __init__(
        self, cache_bytes: int = _CACHE_BYTES, max_open: int = _MAX_OPEN_SLIDES, threads: int | None = None
    ) -> None:
        self.pool = SlidePool(max_open)
        self.cache = _ResponseCache(cache_bytes)
        self._executor = ThreadPoolExecutor(threads or available_cores() + 2, thread_name_prefix="slides")
        self._pending: dict[Hashable, asyncio.Future[bytes]] = {}

    async def run_in_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function that reads files without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def get_or_create(self, key: Hashable, create: Callable[[], bytes]) -> bytes:
        """Return the cached data of a key. If there is none, call `create` in a thread and cache its result."""
        cached = self.cache.get(key)
        if cached is not None:
            return cached
        pending = self._pending.get(key)
        if pending is None:
            pending = asyncio.get_running_loop().run_in_executor(self._executor, create)
            self._pending[key] = pending
            pending.add_done_callback(lambda _: self._pending.pop(key, None))
        # Shielded, so that a client that disconnects does not cancel the request of the others.
        data = await asyncio.shield(pending)
        self.cache.put(key, data)
        return data

    def read_metadata(self, path: Path) -> SlideMetadata:
        """Open a slide and return its metadata."""
        return self.pool.get(path).metadata

    def read_image(self, path: Path, image: PyramidImage) -> bytes:
        """Read an image of the pyramid. Small undecodable parts get the background colour."""
        slide = self.pool.get(path)
        return _encode_jpeg(read_blockwise(slide, image.box, image.width_px, image.height_px), _JPEG_QUALITY)

    def read_tile(self, path: Path, x_px0: int, y_px0: int, side_px0: int) -> bytes:
        """Read a tile at full resolution."""
        return _encode_jpeg(self.pool.get(path).read(x_px0, y_px0, side_px0, side_px0), _TILE_JPEG_QUALITY)

    def read_thumbnail(self, path: Path) -> bytes:
        """Read the thumbnail for the slide list."""
        return _encode_jpeg(self.pool.get(path).thumbnail(_THUMBNAIL_PX).pixels, _JPEG_QUALITY)

    def close(self) -> None:
        """Stop the threads and close the slides."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self.pool.close()


def _encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    """Encode without chroma subsampling, which would blur the colours of small structures such as nuclei."""
    return bytes(imagecodecs.jpeg8_encode(pixels, level=quality, subsampling="444"))
