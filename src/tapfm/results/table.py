"""A table as a value. `markdown.py`, `latex.py`, `html.py`, `terminal.py` and `table_csv` below write it."""

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
    """The header of a column, and how its numbers are formatted."""

    title: str
    name: str = ""  # in CSV files; empty: the title
    group: str = ""  # header above adjacent columns with the same group
    form: str = ".3f"  # format of floats
    text: bool = False  # left-aligned
    interval: bool = False  # holds estimates: three columns in CSV files
    shown: bool = True  # False: in CSV files only
    interval_form: str = ""  # format of the ends of intervals; empty: as `form`


@dataclass(frozen=True)
class Cell:
    """A value with the rank it has in its column, further details, and why something is missing."""

    value: Value = None
    detail: str = ""  # after the value and its interval, in smaller type
    reason: str = ""
    rank: int = 0  # 1 is printed bold, 2 underlined


@dataclass(frozen=True)
class Row:
    """A row of cells; or a heading without cells, above the rows that belong to it."""

    cells: Sequence[Cell] = ()
    heading: str = ""
    level: Literal[1, 2] = 2  # of a heading


@dataclass(frozen=True)
class Table:
    """A table; its first column names the rows."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    notes: Sequence[str] = ()
    kind: Literal["table"] = "table"

    def shown(self) -> Table:
        """Return the table without the columns that are for CSV files only."""
        places = [place for place, column in enumerate(self.columns) if column.shown]
        rows = [Row([row.cells[place] for place in places]) if row.cells else row for row in self.rows]
        return Table([self.columns[place] for place in places], rows, self.title, self.notes)


def table_row(*values: Value | Cell) -> Row:
    """Return a row of these values."""
    return Row([value if isinstance(value, Cell) else Cell(value) for value in values])


def cell_text(cell: Cell, column: Column) -> str:
    """Return the formatted value of a cell, without its details; empty if there is none."""
    value = cell.value.value if isinstance(cell.value, Estimate) else cell.value
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else format_number(value, column.form)


def missing_text(cell: Cell) -> str:
    """Return what a cell without a value shows: a dash where a number is missing, nothing where there is none."""
    return MISSING if isinstance(cell.value, Estimate) or cell.reason else ""


def cell_detail(cell: Cell, column: Column) -> str:
    """Return the confidence interval and further details of a cell."""
    form = column.interval_form or column.form
    interval = format_interval(cell.value, form) if isinstance(cell.value, Estimate) else ""
    return ", ".join(part for part in (interval, cell.detail) if part)


def has_details(table: Table, place: int) -> bool:
    """Return whether any cell of a column has details."""
    return any(cell_detail(row.cells[place], table.columns[place]) for row in table.rows if row.cells)


def cell_reason(cell: Cell) -> str:
    """Return why something of a cell is missing; empty if nothing is."""
    return cell.reason or (cell.value.reason if isinstance(cell.value, Estimate) else "")


def list_reasons(table: Table) -> list[str]:
    """Return the reasons of all cells of a table, each once."""
    return list(dict.fromkeys(reason for row in table.rows for cell in row.cells if (reason := cell_reason(cell))))


def table_csv(table: Table) -> str:
    """Return a table as CSV: all columns, numbers in full precision, intervals as NAME_low and NAME_high."""
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
        return [_exact(value.value if isinstance(value, Estimate) else value)]
    if isinstance(value, Estimate):
        return [_exact(value.value), _exact(value.low), _exact(value.high)]
    return [_exact(value), "", ""]


def _exact(value: str | float | None) -> str:
    """Write a value so that it can be read back unchanged."""
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)
