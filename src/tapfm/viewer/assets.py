"""Built web pages of the viewer. Their source is `frontend/`; wheels contain them, the repository does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tapfm.errors import InputError
from tapfm.runtime.files import fingerprint

_STATIC_FOLDER = Path(__file__).with_name("static")
INDEX_PAGE = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class Asset:
    """A file of the web page, kept in memory so that requests never access the file system."""

    data: bytes
    media_type: str
    etag: str


def read_assets(folder: Path = _STATIC_FOLDER) -> Mapping[str, Asset]:
    """Read the built pages. Raises InputError with build instructions if they are missing."""
    files = sorted(path for path in folder.glob("*") if path.suffix in _MEDIA_TYPES) if folder.is_dir() else []
    if INDEX_PAGE not in {path.name for path in files}:
        raise InputError(
            "The web pages of the viewer are not built.",
            hint="In a checkout, install Node.js 18 or newer with npm, and run make setup. If you used pip install ., "
            "run it again. Wheels contain the pages.",
        )
    assets = {}
    for path in files:
        data = path.read_bytes()
        assets[path.name] = Asset(data, _MEDIA_TYPES[path.suffix], f'"{fingerprint(data.hex())[:16]}"')
    return assets
