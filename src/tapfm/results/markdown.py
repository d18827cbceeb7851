"""Tables and sections as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tapfm.results.document import Paragraph, Section
from tapfm.results.figure import Figure
from tapfm.results.table import (
    Cell,
    Column,
    Row,
    Table,
    cell_detail,
    cell_reason,
    cell_text,
    list_reasons,
    missing_text,
)

_RANK_FORMATS = {1: "**{}**", 2: "<u>{}</u>"}


def markdown_table(table: Table) -> str:
    """Return a table with its notes. Reasons for missing values become footnotes."""
    shown = table.without_hidden_columns()
    reasons = list_reasons(shown)
    titles = [f"{column.group}, {column.title}" if column.group else column.title for column in shown.columns]
    lines = [f"**{_escape_markdown(table.title)}**", ""] if table.title else []
    lines.append(_join_cells(map(_escape_markdown, titles)))
    lines.append(f"|{'|'.join('---' if column.text else '--:' for column in shown.columns)}|")
    lines += [_markdown_row(row, shown.columns, reasons) for row in shown.rows]
    footnotes = [f"<sup>{number}</sup> {reason}" for number, reason in enumerate(reasons, start=1)]
    lines += [line for paragraph in (*footnotes, *table.notes) for line in ("", paragraph)]
    return "\n".join(lines) + "\n"


def _markdown_row(row: Row, columns: Sequence[Column], reasons: Sequence[str]) -> str:
    if not row.cells:
        mark = "**" if row.heading_level == 1 else "*"
        return _join_cells([f"{mark}{_escape_markdown(row.heading)}{mark}", *[""] * (len(columns) - 1)])
    return _join_cells(_markdown_cell(cell, column, reasons) for cell, column in zip(row.cells, columns, strict=True))


def _join_cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: Cell, column: Column, reasons: Sequence[str]) -> str:
    text, detail, reason = (
        _escape_markdown(cell_text(cell, column)),
        _escape_markdown(cell_detail(cell, column)),
        cell_reason(cell),
    )
    mark = f" <sup>{reasons.index(reason) + 1}</sup>" if reason else ""
    if not text:
        return (detail or missing_text(cell)) + mark
    ranked = _RANK_FORMATS.get(cell.rank, "{}").format(text)
    return (f"{ranked} ({detail})" if detail else ranked) + mark


def _escape_markdown(text: str) -> str:
    """Return the text on one line, with escaped pipes."""
    return " ".join(text.split()).replace("|", "\\|")


def markdown_sections(title: str, sections: Sequence[Section], figure_files: Mapping[str, str]) -> str:
    """Return sections as a page. `figure_files` maps titles of figures to image files."""
    lines = [f"# {title}", ""]
    for section in sections:
        if section.title:
            lines += [f"## {section.title}", ""]
        for block in section.blocks:
            if isinstance(block, Paragraph):
                lines += [f"**{block.text}**" if block.warning else block.text, ""]
            elif isinstance(block, Figure):
                lines += [f"![{block.title}]({figure_files[block.title]})", ""]
            else:
                lines += [markdown_table(block)]
    return "\n".join(lines).rstrip() + "\n"
