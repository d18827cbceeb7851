"""Build a release wheel: build the package with pip, and check that the wheel contains the pages of `tapfm view`.

python tools/build_wheel.py --out dist

A wheel without them is not written to --out. `make wheel` builds the pages first.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PAGES = "tapfm/viewer/static/"  # in the wheel
_INDEX = "index.html"
_LICENCES = ("openseadragon-licence.txt",)  # of the libraries in viewer.js


def main() -> int:
    """Write the wheel, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the wheel")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        # pip copies nothing to `out`, so that a wheel without pages cannot be taken for a release
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(_ROOT)]
        if (exit_code := subprocess.run(build, check=False).returncode) != 0:
            return exit_code
        (wheel,) = Path(folder).glob("tapfm-*.whl")
        if missing := find_missing_pages(wheel):
            print(
                f"{wheel.name} was not written to {out}, because it lacks pages of tapfm view: {', '.join(missing)}.\n"
                "Install Node.js 18 or newer, which includes npm, then run make wheel again.",
                file=sys.stderr,
            )
            return 2
        out.mkdir(parents=True, exist_ok=True)
        written = shutil.copy(wheel, out)
    print(f"built {written}, with the pages of tapfm view")
    return 0


def find_missing_pages(wheel: Path) -> list[str]:
    """Return the missing or empty files of the viewer: its page, the files that the page loads, and licences."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        index = archive.read(_PAGES + _INDEX).decode() if _PAGES + _INDEX in sizes else ""
    loaded = re.findall(r'(?:src|href)="assets/([^"]+)"', index)
    return [name for name in (_INDEX, *loaded, *_LICENCES) if not sizes.get(_PAGES + name)]


if __name__ == "__main__":
    sys.exit(main())
