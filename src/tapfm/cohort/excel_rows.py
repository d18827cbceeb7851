"""Read the rows of an Excel workbook as a user sees them: 7 and not 7.0, 007 if the number format shows that."""

from __future__ import annotations

import datetime
import io
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapfm.cohort.table_text import TABLE_HINT, TableRows, list_some
from tapfm.errors import CohortError
from tapfm.runtime.messages import format_count

if TYPE_CHECKING:
    from openpyxl.cell import Cell
    from openpyxl.workbook import Workbook
    from openpyxl.worksheet.worksheet import Worksheet

_SAVE_HINT = "Open it in Excel or LibreOffice and save it as .xlsx or CSV."
_MAX_EXACT_DIGITS = 15  # Excel rounds numbers with more digits
# Number formats of ids: 000, "P"000 or P-000. The other characters are shown as they are.
_ID_FORMAT = re.compile(r'(?P<before>(?:"[^"]*"|\\.|-)*)(?P<zeros>0+)(?P<after>(?:"[^"]*"|\\.|-)*)')


def read_excel_rows(source: Path, data: bytes) -> TableRows:
    """Return the rows of the first visible sheet that has data, without blank rows."""
    workbook = _load_workbook(source, data, data_only=False)
    sheets = [sheet for sheet in workbook.worksheets if _filled_cells(sheet)]
    if not sheets:
        raise CohortError(f"{source} is empty.", hint=TABLE_HINT)
    sheet = next((each for each in sheets if each.sheet_state == "visible"), sheets[0])
    notes = []
    if others := [each.title for each in sheets if each is not sheet]:
        named = ", ".join(f"'{name}'" for name in others)
        notes.append(f"{source}: the sheet '{sheet.title}' was read. Other sheets with data: {named}.")
    if formulas := [cell.coordinate for cell in _filled_cells(sheet) if cell.data_type == "f"]:
        sheet = _load_workbook(source, data, data_only=True)[sheet.title]
    problems = [*_missing_results(sheet, formulas), *_merged_rows(sheet)]
    unusable = {row_number for row_number, _ in problems}
    cells = [cell for cell in _filled_cells(sheet) if cell.row not in unusable]
    texts_by_row: dict[int, dict[int, str]] = {}
    for cell in cells:
        texts_by_row.setdefault(cell.row, {})[cell.column] = _cell_text(cell)
    header, width = min(texts_by_row, default=0), max((cell.column for cell in cells), default=0)
    rows = [
        (row, [texts.get(column + 1, "") for column in range(width if row == header else max(texts))])
        for row, texts in texts_by_row.items()
    ]
    notes += _describe_doubtful_cells(source, sheet, [cell for cell in cells if cell.row != header])
    return TableRows(rows, tuple(notes), tuple(sorted(problems)))


def _load_workbook(source: Path, data: bytes, *, data_only: bool) -> Workbook:
    from openpyxl import load_workbook

    try:
        with warnings.catch_warnings():
            # about parts of a workbook that are not cells, such as data validation or missing styles
            warnings.filterwarnings("ignore", category=UserWarning, module=r"openpyxl\.")
            return load_workbook(io.BytesIO(data), data_only=data_only)
    except Exception as error:  # openpyxl checks little, so that a damaged file may raise anything
        raise CohortError(f"{source} is not an Excel workbook, or it is damaged ({error}).", hint=_SAVE_HINT) from error


def _filled_cells(sheet: Worksheet) -> list[Cell]:
    """Return the cells with text, by row and column."""
    # the public iterators create all cells up to the last one, billions if a stray one is in the last row and column
    return [cell for _, cell in sorted(sheet._cells.items()) if _cell_text(cell)]


def _cell_text(cell: Cell) -> str:
    """Return the text of a cell."""
    value: Any = cell.value
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return _number_text(value, cell.number_format)
    if isinstance(value, datetime.datetime):
        return str(value.date() if value.time() == datetime.time() else value)
    return str(value).strip()


def _number_text(value: float, number_format: str) -> str:
    if not float(value).is_integer():
        return f"{value:.{_MAX_EXACT_DIGITS}g}"
    digits = str(int(value))
    if value >= 0 and (id_format := _parse_id_format(number_format)):
        before, after = (re.sub(r'"|\\(?=.)', "", id_format[name]) for name in ("before", "after"))
        return before + digits.zfill(len(id_format["zeros"])) + after
    return digits


def _parse_id_format(number_format: str) -> re.Match[str] | None:
    """Return the parts of a number format that shows leading zeros or a prefix."""
    match = _ID_FORMAT.fullmatch(number_format)
    return match if match and (match["before"] or len(match["zeros"]) > 1) else None


def _missing_results(sheet: Worksheet, formulas: list[str]) -> list[tuple[int, str]]:
    """Return a problem for each formula without a stored result; an empty text is a result."""
    cells = (sheet[coordinate] for coordinate in formulas)
    return [
        (cell.row, f"the formula in cell {cell.coordinate} has no stored result: open the file in Excel and save it")
        for cell in cells
        if cell.value is None and cell.data_type != "str"
    ]


def _merged_rows(sheet: Worksheet) -> list[tuple[int, str]]:
    """Return a problem for each row with merged cells: only the first of them has a value."""
    filled = sorted({cell.row for cell in _filled_cells(sheet)})
    return [
        (row, f"the cells {merged.coord} are merged: unmerge them and fill in each cell")
        for merged in sheet.merged_cells.ranges
        if _cell_text(sheet.cell(merged.min_row, merged.min_col))
        for row in filled
        if merged.min_row <= row <= merged.max_row
    ]


def _describe_doubtful_cells(source: Path, sheet: Worksheet, cells: list[Cell]) -> list[str]:
    """Return notes about cells whose text may differ from what was typed or is shown, and about hidden rows."""
    text_columns = {cell.column for cell in cells if cell.data_type == "s"}
    names_by_kind: dict[str, list[str]] = {}
    for cell in cells:
        if kind := _describe_doubt(cell, has_text=cell.column in text_columns):
            names_by_kind.setdefault(kind, []).append(cell.coordinate)
    notes = [f"{source}: {kind}: {list_some(names)}." for kind, names in names_by_kind.items()]
    filled = {cell.row for cell in cells}
    if hidden := sum(each.hidden for row, each in sheet.row_dimensions.items() if row in filled):
        notes.append(f"{source}: also read {format_count(hidden, 'hidden row')}.")
    return notes


def _describe_doubt(cell: Cell, *, has_text: bool) -> str:
    """Return why the text of a cell may not be what was meant, or an empty text.

    has_text: the column also has cells with text.
    """
    if cell.data_type == "d" and has_text:
        return "dates in a column with text; Excel may have converted them from ids"
    if cell.data_type == "n" and abs(cell.value) >= 10**_MAX_EXACT_DIGITS:
        return "numbers with more than 15 digits, which Excel rounds"
    if cell.data_type == "n" and _changes_digits(cell.number_format):
        return f"numbers with the format {cell.number_format}, read without it"
    return ""


def _changes_digits(number_format: str) -> bool:
    """Return whether a number format shows leading zeros or text that `_number_text` does not apply."""
    section = re.sub(r"\[[^\]]*\]", "", number_format.split(";")[0])
    return _parse_id_format(number_format) is None and bool(re.match(r'0[0-]|.*"[^"]*\w|0.*\\', section))
