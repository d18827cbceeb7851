"""Find phrases and names that readers would not search for. `make lint` runs it.

    python tools/check_language.py    # one line `file:line: found; write ...` for each; exit status 1 if there are any

The list is `tools/language.toml`. Phrases are searched in every text file that git does not ignore, names in Python
files only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
PHRASE_LIST = "tools/language.toml"
TEXT_SUFFIXES = {".css", ".html", ".js", ".md", ".mjs", ".py", ".toml", ".ts", ".txt", ".yml"}
EXCLUDED_FILES = {PHRASE_LIST, "tests/test_check_language.py"}
EXCLUDED_FOLDER = "tests/messy_tables/tables/"  # some of its files are not UTF-8
# between the words of a phrase: spaces, line breaks, and what ends or starts a line of a comment, string or quotation
_GAP = r"""[\s#">]+"""


def find_phrases(text: str, replacements: Mapping[str, str]) -> list[str]:
    """Return `LINE: 'found'; write 'replacement'` for each listed phrase, in any case, also across line breaks."""
    patterns = {phrase: rf"(?<![\w-]){_GAP.join(map(re.escape, phrase.split()))}(?![\w-])" for phrase in replacements}
    return _find(text, patterns, replacements, re.IGNORECASE)


def find_identifiers(code: str, replacements: Mapping[str, str]) -> list[str]:
    """Return `LINE: 'found'; write 'replacement'` for each listed name, with or without an underscore in front."""
    return _find(code, {name: rf"(?<!\w)_?{name}(?!\w)" for name in replacements}, replacements, 0)


def _find(text: str, patterns: Mapping[str, str], replacements: Mapping[str, str], flags: int) -> list[str]:
    found = [
        (text.count("\n", 0, match.start()) + 1, phrase)
        for phrase, pattern in patterns.items()
        for match in re.finditer(pattern, text, flags)
    ]
    return [f"{line}: '{phrase}'; write '{replacements[phrase]}'" for line, phrase in sorted(found)]


def main() -> int:
    """Print what was found in the files that git tracks or could add; return the exit status."""
    listed = tomllib.loads((CHECKOUT / PHRASE_LIST).read_text("utf-8"))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout.splitlines()
    total = 0
    for name in sorted(set(names) - EXCLUDED_FILES):
        path = CHECKOUT / name
        is_text = path.suffix in TEXT_SUFFIXES or path.name == "Makefile"
        if name.startswith(EXCLUDED_FOLDER) or not is_text or not path.is_file():
            continue
        text = path.read_text("utf-8")
        found = find_phrases(text, listed["phrases"])
        if path.suffix == ".py":
            found += find_identifiers(text, listed["identifiers"])
        for each in found:
            print(f"{name}:{each}")
        total += len(found)
    if total:
        print(f"{total} phrases or names that readers would not search for; the list is {PHRASE_LIST}.")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
