"""Write tables and sections as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tapfm.results.document import Paragraph, Section
from tapfm.results.figure import Figure
from tapfm.results.numbers import ABSENT
from tapfm.results.table import Cell, Column, Row, Table, cell_detail, cell_reason, cell_text, list_reasons

_RANKS = {1: "**{}**", 2: "<u>{}</u>"}


def markdown_table(table: Table) -> str:
    """Return a table with its notes, and the reasons for what is missing, numbered if there are several."""
    shown = table.shown()
    titles = [f"{column.group}, {column.title}" if column.group else column.title for column in shown.columns]
    lines = [f"**{_escape(table.title)}**", ""] if table.title else []
    lines.append(_line(map(_escape, titles)))
    lines.append(f"|{'|'.join('---' if column.text else '--:' for column in shown.columns)}|")
    reasons = list_reasons(shown)
    numbers = {reason: f"<sup>{number}</sup>" for number, reason in enumerate(reasons, 1)} if len(reasons) > 1 else {}
    lines += [_row_line(row, shown.columns, numbers) for row in shown.rows]
    missing = [f"{numbers[reason]} {reason}" if numbers else reason for reason in reasons]
    paragraphs = [*table.notes, *([f"Missing: {'; '.join(missing)}."] if reasons else [])]
    lines += [line for paragraph in paragraphs for line in ("", paragraph)]
    return "\n".join(lines) + "\n"


def _row_line(row: Row, columns: Sequence[Column], numbers: Mapping[str, str]) -> str:
    if not row.cells:
        mark = "**" if row.level == 1 else "*"
        return _line([f"{mark}{_escape(row.heading)}{mark}", *[""] * (len(columns) - 1)])
    cells = zip(row.cells, columns, strict=True)
    return _line(_cell(cell, column) + numbers.get(cell_reason(cell), "") for cell, column in cells)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell, column: Column) -> str:
    text, detail = _escape(cell_text(cell, column)), _escape(cell_detail(cell, column))
    if not text:
        return detail or ("" if cell.value is None and not cell.why else ABSENT)
    ranked = _RANKS.get(cell.rank, "{}").format(text)
    return f"{ranked} ({detail})" if detail else ranked


def _escape(text: str) -> str:
    """Keep a text from ending its cell or its line."""
    return " ".join(text.split()).replace("|", "\\|")


def markdown_sections(title: str, sections: Sequence[Section], figure_files: Mapping[str, str]) -> str:
    """Return a page; `figure_files` has the file of each figure, by title."""
    lines = [f"# {title}", ""]
    for section in sections:
        if section.title:
            lines += [f"## {section.title}", ""]
        for block in section.blocks:
            if isinstance(block, Paragraph):
                lines += [block.text, ""]
            elif isinstance(block, Figure):
                lines += [f"![{block.title}]({figure_files[block.title]})", ""]
            else:
                lines += [markdown_table(block)]
    return "\n".join(lines).rstrip() + "\n"
