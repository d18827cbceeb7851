"""Text tables: decode the bytes of a CSV or TSV file, and split its text into rows."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfm.errors import CohortError, SettingError

TABLE_HINT = (
    "A cohort table is a CSV, TSV or Excel (.xlsx) file whose first row contains the column names: slide_id,path"
)
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is a part of it
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MIN_UTF16_ZEROS = 0.4  # fraction of NUL bytes among all even or all odd bytes, from which a file is UTF-16
_UTF16_SAMPLE_BYTES = 4096
_DELIMITERS = ",\t;|"
_MAX_DELIMITER_LINES = 20
_MAX_NAMED = 3  # ids, cells or patients named in one message


@dataclass(frozen=True)
class TableRows:
    """The rows of a table file as lists of cells, with their row numbers in the file; the first one is the header."""

    rows: list[tuple[int, list[str]]]
    notes: tuple[str, ...] = ()
    problems: tuple[tuple[int, str], ...] = ()  # rows that cannot be read and are not in `rows`


def read_csv_rows(source: Path, data: bytes, encoding: str | None) -> TableRows:
    """Return the rows of a CSV or TSV file, without blank ones."""
    text, notes = decode_text(source, data, encoding)
    lines = text.split("\n")
    filled = [index for index, line in enumerate(lines) if line.strip()]
    first_row = next(iter(filled), 0)
    if re.match(r"\s*<(!doctype|html|head|body|table|\?xml)\b", lines[first_row], re.IGNORECASE):
        raise CohortError(
            f"{source} is a web page (HTML or XML), not a table, although its name ends in {source.suffix}.",
            hint="Open it in Excel or LibreOffice and save it as .xlsx or CSV.",
        )
    if _is_comment(lines[first_row]):
        first_comment, first_row = first_row, next((index for index in filled if not _is_comment(lines[index])), 0)
        notes = (*notes, f"{source}: rows {first_comment + 1} to {first_row} begin with # and are skipped.")
    delimiter = _choose_delimiter(lines[first_row], lines[first_row + 1 : first_row + _MAX_DELIMITER_LINES])
    if declared := re.fullmatch(r"sep=(.)\s*", lines[first_row], flags=re.IGNORECASE):  # Excel writes and reads this
        delimiter, first_row = declared[1], first_row + 1
    reader = csv.reader(io.StringIO("\n".join(lines[first_row:])), delimiter=delimiter, strict=True)
    rows = []
    try:
        for record in reader:
            cells = [cell.strip() for cell in record]
            if any(cells):
                rows.append((reader.line_num + first_row, cells))
    except csv.Error as error:
        raise CohortError(
            f"{source}, row {reader.line_num + first_row}: not a valid CSV file ({error}).", hint=TABLE_HINT
        ) from error
    _check_delimiter_of_rows(source, delimiter, [cells for _, cells in rows])
    return TableRows(rows, notes)


def _check_delimiter_of_rows(source: Path, delimiter: str, rows: Sequence[Sequence[str]]) -> None:
    """Raise CohortError if the header has several columns, and all rows have one cell with another delimiter."""
    if len(rows) < 2 or len(rows[0]) < 2 or any(len(cells) > 1 for cells in rows[1:]):
        return
    for other in _DELIMITERS:
        if other != delimiter and all(other in cells[0] for cells in rows[1:]):
            raise CohortError(
                f"{source}: the header is separated by {delimiter!r}, but the rows are separated by {other!r}.",
                hint="Use the same delimiter in all rows.",
            )


def _is_comment(line: str) -> bool:
    """Return whether a line above the header is a comment, as in files of cBioPortal; not a column named `#`."""
    return bool(re.match(r"\s*#[^,;\t|]", line))


def _choose_delimiter(header: str, lines: Sequence[str]) -> str:
    """Return the most frequent delimiter of the header, or of the next lines if it has none, outside of quotes."""
    header, below = (re.sub(r'"[^"]*"', "", text) for text in (header, "\n".join(lines)))
    return max(_DELIMITERS, key=lambda delimiter: (header.count(delimiter), below.count(delimiter)))


def decode_text(source: Path, data: bytes, encoding: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the text of a file with line ends as `\\n`, and notes about its encoding.

    encoding: of a file without byte order mark; None for UTF-8, or UTF-16 if that is certain.
    """
    marked = next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), None)
    text, notes = _decode_bytes(source, data, encoding, marked)
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        row_number = text[: text.index("\0")].count("\n") + 1
        raise CohortError(f"{source}, row {row_number}: contains a NUL byte; it is not a text file.", hint=TABLE_HINT)
    return text, notes


