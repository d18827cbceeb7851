"""Tables as data. `markdown.py`, `latex.py`, `html.py`, `terminal.py` and `table_csv` below convert them to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tapfm.results.estimate import Estimate
from tapfm.results.formatting import MISSING, format_interval, format_number
from tapfm.runtime.csv_files import csv_text

Value = Estimate | str | int | float | None


@dataclass(frozen=True)
class Column:
    """The header of a column and the format of its values."""

    title: str
    name: str = ""  # in CSV files; the title if empty
    group: str = ""  # header above adjacent columns with the same group
    float_format: str = ".3f"
    text: bool = False  # left-aligned
    interval: bool = False  # contains estimates, which are three columns in CSV files
    shown: bool = True  # False if the column is only in CSV files
    interval_format: str = ""  # format of confidence limits; `float_format` if empty


@dataclass(frozen=True)
class Cell:
    """A value with its rank in the column. `reason` explains a missing value or interval."""

    value: Value = None
    detail: str = ""  # shown in small type after the value and its interval
    reason: str = ""
    rank: int = 0  # 1 (best) is bold, 2 is underlined, 0 is not ranked


@dataclass(frozen=True)
class Row:
    """A row of cells, or a heading without cells above a group of rows."""

    cells: Sequence[Cell] = ()
    heading: str = ""
    heading_level: Literal[1, 2] = 2  # 1: bold, 2: italic


@dataclass(frozen=True)
class Table:
    """A table whose first column contains the row names."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    notes: Sequence[str] = ()
    kind: Literal["table"] = "table"

    def without_hidden_columns(self) -> Table:
        """Return the table without the columns that are only for CSV files."""
        indices = [index for index, column in enumerate(self.columns) if column.shown]
        rows = [Row([row.cells[index] for index in indices]) if row.cells else row for row in self.rows]
        return Table([self.columns[index] for index in indices], rows, self.title, self.notes)


def table_row(*values: Value | Cell) -> Row:
    """Return a row of these values."""
    return Row([value if isinstance(value, Cell) else Cell(value) for value in values])


def cell_text(cell: Cell, column: Column) -> str:
    """Return the formatted value of a cell without its details, or an empty string if it has no value."""
    value = cell.value.value if isinstance(cell.value, Estimate) else cell.value
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else format_number(value, column.float_format)


def missing_text(cell: Cell) -> str:
    """Return the text of a cell without a value: a dash if it has an `Estimate` or a reason, otherwise nothing."""
    return MISSING if isinstance(cell.value, Estimate) or cell.reason else ""


def cell_detail(cell: Cell, column: Column) -> str:
    """Return the confidence interval and further details of a cell."""
    limit_format = column.interval_format or column.float_format
    interval = format_interval(cell.value, limit_format) if isinstance(cell.value, Estimate) else ""
    return ", ".join(part for part in (interval, cell.detail) if part)


def has_details(table: Table, column_index: int) -> bool:
    """Return whether any cell of a column has a confidence interval or further details."""
    column = table.columns[column_index]
    return any(cell_detail(row.cells[column_index], column) for row in table.rows if row.cells)


def cell_reason(cell: Cell) -> str:
    """Return why a value or interval is missing, or a note on excluded resamples; empty if there is neither."""
    return cell.reason or (cell.value.reason if isinstance(cell.value, Estimate) else "")


def list_reasons(table: Table) -> list[str]:
    """Return the distinct texts of `cell_reason` in a table."""
    return list(dict.fromkeys(reason for row in table.rows for cell in row.cells if (reason := cell_reason(cell))))


def table_csv(table: Table) -> str:
    """Return a table as CSV with all columns and full precision. Intervals become NAME_low and NAME_high."""
    header: list[str] = []
    for column in table.columns:
        name = column.name or column.title
        header += [name, f"{name}_low", f"{name}_high"] if column.interval else [name]
    rows = []
    for row in table.rows:
        fields: list[str] = []
        for cell, column in zip(row.cells, table.columns, strict=bool(row.cells)):
            fields += _csv_fields(cell.value, column)
        if row.cells:
            rows.append(fields)
    return csv_text(header, rows)


def _csv_fields(value: Value, column: Column) -> list[str]:
    if not column.interval:
        return [_format_full_precision(value.value if isinstance(value, Estimate) else value)]
    if isinstance(value, Estimate):
        return [
            _format_full_precision(value.value),
            _format_full_precision(value.low),
            _format_full_precision(value.high),
        ]
    return [_format_full_precision(value), "", ""]


def _format_full_precision(value: str | float | None) -> str:
    """Return a value as text without rounding."""
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)
