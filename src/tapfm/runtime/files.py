"""Files: whole or not at all, and known by their digest."""

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

UNFINISHED = ".unfinished"  # suffix of a file that is being written; one that a killed process left may be removed


def _cache_folder() -> Path:
    """Where tapfm keeps what it can make again; `TAPFM_CACHE` moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TAPFM_CACHE") or Path(base) / "tapfm")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, whenever the writer is stopped."""
    with open_replacement(path) as file:
        file.write(data)


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that takes the place of `path` when all of it is on disk; on failure nothing has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            refuse_full_disk(error, path)
        raise


def refuse_full_disk(error: OSError, path: Path) -> None:
    """Say so, if that is what kept a file from being written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        kept = "; the one before is whole" if path.exists() else ""
        raise DiskFullError(
            f"The disk was full before {path} was written{kept}.",
            hint="Free some space; the same command goes on, tapfm train and tapfm predict with --resume.",
        ) from error


def fingerprint(*parts: Any) -> str:
    """Digest any JSON-like values: equal fingerprints mean equal values, in every field."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_identity(file: Path) -> tuple[str, int, int]:
    """Say which content a file has without reading it: name, size and time of change."""
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, remembered by path, size and time of change: weights have gigabytes."""
    real = path.resolve()
    status = real.stat()
    identity = f"{real}|{status.st_size}|{status.st_mtime_ns}"
    note = _cache_folder() / "sha256" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    try:
        remembered = json.loads(note.read_text())
        if remembered["file"] == identity:
            return str(remembered["sha256"])
    except (OSError, ValueError, KeyError):
        pass  # not remembered, or not readable: hash it
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        write_atomically(note, json.dumps({"file": identity, "sha256": digest}).encode())
    return digest
