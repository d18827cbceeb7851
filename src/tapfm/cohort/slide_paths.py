"""Paths of slides as tables contain them: of Linux, macOS or Windows."""

from __future__ import annotations

import os
import re
from pathlib import Path, PureWindowsPath


def parse_slide_path(text: str, folder: Path = Path()) -> Path:
    r"""Return the path of a slide in a table, as written on any operating system.

    `slides\a.svs` becomes `slides/a.svs`, and `\\server\share\a.svs` becomes `//server/share/a.svs`. Quotes around the
    path, as Windows copies it, are removed. folder: a file in it whose name contains a backslash is found unchanged.
    """
    text = _remove_quotes(text)
    if os.name == "nt" or "\\" not in text or _exists(folder / text):
        return Path(text)
    return Path(PureWindowsPath(text).as_posix())


def file_name_of(text: str) -> str:
    """Return the last part of a path of any operating system."""
    return re.split(r"[\\/]", _remove_quotes(text).rstrip("\\/"))[-1]


def _remove_quotes(text: str) -> str:
    return text[1:-1] if len(text) > 2 and text[0] == text[-1] == '"' else text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or contains a NUL character
        return False
