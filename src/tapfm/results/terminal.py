"""Tables for the terminal, printed with rich."""

from __future__ import annotations

from rich.table import Table as RichTable
from rich.text import Text

from tapfm.results.table import Cell, Column, Table, cell_detail, cell_text, has_details, missing_text

_RANK_STYLES = {1: "bold", 2: "underline"}


def rich_table(table: Table) -> RichTable:
    """Return a table as a rich table. Texts are not interpreted as markup."""
    shown = table.without_hidden_columns()
    converted = RichTable(
        box=None,
        padding=(0, 2, 0, 0),
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
    )
    for index, column in enumerate(shown.columns):
        left = column.text or has_details(shown, index)  # keeps the values aligned
        title = f"{column.group}, {column.title}" if column.group else column.title
        converted.add_column(Text(title), justify="left" if left else "right")
    for row in shown.rows:
        if row.cells:
            converted.add_row(
                *(_style_cell(cell, column) for cell, column in zip(row.cells, shown.columns, strict=True))
            )
        else:
            converted.add_row(Text(row.heading, style="bold" if row.heading_level == 1 else "italic"))
    return converted


def _style_cell(cell: Cell, column: Column) -> Text:
    text, detail = cell_text(cell, column), cell_detail(cell, column)
    styled = Text().append(text or missing_text(cell), style=_RANK_STYLES.get(cell.rank, ""))
    return styled.append(f" ({detail})") if detail else styled
