"""Read tables of all file formats and encodings as text."""

import datetime
import zipfile

import pytest
from openpyxl import Workbook
from openpyxl.styles import Font
from openpyxl.worksheet.datavalidation import DataValidation

from tapfm.cohort.table_files import read_text_table
from tapfm.errors import CohortError, SettingError

TEXT = "slide_id,Städte\n007,Köln\n8,\n"
RECORDS = ((2, {"slide_id": "007", "Städte": "Köln"}), (3, {"slide_id": "8", "Städte": ""}))


def write(folder, content, name="cohort.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_sheet(folder, rows, name="cohort.xlsx"):
    workbook = Workbook()
    for row in rows:
        workbook.active.append(row)
    workbook.save(folder / name)
    return folder / name


# --- text ---


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_unicode_is_detected(tmp_path, encoding):
    table = read_text_table(write(tmp_path, TEXT.encode(encoding)))
    assert (table.columns, table.records, table.problems) == (("slide_id", "Städte"), RECORDS, ())
    assert bool(table.notes) == (not encoding.startswith("utf-8"))


@pytest.mark.parametrize(("mark", "encoding"), [(b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")])
def test_both_byte_orders_of_utf16(tmp_path, mark, encoding):
    assert read_text_table(write(tmp_path, mark + TEXT.encode(encoding))).records == RECORDS


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "Windows-1252", "mac-roman"])
def test_other_encodings_by_name(tmp_path, encoding):
    table = read_text_table(write(tmp_path, TEXT.encode(encoding)), encoding)
    assert (table.records, table.notes) == (RECORDS, ())


def test_text_that_is_not_utf8(tmp_path):
    with pytest.raises(CohortError, match=r"cohort\.csv, row 3: byte 20 .*0xFC.*'Müller'") as caught:
        read_text_table(write(tmp_path, "id,name\r\n1,Mai\r\n2,Müller,x\r\n".encode("cp1252")))
    assert "--encoding cp1252" in caught.value.hint
    assert "--encoding latin-1" in caught.value.hint


@pytest.mark.parametrize("name", ["cp12", "rot13", "base64", "", "a\0b"])
def test_unknown_encoding(tmp_path, name):
    with pytest.raises(SettingError, match="not the name of a text encoding") as caught:
        read_text_table(write(tmp_path, TEXT), name)
    assert "cp1252" in caught.value.hint


def test_text_that_is_not_in_the_given_encoding(tmp_path):
    with pytest.raises(CohortError, match=r"row 2: not valid in the encoding ascii"):
        read_text_table(write(tmp_path, "slide_id,b\n1,ä\n"), "ascii")


def test_byte_order_mark_wins_over_encoding(tmp_path):
    table = read_text_table(write(tmp_path, TEXT.encode("utf-8-sig")), "cp1252")
    assert table.records == RECORDS
    assert "UTF-8" in table.notes[0]
    for same in ("utf-8", "utf8", "utf-8-sig"):
        assert read_text_table(write(tmp_path, TEXT.encode("utf-8-sig")), same).notes == ()


def test_utf8_read_with_another_encoding_as_requested(tmp_path):
    table = read_text_table(write(tmp_path, TEXT), "latin-1")
    assert table.columns[1] == "StÃ¤dte"
    assert "also valid UTF-8" in table.notes[0]
    assert read_text_table(write(tmp_path, "slide_id\n1\n"), "latin-1").notes == ()


@pytest.mark.parametrize("content", [b"slide_id,a\n1,\0\n", b"slide_id,a\n1,\0x\n2,x\n\0"])
def test_nul_bytes(tmp_path, content):
    with pytest.raises(CohortError, match="row 2: contains a NUL byte"):
        read_text_table(write(tmp_path, content))


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_line_ends_and_delimiters(tmp_path, line_end, delimiter):
    lines = ["", "slide_id,label", "", " 007 , a ", ",", "8"]
    table = read_text_table(write(tmp_path, line_end.join(lines).replace(",", delimiter)))
    assert table.columns == ("slide_id", "label")
    assert table.records == ((4, {"slide_id": "007", "label": "a"}), (6, {"slide_id": "8", "label": ""}))


def test_separator_line_of_excel(tmp_path):
    table = read_text_table(write(tmp_path, "sep=;\r\nslide_id;a,b,c\r\n1;2\r\n"))
    assert (table.columns, table.records) == (("slide_id", "a,b,c"), ((3, {"slide_id": "1", "a,b,c": "2"}),))


def test_delimiters_inside_quotes_do_not_count(tmp_path):
    table = read_text_table(write(tmp_path, '"a,b,c";d\n1;"x;y"\n'))
    assert table.records == ((2, {"a,b,c": "1", "d": "x;y"}),)


def test_cell_with_line_breaks(tmp_path):
    table = read_text_table(write(tmp_path, '"slide\r\nid",note\r\n1,"two\r\nlines"\r\n2,\r\n'))
    assert table.records == ((4, {"slide id": "1", "note": "two\nlines"}), (5, {"slide id": "2", "note": ""}))


def test_rows_with_too_many_fields(tmp_path):
    table = read_text_table(write(tmp_path, "slide_id,label\n1,a,b\n2,a,,\n3,a\n"))
    assert [number for number, _ in table.records] == [3, 4]
    ((row_number, text),) = table.problems
    assert row_number == 2
    assert "3 fields" in text


def test_columns_without_a_name(tmp_path):
    table = read_text_table(write(tmp_path, ",slide_id,,label,\n0,a,,x,\n1,b,left,y,\n"))
    assert table.columns == ("slide_id", "label")
    assert table.records[1] == (3, {"slide_id": "b", "label": "y"})
    (note,) = table.notes
    assert "column 3" in note
    assert "'left'" in note


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n , \n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"a,b,a\n", "duplicate columns: a"),
        (b'a,b\n"x"y,1\n', "row 2: not a valid CSV file"),
        (b'a,b\n"x,1\n', "row 2: not a valid CSV file"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1 old Excel", "old format"),
        (b"PK\x03\x04 no archive", "not an Excel workbook, or it is damaged"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    with pytest.raises(CohortError, match=message) as caught:
        read_text_table(write(tmp_path, content))
    assert caught.value.hint


def test_files_that_are_not_files(tmp_path):
    for path in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(CohortError, match="cannot be read"):
            read_text_table(path)


# --- Excel ---


def test_excel_cells_as_they_are_shown(tmp_path):
    day, minute = datetime.datetime(2020, 1, 31), datetime.datetime(2020, 1, 31, 12, 30)
    values = [7, 1.0, "007", " x ", 0.2527, 0.1 + 0.2, -3, True, day, minute, "#N/A", None, 1e6]
    path = write_sheet(tmp_path, [[f"c{i}" for i in range(len(values))], values])
    table = read_text_table(path)
    expected = "7|1|007|x|0.2527|0.3|-3|TRUE|2020-01-31|2020-01-31 12:30:00|#N/A||1000000"
    assert table.columns == tuple(f"c{i}" for i in range(len(values)))
    assert "|".join(table.records[0][1].values()) == expected
    assert (table.notes, table.problems) == ((), ())


def test_excel_rows_keep_their_numbers(tmp_path):
    rows = [[], ["slide_id", "label"], [], [1, "a"], [None, None], [2]]
    table = read_text_table(write_sheet(tmp_path, rows))
    assert table.records == ((4, {"slide_id": "1", "label": "a"}), (6, {"slide_id": "2", "label": ""}))


@pytest.mark.parametrize(
    ("number_format", "text", "noted"),
    [
        ("000", "007", False),
        ("General", "7", False),
        ("0.00", "7", False),
        ("#,##0", "7", False),
        ('"P"000', "P007", False),
        (r"\P-000", "P-007", False),
        ('0 "years"', "7", True),
        ("000-00", "7", True),
    ],
)
def test_excel_number_formats(tmp_path, number_format, text, noted):
    workbook = Workbook()
    workbook.active.append(["id"])
    workbook.active.append([7])
    workbook.active["A2"].number_format = number_format
    workbook.save(tmp_path / "a.xlsx")
    table = read_text_table(tmp_path / "a.xlsx")
    assert table.records == ((2, {"id": text}),)
    assert bool(table.notes) == noted


def test_excel_sheet_with_data(tmp_path):
    workbook = Workbook()
    workbook.active.title = "Empty"
    for name in ("Hidden", "Slides", "Other"):
        workbook.create_sheet(name).append([f"slide_id of {name}"])
    workbook["Hidden"].sheet_state = "hidden"
    workbook.save(tmp_path / "a.xlsx")
    table = read_text_table(tmp_path / "a.xlsx")
    assert table.columns == ("slide_id of Slides",)
    (note,) = table.notes
    assert all(f"'{name}'" in note for name in ("Slides", "Hidden", "Other"))
    assert "Empty" not in note


def test_excel_without_data(tmp_path):
    with pytest.raises(CohortError, match="is empty"):
        read_text_table(write_sheet(tmp_path, []))


def test_excel_workbook_with_another_suffix(tmp_path):
    path = write_sheet(tmp_path, [["slide_id"], ["a"]]).rename(tmp_path / "cohort.csv")
    assert read_text_table(path).records == ((2, {"slide_id": "a"}),)


def test_text_file_with_the_suffix_of_excel(tmp_path):
    with pytest.raises(CohortError, match="not an Excel workbook") as caught:
        read_text_table(write(tmp_path, TEXT, "cohort.xlsx"))
    assert ".csv" in caught.value.hint


def test_merged_cells(tmp_path):
    workbook = Workbook()
    for row in (["patient", "slide"], ["P1", "a"], [None, "b"], ["P2", "c"]):
        workbook.active.append(row)
    workbook.active.merge_cells("A2:A3")
    workbook.save(tmp_path / "a.xlsx")
    table = read_text_table(tmp_path / "a.xlsx")
    assert [number for number, _ in table.records] == [4]
    assert [number for number, _ in table.problems] == [2, 3]
    assert all("A2:A3" in text for _, text in table.problems)


def test_merged_cells_of_a_title(tmp_path):
    workbook = Workbook()
    for row in (["Our cohort"], ["patient", "slide"], ["P1", "a"]):
        workbook.active.append(row)
    workbook.active.merge_cells("A1:B1")
    workbook.save(tmp_path / "a.xlsx")
    with pytest.raises(CohortError, match="row 1: the cells A1:B1 are merged"):
        read_text_table(tmp_path / "a.xlsx")


def with_formula_results(path, cells):
    """Replace cells in the XML of the sheet, to store results of formulas as Excel does."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    sheet = files["xl/worksheets/sheet1.xml"].decode()
    for written, stored in cells.items():
        assert written in sheet
        sheet = sheet.replace(written, stored)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | {"xl/worksheets/sheet1.xml": sheet.encode()}).items():
            archive.writestr(name, content)
    return path


def test_stray_cells_far_from_the_table(tmp_path):
    workbook = Workbook()
    for row in (["slide_id"], ["a"], ["b"]):
        workbook.active.append(row)
    workbook.active.cell(1_048_576, 1, " ")
    workbook.active.cell(3, 16_384, "remark")
    workbook.active.merge_cells("A5:A50")
    workbook.save(tmp_path / "a.xlsx")
    table = read_text_table(tmp_path / "a.xlsx")
    assert table.records == ((2, {"slide_id": "a"}), (3, {"slide_id": "b"}))
    assert table.problems == ()
    (note,) = table.notes
    assert "'remark'" in note


def test_formulas_have_their_stored_results(tmp_path):
    path = write_sheet(tmp_path, [["a", "b", "c", "d"], ["=1+1", '=""', "=A9", "=NA()"], [1, 2, 3, "=2+2"]])
    with_formula_results(
        path,
        {
            '<c r="A2"><f>1+1</f><v /></c>': '<c r="A2"><f>1+1</f><v>2</v></c>',
            '<c r="B2"><f>""</f><v /></c>': '<c r="B2" t="str"><f>""</f><v></v></c>',
            '<c r="C2"><f>A9</f><v /></c>': '<c r="C2" t="str"><f>A9</f><v>text</v></c>',
            '<c r="D2"><f>NA()</f><v /></c>': '<c r="D2" t="e"><f>NA()</f><v>#N/A</v></c>',
        },
    )
    table = read_text_table(path)
    assert table.records == ((2, {"a": "2", "b": "", "c": "text", "d": "#N/A"}),)
    ((row_number, text),) = table.problems
    assert row_number == 3
    assert "D3" in text


def test_doubtful_excel_cells_are_listed(tmp_path):
    rows = [["slide_id", "when"], ["a-1", datetime.datetime(2024, 5, 1)], [datetime.datetime(2024, 10, 5), None]]
    path = write_sheet(tmp_path, [*rows, [1234567890123456, None]])
    notes = read_text_table(path).notes
    assert [each for each in notes if "A3" in each and "dates" in each]
    assert [each for each in notes if "A4" in each and "15 digits" in each]
    assert not [each for each in notes if "B2" in each]


def test_hidden_rows_are_read_and_noted(tmp_path):
    workbook = Workbook()
    for row in (["slide_id"], ["a"], ["b"]):
        workbook.active.append(row)
    workbook.active.row_dimensions[3].hidden = True
    workbook.save(tmp_path / "a.xlsx")
    table = read_text_table(tmp_path / "a.xlsx")
    assert len(table.records) == 2
    assert "1 hidden row" in table.notes[0]


def test_damaged_workbooks(tmp_path):
    whole = write_sheet(tmp_path, [["slide_id"], ["a"]]).read_bytes()
    for content in (whole[: len(whole) // 2], whole.replace(b"PK\x01\x02", b"PK\x01\x09")):
        with pytest.raises(CohortError, match="not an Excel workbook, or it is damaged"):
            read_text_table(write(tmp_path, content, "damaged.xlsx"))
    with zipfile.ZipFile(tmp_path / "document.ods", "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
    with pytest.raises(CohortError, match="not an Excel workbook"):
        read_text_table(tmp_path / "document.ods")


def test_workbook_with_features_that_openpyxl_does_not_read(tmp_path):
    workbook = Workbook()
    workbook.active.append(["slide_id"])
    workbook.active.append(["a"])
    workbook.active["A1"].font = Font(bold=True)
    workbook.active.add_data_validation(DataValidation(type="list", formula1='"a,b"'))
    path = tmp_path / "a.xlsx"
    workbook.save(path)
    extension = '<extLst><ext uri="{CCE6A557-97BC-4B89-ADB6-D9C93CAAB3DF}"/></extLst></worksheet>'
    assert read_text_table(with_formula_results(path, {"</worksheet>": extension})).records == ((2, {"slide_id": "a"}),)
