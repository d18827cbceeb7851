"""Markdown helpers for the reference pages: tables, code and escaped text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

LINE_WIDTH = 120  # of a paragraph

# characters with a meaning in Markdown or HTML, outside code
_SPECIAL_CHARACTERS = re.compile(r"[<*_\[\]`]")
_CODE_OR_LINK = re.compile(r"`[^`]+`|\[[^\]]+\]\([^()\s]+\)")


def escape_text(text: str) -> str:
    """Return text on one line with Markdown escaped; code in backticks and links stay unchanged."""
    line, position, parts = " ".join(text.split()), 0, list[str]()
    for match in _CODE_OR_LINK.finditer(line):
        parts += [_escape(line[position : match.start()]), match[0]]
        position = match.end()
    return "".join([*parts, _escape(line[position:])])


def _escape(text: str) -> str:
    return _SPECIAL_CHARACTERS.sub(lambda match: "&lt;" if match[0] == "<" else f"\\{match[0]}", text)


def code(text: str) -> str:
    """Return text as inline code."""
    return f"`{text}`"


def code_list(choices: Iterable[str]) -> str:
    """Return choices as inline code, separated by commas."""
    return ", ".join(code(choice) for choice in choices)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [_format_row(header), "|" + "---|" * len(header)]
    return [*lines, *(_format_row(row) for row in rows)]


def _format_row(cells: Sequence[str]) -> str:
    # Markdown renderers disagree about bars inside cells: some split the cell, others show the escape
    if any("|" in cell for cell in cells):
        raise ValueError(f"A table cell must not contain a bar (|): {cells}")
    return f"| {' | '.join(cells)} |"


def format_paragraph(text: str) -> list[str]:
    """Return the lines of a paragraph, with Markdown escaped."""
    return textwrap.wrap(escape_text(text), LINE_WIDTH, break_long_words=False, break_on_hyphens=False)


def format_code_block(text: str) -> list[str]:
    """Return the lines of an indented code block."""
    return [f"    {line}".rstrip() for line in text.splitlines()]


def format_page(*blocks: Sequence[str]) -> str:
    """Join blocks of lines with empty lines between them."""
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
