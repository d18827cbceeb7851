"""Open slides for a worker: opened when first read, the least recently used one let go.

A pool travels to workers without its handles, whether they are forked or spawned: a handle opened before a fork would
share its file position and locks with the parent.
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
    """At most `most_open` slides, each with a cache of `cache_bytes`."""

    def __init__(self, most_open: int = 8, cache_bytes: int = CACHE_BYTES) -> None:
        self.most_open, self.cache_bytes = most_open, cache_bytes
        self._forget()

    def get(self, path: Path) -> Slide:
        """Give an open slide. It stays open for as long as the caller holds it."""
        if self._process != os.getpid():
            self._forget()  # forked: the parent's handles are not ours to use, nor to close
        with self._lock:
            slide = self._open.pop(path, None)
            if slide is None:
                slide = open_slide(path, self.cache_bytes)
            self._open[path] = slide
            while len(self._open) > self.most_open:
                # let go, not closed: another thread may be reading from it, and the last one to let go closes it
                self._open.popitem(last=False)
            return slide

    def let_go(self, path: Path) -> None:
        """Forget one slide, so that it is opened afresh: a handle that failed once may fail for good."""
        with self._lock:
            self._open.pop(path, None)

    def close(self) -> None:
        """Let go of all slides."""
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, Slide] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"most_open": self.most_open, "cache_bytes": self.cache_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
