"""Write docs/reference from the code: commands, configuration, file formats.

    python tools/reference.py                writes the pages anew
    python tools/reference.py --check        says which of them are not what the code gives now, and writes nothing

File formats are read from files that tapfm's own commands make of painted slides, in about half a minute.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from reference_commands import commands_page
from reference_configuration import configuration_page
from reference_formats import formats_page
from reference_lab import make_lab

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
SHOWN = 20  # lines of a difference


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--only", choices=PAGES, action="append", help="this page; may be repeated")
    given = parser.parse_args()
    outdated = False
    for name in given.only or PAGES:
        text, path = PAGES[name](), FOLDER / name
        before = path.read_text("utf-8") if path.exists() else ""
        if text == before:
            continue
        outdated = True
        if given.check:
            print(f"{path} is not what the code gives now. Write it anew: make docs")
            lines = difflib.unified_diff(before.splitlines(), text.splitlines(), "committed", "now", lineterm="", n=0)
            print(*itertools.islice(lines, SHOWN), sep="\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            print(f"written: {path}")
    sys.exit(1 if outdated and given.check else 0)


def formats_of_a_lab() -> str:
    """Write file-formats.md from files that are made for it."""
    with tempfile.TemporaryDirectory() as folder:
        lab, cache = Path(folder, "lab"), Path(folder, "cache")
        os.environ["TAPFM_CACHE"] = str(cache)  # that of whoever runs it is left alone
        lab.mkdir()
        make_lab(lab)
        return formats_page(lab)


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "configuration.md": configuration_page,
    "file-formats.md": formats_of_a_lab,
}


if __name__ == "__main__":
    main()
