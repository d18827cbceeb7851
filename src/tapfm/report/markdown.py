"""The little Markdown that tapfm's own tables are written in, as blocks of a report."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup, escape

from tapfm.report.content import Block, Cell, Column, Note, RankMark, Row, Table

_MARKS = (
    (re.compile(r"\*\*(.+?)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"`(.+?)`"), r"<code>\1</code>"),
)


def inline(text: str) -> Markup:
    """Escape a text, and show its **bold** and `code`."""
    escaped = str(escape(text))
    for pattern, shown in _MARKS:
        escaped = pattern.sub(shown, escaped)
    return Markup(escaped)  # what came in is escaped; only our own marks were added


def blocks_of(text: str) -> list[Block]:
    """Read tables and paragraphs; pictures, which are files, are left out."""
    blocks: list[Block] = []
    for part in re.split(r"\n\s*\n", text.strip()):
        lines = [line for line in part.splitlines() if line.strip() and not line.startswith("![")]
        table = [line for line in lines if line.startswith("|")]
        if len(table) >= 2:
            blocks.append(_table_of(table))
        blocks += [Note(inline(line.removeprefix("- "))) for line in lines if not line.startswith("|")]
    return blocks


def _table_of(lines: Sequence[str]) -> Table:
    """Read a table of pipes."""
    head, alignment, *rest = [_cells_of(line) for line in lines]
    words = [not mark.strip().endswith(":") for mark in alignment]
    columns = [Column(title, words=each) for title, each in zip(head, words, strict=False)]
    rows = []
    for cells in rest:
        if len(cells) > 1 and not any(cells[1:]) and cells[0].startswith("*"):
            rows.append(Row(heading=cells[0].strip("*")))
        else:
            rows.append(Row([_cell_of(cell) for cell in cells]))
    return Table(columns, rows)


def _cells_of(line: str) -> list[str]:
    """Part a line at its pipes; those of data are written with a backslash."""
    parts = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [part.strip().replace("\\|", "|") for part in parts]


def _cell_of(text: str) -> Cell:
    """Read one cell: **best**, <u>second</u>."""
    mark: RankMark = "best" if text.startswith("**") else "second" if text.startswith("<u>") else ""
    return Cell(re.sub(r"\*\*|</?u>", "", text), mark=mark)
