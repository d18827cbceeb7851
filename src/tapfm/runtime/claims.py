"""Claims on slides: of several processes that work on one folder, each slide is processed by one.

A claim is a lock on a small file, released when the slide is finished or the process ends, however it ends. It holds
between machines that share the folder, if its file system has locks. Where it has none, every claim is granted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

_FOLDER = ".claims"


class SlideClaims:
    """The claims that this process holds on slides of a folder; used as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER
        self._held: dict[str, tuple[Path, IO[bytes]]] = {}

    def __enter__(self) -> SlideClaims:
        return self

    def __exit__(self, *_: object) -> None:
        for slide_id in list(self._held):
            self.release(slide_id)
        with contextlib.suppress(OSError):  # others hold claims in it
            self._folder.rmdir()

    def take(self, slide_id: str) -> bool:
        """Claim a slide; returns False if another process has claimed it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        # a digest: an id may be longer than a file name
        path = self._folder / hashlib.sha256(slide_id.encode()).hexdigest()[:32]
        while True:
            file = path.open("ab")
            if not _lock(file):
                file.close()
                return False
            if _is_still(path, file):
                self._held[slide_id] = path, file
                return True
            file.close()  # whoever held the lock before has removed the file: try again with the new one

    def take_each(self, slide_ids: Iterable[str]) -> Iterator[str]:
        """Claim slides one by one, each when it is asked for; yields those that were granted."""
        return (slide_id for slide_id in slide_ids if self.take(slide_id))

    def release(self, slide_id: str) -> None:
        """Release the claim on a slide, if it is held."""
        path, file = self._held.pop(slide_id, (None, None))
        if path is not None and file is not None:
            path.unlink(missing_ok=True)  # while it is locked, so that nobody else's claim is removed
            file.close()


def _lock(file: IO[bytes]) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True  # Windows, or a file system without locks
    return True


def _is_still(path: Path, file: IO[bytes]) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False
