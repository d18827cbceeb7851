"""CSV files: what is written is read back; a file that cannot be read is an error, or is ignored."""

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


def test_what_is_written_is_read_back_as_text(tmp_path):
    write_csv(tmp_path / "new" / "table.csv", COLUMNS, ROWS)
    assert read_csv(tmp_path / "new" / "table.csv") == READ
    assert (tmp_path / "new" / "table.csv").read_bytes() == csv_text(COLUMNS, ROWS).encode()


def test_lines_end_alike_everywhere():
    assert csv_text(COLUMNS, ROWS[:2]) == 'slide_id,tiles,reason\nS1,12,"a, b"\nS2,,"it said ""no"""\n'
    assert csv_text(COLUMNS, []) == "slide_id,tiles,reason\n"


def test_rows_may_be_mappings_in_any_order_with_other_keys():
    rows = [dict(reversed(list(zip(COLUMNS, row, strict=True)))) | {"other": 1} for row in ROWS]
    assert csv_text(COLUMNS, rows) == csv_text(COLUMNS, ROWS)
    with pytest.raises(KeyError):
        csv_text(COLUMNS, [{"slide_id": "S1"}])


@pytest.mark.parametrize("row", ROWS)
def test_a_line_is_that_of_the_table_without_its_ending(row):
    assert csv_text(COLUMNS, [row]) == f"slide_id,tiles,reason\n{csv_line(row)}\n"


@pytest.mark.parametrize("content", [b"slide_id\n\xff\n", b"slide_id\n" + b"x" * (csv.field_size_limit() + 1)])
def test_what_is_no_text_or_no_csv_is_a_value_error_and_recalls_nothing(tmp_path, content):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"decode|limit"):
        read_csv(path)
    assert read_csv_or_empty(path, "slide_id") == []


def test_a_file_that_is_not_there_is_an_os_error_and_recalls_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_csv(tmp_path / "table.csv")
    assert read_csv_or_empty(tmp_path / "table.csv") == []


def test_rows_without_the_columns_are_not_recalled(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("slide_id,tiles,reason\nS1,1,\nS2\nS3,3,gone\n")
    assert [row["slide_id"] for row in read_csv_or_empty(path, *COLUMNS)] == ["S1", "S3"]
    assert [row["slide_id"] for row in read_csv_or_empty(path, "slide_id")] == ["S1", "S2", "S3"]
    assert read_csv_or_empty(path, "slide_id", "another") == []


def test_a_table_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_csv(path, COLUMNS, ROWS)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(DiskFullError):
        write_csv(path, COLUMNS, [])
    assert read_csv(path) == READ
    assert list(tmp_path.iterdir()) == [path], "something unfinished is left"


def test_rows_that_fail_leave_the_table_before(tmp_path):
    path = tmp_path / "table.csv"
    write_csv(path, COLUMNS, ROWS)
    with pytest.raises(ZeroDivisionError):
        write_csv(path, COLUMNS, ([1 / each] for each in (1, 0)))
    assert read_csv(path) == READ