def _decode_bytes(source: Path, data: bytes, encoding: str | None, marked: str | None) -> tuple[str, tuple[str, ...]]:
    """Decode a file by its byte order mark, the given encoding, or as UTF-8."""
    given = _encoding_name(encoding) if encoding is not None else None
    detected = marked or (None if given else _detect_utf16(data))
    name = detected or given or "utf-8"
    try:
        text = data.decode(name)
    except UnicodeError as error:
        position = error.start if isinstance(error, UnicodeDecodeError) else 0
        if name == "utf-8":
            raise _not_utf8(source, data, position) from error
        raise CohortError(
            f"{source}, row {_row_of_byte(data, position)}: not valid in the encoding {name}.",
            hint="Pass the encoding with which the file was saved, for example --encoding cp1252 (Windows).",
        ) from error
    if marked and given and not given.startswith(marked):
        return text, (f"{source} was read as {marked.upper()} because it begins with a byte order mark.",)
    if detected and detected != "utf-8":
        return text, (f"{source} was read as {detected.upper()}.",)
    if given and name != "utf-8" and not data.isascii() and _is_utf8(data):
        return text, (f"{source} was read as {given}, but it is also valid UTF-8: then remove --encoding.",)
    return text, ()


def _encoding_name(encoding: str) -> str:
    """Return the standard name of an encoding. Raises SettingError if it is unknown."""
    try:
        "a".encode(encoding)  # rejects codecs that are not for text
        return codecs.lookup(encoding).name
    except (LookupError, ValueError) as error:
        raise SettingError(
            f"'{encoding}' is not the name of a text encoding.",
            hint="Common ones: utf-8, utf-16, cp1252 (Windows), cp1250 (Windows, Central Europe), latin-1, mac-roman.",
        ) from error


def _detect_utf16(data: bytes) -> str | None:
    """Return the byte order of UTF-16 without a byte order mark, or None if the file does not look like that."""
    sample = data[:_UTF16_SAMPLE_BYTES]
    if len(data) % 2 or not sample:
        return None
    even, odd = sample[::2].count(0) / len(sample[::2]), sample[1::2].count(0) / len(sample[1::2])
    if even == 0 and odd >= _MIN_UTF16_ZEROS:
        return "utf-16-le"
    return "utf-16-be" if odd == 0 and even >= _MIN_UTF16_ZEROS else None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _row_of_byte(data: bytes, position: int) -> int:
    """Return the number of the row that contains a byte."""
    return len(re.findall(rb"\r\n|\r|\n", data[:position])) + 1


def _not_utf8(source: Path, data: bytes, position: int) -> CohortError:
    """Return the error about a byte that is not UTF-8, with its field as Windows-1252 would show it."""
    start = max(data.rfind(each, 0, position) for each in (b",", b"\t", b";", b"\n", b"\r")) + 1
    field = re.split(rb"[,;\t\r\n]", data[start : position + 60])[0][:80].decode("cp1252", errors="replace")
    return CohortError(
        f"{source}, row {_row_of_byte(data, position)}: byte {position + 1:,} of the file (0x{data[position]:02X}) is "
        f"not UTF-8. In Windows-1252, this cell is {field.strip()!r}.",
        hint="Pass --encoding cp1252 (Windows) or --encoding latin-1, or save the file as UTF-8.",
    )


def list_some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
