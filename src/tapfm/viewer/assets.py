"""Built web pages of the viewer. Their source is `frontend/`; wheels contain them, the repository does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tapfm.errors import InputError
from tapfm.runtime.files import fingerprint

_STATIC_FOLDER = Path(__file__).with_name("static")
_CHECKOUT = Path(__file__).parents[3]  # if tapfm runs from a checkout
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
    """Read the built pages. If they are missing, the hint of the InputError says how to get them."""
    files = sorted(path for path in folder.glob("*") if path.suffix in _MEDIA_TYPES) if folder.is_dir() else []
    if INDEX_PAGE not in {path.name for path in files}:
        raise InputError("This installation of tapfm has no web pages for tapfm view.", hint=_installation_hint())
    assets = {}
    for path in files:
        data = path.read_bytes()
        assets[path.name] = Asset(data, _MEDIA_TYPES[path.suffix], f'"{fingerprint(data.hex())[:16]}"')
    return assets


def _installation_hint() -> str:
    """Return how to get the pages: in a checkout, or in an environment without one."""
    build = "install Node.js 18 or newer, which includes npm, then run make setup"
    if (_CHECKOUT / "frontend" / "package.json").is_file():
        return f"To build them in the checkout {_CHECKOUT}, {build}."
    return (
        "Install a release wheel of tapfm, which contains them (make wheel in a checkout builds one).\n"
        f"Or build them in a checkout: {build}, and repeat pip install ."
    )
