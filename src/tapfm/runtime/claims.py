"""Claims on slides: of several processes that work on one folder, each slide is processed by one.

A claim is a lock on one byte of the file `.claims`, whose position follows from the slide's id. It is released when
the slide is finished or the process ends, however it ends. It holds between machines that share the folder, if its
file system has locks. Where it has none, every claim is granted.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

_FILE = ".claims"
_REFUSED = (errno.EAGAIN, errno.EACCES)  # of a byte that another process has locked


class SlideClaims:
    """The claims of this process on slides of a folder; used as a context manager.

    Of one folder a process must have one object: closing it would release the claims of another one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._file: IO[bytes] | None = None

    def __enter__(self) -> SlideClaims:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()  # releases all claims; the file stays, as another process may be about to lock it

    def take(self, slide_id: str) -> bool:
        """Claim a slide; returns False if another process has claimed it."""
        try:
            import fcntl

            assert self._file is not None
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _byte_of(slide_id))
        except ImportError:
            return True  # Windows
        except OSError as error:
            return error.errno not in _REFUSED  # others: a file system without locks
        return True

    def take_each(self, slide_ids: Iterable[str]) -> Iterator[str]:
        """Claim slides one by one, each when it is asked for; yields those that were granted."""
        return (slide_id for slide_id in slide_ids if self.take(slide_id))

    def release(self, slide_id: str) -> None:
        """Release the claim on a slide."""
        try:
            import fcntl

            assert self._file is not None
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _byte_of(slide_id))
        except (ImportError, OSError):
            pass  # as in `take`


def _byte_of(slide_id: str) -> int:
    # 56 bits: two ids of a million have the same byte with a probability of 1e-5, and then wait for each other
    return int.from_bytes(hashlib.sha256(slide_id.encode()).digest()[:7], "big")
