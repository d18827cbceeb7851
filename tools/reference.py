"""Generate the pages of docs/reference from the code: commands, configuration, file formats.

    python tools/reference.py                write all pages
    python tools/reference.py --check        list outdated pages without writing them; exit status 1 if there are any

File formats are read from sample files, which takes about half a minute.
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

from reference_commands import generate_commands_page
from reference_configuration import generate_configuration_page
from reference_formats import generate_formats_page
from reference_samples import create_sample_files

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MAX_DIFF_LINES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="list outdated pages without writing them")
    parser.add_argument("--only", choices=PAGES, action="append", help="generate only this page; may be repeated")
    arguments = parser.parse_args()
    outdated = False
    for name in arguments.only or PAGES:
        text, path = PAGES[name](), FOLDER / name
        before = path.read_text("utf-8") if path.exists() else ""
        if text == before:
            continue
        outdated = True
        if arguments.check:
            print(f"{path} is outdated. Run: make docs")
            lines = difflib.unified_diff(
                before.splitlines(), text.splitlines(), "committed", "generated", lineterm="", n=0
            )
            print(*itertools.islice(lines, MAX_DIFF_LINES), sep="\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            print(f"written: {path}")
    sys.exit(1 if outdated and arguments.check else 0)


def _generate_formats_page_with_samples() -> str:
    with tempfile.TemporaryDirectory() as folder:
        samples, cache = Path(folder, "samples"), Path(folder, "cache")
        os.environ["TAPFM_CACHE"] = str(cache)  # do not use the cache of the user
        samples.mkdir()
        create_sample_files(samples)
        return generate_formats_page(samples)


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": generate_commands_page,
    "configuration.md": generate_configuration_page,
    "file-formats.md": _generate_formats_page_with_samples,
}


if __name__ == "__main__":
    main()
