"""Read CSV files as one dict per row, and write them atomically with Unix line endings."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.runtime.files import write_atomically


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> str:
    """Return a table as CSV text. A row is a sequence in column order, or a mapping by column. None: empty cell."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([row[name] for name in columns] if isinstance(row, Mapping) else row)
    return text.getvalue()


def csv_line(cells: Sequence[Any]) -> str:
    """Return one row as CSV, without a line ending."""
    return csv_text(cells, ()).removesuffix("\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> None:
    """Write a table to a CSV file atomically."""
    write_atomically(path, csv_text(columns, rows).encode())


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file that tapfm wrote.

    Raises OSError if the file cannot be opened, and ValueError if it is not valid CSV in UTF-8.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheet programs add a byte order mark
        try:
            return list(csv.DictReader(file))
        except csv.Error as error:
            raise ValueError(str(error)) from error


def read_csv_or_empty(path: Path, *required_columns: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, or an empty list if it cannot be read.

    A row that ends before one of the required columns is omitted.
    """
    try:
        rows = read_csv(path)
    except (OSError, ValueError):
        return []
    return [row for row in rows if all(row.get(name) is not None for name in required_columns)]
