"""Atomic file writes, and digests of files and values."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tapfm.errors import DiskFullError

UNFINISHED_SUFFIX = ".unfinished"  # of temporary files; those that a killed process left behind can be deleted


def _cache_folder() -> Path:
    """Return tapfm's cache folder. The environment variable `TAPFM_CACHE` overrides the default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TAPFM_CACHE") or Path(base) / "tapfm")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see either the old or the new content, even if the writer is killed."""
    with open_atomically(path) as file:
        file.write(data)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the context exits. After an error `path` is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED_SUFFIX}")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise_if_disk_full(error, path)
        raise


def raise_if_disk_full(error: OSError, path: Path) -> None:
    """Raise DiskFullError if writing to `path` raised `error` because the disk or the quota is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        previous = " The previous version of this file is intact." if path.exists() else ""
        raise DiskFullError(
            f"The disk is full: {path} could not be written.{previous}",
            hint="Free some space. Then run the same command again, with --resume if the command has this option.",
        ) from error


def fingerprint(*values: Any) -> str:
    """Return the SHA-256 of JSON-serialisable values as 64 hexadecimal digits. Equal values have equal fingerprints."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_files(*files: Path | None) -> str:
    """Return the SHA-256 of a file, or a digest of several files; None stands for no file."""
    existing = [file for file in files if file is not None]
    return file_sha256(existing[0]) if len(existing) == 1 else fingerprint([file_sha256(file) for file in existing])


def file_identity(file: Path) -> tuple[str, int, int]:
    """Return name, size and modification time of a file, to detect changes without reading it."""
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file.

    It is cached by path, size and modification time, because large files, such as encoder weights, take long to hash.
    """
    real_path = path.resolve()
    status = real_path.stat()
    identity = f"{real_path}|{status.st_size}|{status.st_mtime_ns}"
    cache_file = _cache_folder() / "sha256" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    try:
        cached = json.loads(cache_file.read_text())
        if cached["file"] == identity:
            return str(cached["sha256"])
    except (OSError, ValueError, KeyError):
        pass  # not cached, or the cache is damaged
    with real_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # without a writable cache the file is hashed again next time
        write_atomically(cache_file, json.dumps({"file": identity, "sha256": digest}).encode())
    return digest
