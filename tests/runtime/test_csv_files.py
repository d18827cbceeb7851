"""Reading and writing CSV files, and invalid files."""

import csv

import pytest

from tapfm.errors import DiskFullError
from tapfm.runtime import files
from tapfm.runtime.csv_files import csv_line, csv_text, read_csv, read_csv_or_empty, write_csv

COLUMNS = ("slide_id", "tiles", "reason")
ROWS = [
    ["S1", 12, "a, b"],
    ["S2", None, 'it said "no"'],
    ["S3", 0, "two\nlines"],
    ["ü", 1.5, "two\r\nlines"],
    ["", "", ""],
]
READ = [dict(zip(COLUMNS, ["" if cell is None else str(cell) for cell in row], strict=True)) for row in ROWS]


def test_written_table_is_read_back_as_text(tmp_path):
    write_csv(tmp_path / "new" / "table.csv", COLUMNS, ROWS)
    assert read_csv(tmp_path / "new" / "table.csv") == READ
    assert (tmp_path / "new" / "table.csv").read_bytes() == csv_text(COLUMNS, ROWS).encode()


def test_lines_end_with_a_newline_character_only():
    assert csv_text(COLUMNS, ROWS[:2]) == 'slide_id,tiles,reason\nS1,12,"a, b"\nS2,,"it said ""no"""\n'
    assert csv_text(COLUMNS, []) == "slide_id,tiles,reason\n"


def test_rows_can_be_mappings_with_additional_keys():
    rows = [dict(reversed(list(zip(COLUMNS, row, strict=True)))) | {"other": 1} for row in ROWS]
    assert csv_text(COLUMNS, rows) == csv_text(COLUMNS, ROWS)
    with pytest.raises(KeyError):
        csv_text(COLUMNS, [{"slide_id": "S1"}])


@pytest.mark.parametrize("row", ROWS)
def test_csv_line_is_a_row_of_the_table(row):
    assert csv_text(COLUMNS, [row]) == f"slide_id,tiles,reason\n{csv_line(row)}\n"


@pytest.mark.parametrize("content", [b"slide_id\n\xff\n", b"slide_id\n" + b"x" * (csv.field_size_limit() + 1)])
def test_invalid_csv_raises_value_error_or_is_empty(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"decode|limit"):
        read_csv(path)
    assert read_csv_or_empty(path, "slide_id") == []


def test_missing_file_raises_file_not_found_or_is_empty(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_csv(tmp_path / "table.csv")
    assert read_csv_or_empty(tmp_path / "table.csv") == []


def test_read_csv_or_empty_skips_rows_without_the_columns(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("slide_id,tiles,reason\nS1,1,\nS2\nS3,3,gone\n")
    assert [row["slide_id"] for row in read_csv_or_empty(path, *COLUMNS)] == ["S1", "S3"]
    assert [row["slide_id"] for row in read_csv_or_empty(path, "slide_id")] == ["S1", "S2", "S3"]
    assert read_csv_or_empty(path, "slide_id", "another") == []


def test_failed_write_keeps_the_previous_table(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_csv(path, COLUMNS, ROWS)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(DiskFullError):
        write_csv(path, COLUMNS, [])
    assert read_csv(path) == READ
    assert list(tmp_path.iterdir()) == [path], "a temporary file is left"


def test_error_in_rows_keeps_the_previous_table(tmp_path):
    path = tmp_path / "table.csv"
    write_csv(path, COLUMNS, ROWS)
    with pytest.raises(ZeroDivisionError):
        write_csv(path, COLUMNS, ([1 / each] for each in (1, 0)))
    assert read_csv(path) == READ
