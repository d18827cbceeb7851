"""A pool of open slides: slides are opened on first use and the least recently used one is dropped.

A pool is pickled without its handles. In a forked process, the first `get` drops the inherited handles, because they
share their file position and locks with the parent process.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from tapfm.slides.opening import open_slide
from tapfm.slides.slide import CACHE_BYTES, Slide


class SlidePool:
    """At most `max_open` open slides, each with a cache of `cache_bytes`."""

    def __init__(self, max_open: int = 8, cache_bytes: int = CACHE_BYTES) -> None:
        self.max_open, self.cache_bytes = max_open, cache_bytes
        self._reset()

    def get(self, path: Path) -> Slide:
        """Return an open slide. It stays open as long as the caller holds a reference."""
        if self._process != os.getpid():
            self._reset()  # after a fork: the handles belong to the parent process
        with self._lock:
            slide = self._open.pop(path, None)
            if slide is None:
                slide = open_slide(path, self.cache_bytes)
            self._open[path] = slide
            while len(self._open) > self.max_open:
                # Dropped, not closed: another thread may still read from it. The last reference closes the file.
                self._open.popitem(last=False)
            return slide

    def discard(self, path: Path) -> None:
        """Drop one slide so that the next `get` reopens it. A handle that failed once may keep failing."""
        with self._lock:
            self._open.pop(path, None)

    def close(self) -> None:
        """Drop all slides."""
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, Slide] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"max_open": self.max_open, "cache_bytes": self.cache_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
