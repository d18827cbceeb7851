"""Pictures of slides as JPEG: read by a few threads, kept while there is room.

Only pixels of the pyramid are ever read. Label and macro images of a slide carry names: nothing here asks for them.
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
from tapfm.viewer.deep_zoom import ZoomTile

_KEPT_BYTES = 256 * 2**20
_MOST_OPEN = 16  # slides
_THUMBNAIL_PX = 256
_VIEW_QUALITY = 88
_TILE_QUALITY = 95  # a tile that is looked at closely

Made = TypeVar("Made")


class _PictureCache:
    """Encoded pictures, the least recently used ones let go beyond `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._pictures: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable) -> bytes | None:
        """Give a picture that is kept."""
        found = self._pictures.get(key)
        if found is not None:
            self._pictures.move_to_end(key)
        return found

    def put(self, key: Hashable, data: bytes) -> None:
        """Keep a picture."""
        self.bytes += len(data) - len(self._pictures.pop(key, b""))
        self._pictures[key] = data
        while self.bytes > self.most_bytes:
            _, oldest = self._pictures.popitem(last=False)
            self.bytes -= len(oldest)


class SlideReaders:
    """Reads slides in threads for an event loop; whatever several clients ask for at once is made once."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES, max_open: int = _MOST_OPEN, threads: int | None = None) -> None:
        self.pool = SlidePool(max_open)
        self.kept = _PictureCache(kept_bytes)
        self._threads = ThreadPoolExecutor(threads or available_cores() + 2, thread_name_prefix="slides")
        self._being_made: dict[Hashable, asyncio.Future[bytes]] = {}

    async def in_thread(self, make: Callable[[], Made]) -> Made:
        """Run something that reads files, and let others be served meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    async def picture(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Give a picture: kept, being made for somebody else, or made now."""
        found = self.kept.get(key)
        if found is not None:
            return found
        making = self._being_made.get(key)
        if making is None:
            making = asyncio.get_running_loop().run_in_executor(self._threads, make)
            self._being_made[key] = making
            making.add_done_callback(lambda _: self._being_made.pop(key, None))
        # shielded: one client who leaves does not take it from the others
        data = await asyncio.shield(making)
        self.kept.put(key, data)
        return data

    def metadata(self, path: Path) -> SlideMetadata:
        """Open a slide and say what it is."""
        return self.pool.get(path).metadata

    def part(self, path: Path, picture: ZoomTile) -> bytes:
        """Read a part of a slide; blocks that cannot be decoded are background."""
        slide = self.pool.get(path)
        return _jpeg(read_blockwise(slide, picture.box, picture.width_px, picture.height_px), _VIEW_QUALITY)

    def tile(self, path: Path, x_px0: int, y_px0: int, side_px0: int) -> bytes:
        """Read a tile at the slide's own resolution."""
        return _jpeg(self.pool.get(path).read(x_px0, y_px0, side_px0, side_px0), _TILE_QUALITY)

    def thumbnail(self, path: Path) -> bytes:
        """Make the picture for the list."""
        return _jpeg(self.pool.get(path).thumbnail(_THUMBNAIL_PX).pixels, _VIEW_QUALITY)

    def close(self) -> None:
        """Let go of slides and threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.pool.close()


def _jpeg(pixels: Pixels, quality: int) -> bytes:
    """Encode without thinning colours: chromatin and stain are what is looked at."""
    return bytes(imagecodecs.jpeg8_encode(pixels, level=quality, subsampling="444"))
