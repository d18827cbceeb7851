"""Markdown for the reference: tables, code, and words that stay what they are."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120  # of a paragraph

# what Markdown or HTML would take for something else, outside code
SPECIAL = re.compile(r"[<*_\[\]`]")
KEPT = re.compile(r"`[^`]+`|\[[^\]]+\]\([^()\s]+\)")


def prose(text: str) -> str:
    """Write words on one line so that they come out as they are; code between backticks and links stay."""
    words, place, parts = " ".join(text.split()), 0, list[str]()
    for kept in KEPT.finditer(words):
        parts += [escaped(words[place : kept.start()]), kept[0]]
        place = kept.end()
    return "".join([*parts, escaped(words[place:])])


def escaped(text: str) -> str:
    """Escape what has a meaning in Markdown."""
    return SPECIAL.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", text)


def code(text: str) -> str:
    """Write something to type."""
    return f"`{text}`"


def any_of(choices: Iterable[str]) -> str:
    """Write choices as code, with commas."""
    return ", ".join(code(each) for each in choices)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table."""
    lines = [row_text(header), "|" + "---|" * len(header)]
    return [*lines, *(row_text(row) for row in rows)]


def row_text(cells: Sequence[str]) -> str:
    """Write one row; a bar within a cell would be a border in one reader, and show its escape in another."""
    if any("|" in each for each in cells):
        raise ValueError(f"there is a bar in {cells}")
    return f"| {' | '.join(cells)} |"


def paragraph(text: str) -> list[str]:
    """Write words as lines."""
    return textwrap.wrap(prose(text), WIDTH, break_long_words=False, break_on_hyphens=False)


def indented(text: str) -> list[str]:
    """Write lines as they are."""
    return [f"    {line}".rstrip() for line in text.splitlines()]


def page(*blocks: Sequence[str]) -> str:
    """Put blocks of lines below each other."""
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
