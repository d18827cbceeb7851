"""Find slide files that a cohort contains twice, under the same path or as copies."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tapfm.slides.opening import list_slide_files

_PART_BYTES = 2**20  # of each part of a file that is compared
_PARTS = 5  # evenly spaced, from the beginning to the end; more than two, because the borders of slides may be equal


def find_copies(paths: Mapping[int, Path]) -> list[tuple[list[int], str]]:
    """Return groups of rows with the same slide file, and whether it is the "same file" or a "copy".

    Copies are files of the same size with the same content in five parts of 1 MiB each. Empty and unreadable files are
    ignored.

    paths: slide files by row number.
    """
    by_file: dict[str, list[int]] = defaultdict(list)
    for row, path in paths.items():
        by_file[str(_resolve(path))].append(row)
    found = [(rows, "the same file") for rows in by_file.values() if len(rows) > 1]
    by_size: dict[int, list[int]] = defaultdict(list)
    for rows in by_file.values():
        if size := _size(paths[rows[0]]):
            by_size[size].append(rows[0])
    for candidates in by_size.values():
        if len(candidates) < 2:
            continue
        by_content: dict[str, list[int]] = defaultdict(list)
        for row in candidates:
            if content := _hash_parts(paths[row]):
                by_content[content].append(row)
        found += [(rows, "copies of the same file") for rows in by_content.values() if len(rows) > 1]
    return sorted(found)


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path.absolute()


def _size(path: Path) -> int:
    """Return the size of a slide file, or the number of bytes of all files of a slide folder; 0 if unreadable."""
    try:
        return sum(file.stat().st_size for file in _files(path))
    except OSError:
        return 0


def _files(path: Path) -> Sequence[Path]:
    return list_slide_files(path) if path.is_dir() or path.suffix.lower() in (".mrxs", ".vms", ".vmu") else [path]


def _hash_parts(path: Path) -> str:
    """Return a hash of parts of each file of a slide; empty if a file cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in _files(path):
            with file.open("rb") as opened:
                last = max(0, file.stat().st_size - _PART_BYTES)
                for part in range(_PARTS if last else 1):
                    opened.seek(last * part // (_PARTS - 1))
                    digest.update(opened.read(_PART_BYTES))
    except OSError:
        return ""
    return digest.hexdigest()
