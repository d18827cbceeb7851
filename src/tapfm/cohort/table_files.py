"""Read table files of all formats as text: CSV, TSV, Excel and the JSON files of nnMIL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tapfm.cohort.columns import is_known_column
from tapfm.cohort.excel_rows import read_excel_rows
from tapfm.cohort.nnmil_tables import (
    class_names,
    describe_classes,
    find_nnmil_csv,
    read_nnmil_document,
    read_plan_rows,
)
from tapfm.cohort.table_text import TABLE_HINT, TableRows, list_some, read_csv_rows
from tapfm.errors import CohortError
from tapfm.runtime.messages import format_count

TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".xlsx", ".json")
_OLD_EXCEL_SIGNATURE = bytes.fromhex("d0cf11e0a1b11ae1")  # .xls, and .xlsx with a password
_ZIP_SIGNATURE = b"PK\x03\x04"
_MAX_ROWS_ABOVE_HEADER = 20  # in which column names are searched, for the error message


@dataclass(frozen=True)
class TextTable:
    """A table as text: the cells of a CSV, TSV, Excel or JSON file."""

    source: Path
    columns: tuple[str, ...]
    records: tuple[tuple[int, dict[str, str]], ...]  # row number in the file, or number of the JSON entry; the cells
    notes: tuple[str, ...] = ()  # choices made when reading, such as the sheet or the encoding
    problems: tuple[tuple[int, str], ...] = ()  # row number and text; rows that cannot be read are not in `records`


def read_text_table(source: Path, encoding: str | None = None) -> TextTable:
    """Read a table file; the content decides the format. Raises CohortError if it cannot be read.

    encoding: of a text file without byte order mark; None for UTF-8, or UTF-16 if that is certain.
    """
    try:
        data = source.read_bytes()
    except OSError as error:
        raise CohortError(f"{source} cannot be read ({error.strerror}).", hint=TABLE_HINT) from error
    if data.startswith(_OLD_EXCEL_SIGNATURE):
        raise CohortError(
            f"{source} is an Excel file in the old format (.xls), or it is protected by a password.",
            hint="Save it as .xlsx without a password, or as CSV.",
        )
    if data.startswith(_ZIP_SIGNATURE):
        return _build_table(source, read_excel_rows(source, data))
    if source.suffix.lower() == ".xlsx" and data:
        raise CohortError(
            f"{source} is not an Excel workbook.",
            hint="If it is a text file, rename it to .csv. Otherwise open it in Excel and save it as .xlsx or CSV.",
        )
    if source.suffix.lower() == ".json":
        return _read_nnmil_table(source, data, encoding)
    return _build_table(source, read_csv_rows(source, data, encoding))


def _read_nnmil_table(source: Path, data: bytes, encoding: str | None) -> TextTable:
    """Read the slides of a JSON file of nnMIL, with the names of their classes instead of the numbers."""
    document, notes = read_nnmil_document(source, data, encoding)
    csv_path = find_nnmil_csv(source, document)
    if csv_path is None:
        table = _build_table(source, read_plan_rows(source, document))
    else:
        table = read_text_table(csv_path, encoding)
        notes = (*notes, f"Reading {csv_path}, the table of {source}.")
    names = class_names(document)
    if "label" in table.columns and names:
        notes = (*notes, *describe_classes(source, names))
        records = tuple(
            (number, cells | {"label": names.get(cells["label"], cells["label"])}) for number, cells in table.records
        )
        table = replace(table, records=records)
    return replace(table, notes=(*notes, *table.notes))


def _build_table(source: Path, table: TableRows) -> TextTable:
    """Name the cells of each row by the header. Columns without a name are ignored."""
    if not table.rows:
        raise CohortError(f"{source} is empty.", hint=TABLE_HINT)
    (header_number, first), *rows = table.rows
    if above := next((each for each in table.problems if each[0] <= header_number), None):
        hint = f"If row {header_number} contains the column names, remove the rows above it. {TABLE_HINT}"
        raise CohortError(
            f"{source}, row {above[0]}: {above[1]}.", hint=hint if above[0] < header_number else TABLE_HINT
        )
    header = _clean_names(first)
    _check_header_is_first(source, header, rows)
    if repeated := sorted(name for name, count in Counter(header).items() if name and count > 1):
        raise CohortError(
            f"{source} has duplicate columns: {', '.join(repeated)}.", hint="Rename or remove all but one of them."
        )
    records, problems, comments = [], list(table.problems), []
    for row_number, cells in rows:
        if _is_comment(cells, len(header)):
            comments.append(row_number)
            continue
        if _clean_names(cells)[: len(header)] == header:
            problems.append((row_number, "repeats the header: remove this row"))
            continue
        if any(cells[len(header) :]):
            problems.append((row_number, f"{len(cells)} fields, but the header has {len(header)} columns"))
            continue
        values = [*cells, *[""] * (len(header) - len(cells))]
        records.append((row_number, {name: text for name, text in zip(header, values, strict=False) if name}))
    notes = [*table.notes, *_describe_unnamed_columns(source, header, rows)]
    if comments:
        listed = list_some([str(number) for number in comments])
        notes.append(f"{source}: skipped {format_count(len(comments), 'row')} with a comment (#): {listed}.")
    return TextTable(source, tuple(filter(None, header)), tuple(records), tuple(notes), tuple(sorted(problems)))


def _clean_names(cells: Sequence[str]) -> list[str]:
    """Return the cells of a header without invisible characters, line breaks and repeated spaces."""
    return [re.sub(r"\s+", " ", name.strip("\ufeff\u200b")).strip() for name in cells]


def _is_comment(cells: Sequence[str], columns: int) -> bool:
    """Return whether a row is a comment: the first cell begins with `# `, or with `#` and the others are empty."""
    return columns > 1 and (cells[0].startswith("# ") or (cells[0].startswith("#") and not any(cells[1:])))


def _check_header_is_first(source: Path, header: Sequence[str], rows: Sequence[tuple[int, list[str]]]) -> None:
    """Raise CohortError if the first row has no known column name, but one of the next rows has several."""
    if any(map(is_known_column, header)):
        return
    for row_number, cells in rows[:_MAX_ROWS_ABOVE_HEADER]:
        if sum(map(is_known_column, cells)) > 1:
            raise CohortError(
                f"{source}: the first row does not contain the column names. Row {row_number} seems to contain them: "
                f"{', '.join(filter(None, cells))}.",
                hint=f"Remove the rows above row {row_number}.",
            )


def _describe_unnamed_columns(source: Path, header: list[str], rows: list[tuple[int, list[str]]]) -> list[str]:
    """Return a note for each ignored column with contents, except row numbers such as pandas writes."""
    filled = sorted({index for _, cells in rows for index, text in enumerate(cells[: len(header)]) if text})
    notes = []
    for index in (index for index in filled if not header[index]):
        texts = [cells[index] if index < len(cells) else "" for _, cells in rows]
        if not any(texts == [str(i + start) for i in range(len(texts))] for start in (0, 1)):
            first = next(filter(None, texts))
            notes.append(f"{source}: column {index + 1} has no name and is ignored. Its first value is {first!r}.")
    return notes
