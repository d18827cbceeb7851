"""Slide claims, so that processes that share an output folder do not process the same slide twice.

A claim is a lock on one byte of the file `.claims` in the output folder. The byte's offset is derived from the slide
id. The lock is released when the slide is finished or the process exits for any reason. Claims also work across
machines if the shared file system supports locks. If it does not, or on Windows, every claim succeeds.

At present claims are redundant, because each command also locks its whole output folder with `lock_folder`.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

_CLAIMS_FILE = ".claims"
_ALREADY_LOCKED_ERRNOS = (errno.EAGAIN, errno.EACCES)


class SlideClaims:
    """Context manager for the slides that this process has claimed in an output folder.

    A slide remains claimed until `release` is called or the context exits.
    Create only one `SlideClaims` per folder and process: closing one of several would release the claims of all.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _CLAIMS_FILE
        self._file: IO[bytes] | None = None

    def __enter__(self) -> SlideClaims:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()  # releases all claims; the file is not deleted, as another process may be using it

    def claim(self, slide_id: str) -> bool:
        """Claim a slide. Return False if another process has claimed it."""
        try:
            import fcntl

            assert self._file is not None
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _lock_offset(slide_id))
        except ImportError:
            return True  # Windows has no fcntl
        except OSError as error:
            return error.errno not in _ALREADY_LOCKED_ERRNOS  # other errors: the file system has no locks
        return True

    def claim_each(self, slide_ids: Iterable[str]) -> Iterator[str]:
        """Claim slides lazily, one per iteration, and yield those that no other process has claimed."""
        return (slide_id for slide_id in slide_ids if self.claim(slide_id))

    def release(self, slide_id: str) -> None:
        try:
            import fcntl

            assert self._file is not None
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _lock_offset(slide_id))
        except (ImportError, OSError):
            pass  # nothing was locked: Windows, or a file system without locks


def _lock_offset(slide_id: str) -> int:
    # 56 bits: among a million slides, the probability that any two share an offset is about 1e-5
    return int.from_bytes(hashlib.sha256(slide_id.encode()).digest()[:7], "big")
