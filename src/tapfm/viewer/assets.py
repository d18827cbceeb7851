"""The built pages of the viewer. They are made from `frontend/` and are part of the wheel, not of the repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tapfm.errors import InputError
from tapfm.runtime.files import fingerprint

_FOLDER = Path(__file__).with_name("static")
PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page, held in memory: no request ever leads to a path."""

    data: bytes
    media_type: str
    etag: str


def read_assets(folder: Path = _FOLDER) -> Mapping[str, Asset]:
    """Read the built pages, or say how to build them."""
    files = sorted(path for path in folder.glob("*") if path.suffix in _TYPES) if folder.is_dir() else []
    if PAGE not in {path.name for path in files}:
        raise InputError(
            "The pages of the viewer are not built.",
            hint="In a checkout: install Node.js with npm (18 or newer), then type: make setup. A wheel has them.",
        )
    assets = {}
    for path in files:
        data = path.read_bytes()
        assets[path.name] = Asset(data, _TYPES[path.suffix], f'"{fingerprint(data.hex())[:16]}"')
    return assets
