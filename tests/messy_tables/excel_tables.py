"""Excel workbooks of the test, made when it runs."""

import datetime

from openpyxl import Workbook
from openpyxl.utils import get_column_letter

HEADER = ("Slide ID", "Patient ID", "Path", "EGFR")
ROWS = (
    ("S1", "P1", "S1.svs", 1),
    ("S2", "P1", "S2.svs", 1),
    ("S3", "P2", "S3.svs", 0),
    ("S4", "P3", "S4.svs", 0),
    ("S5", "P4", "S5.svs", 1),
)


def make_workbook(header=HEADER, rows=ROWS):
    workbook = Workbook()
    workbook.active.title = "Cohort"
    for row in (header, *rows):
        workbook.active.append(row)
    return workbook


def make_several_sheets():
    """Three sheets with data, of which the first is hidden, and an empty one."""
    workbook = make_workbook()
    for position, (name, cell) in enumerate((("Legend", "1 = mutated"), ("Old version", "slide_id"), ("Sheet4", None))):
        sheet = workbook.create_sheet(name, None if position else 0)
        sheet["A1"] = cell
    workbook["Legend"].sheet_state = "hidden"
    workbook.active = workbook.index(workbook["Cohort"])
    return workbook


def make_merged_cells():
    """The patient is written once for all slides."""
    workbook = make_workbook()
    workbook.active.merge_cells("B2:B3")
    return workbook


def make_title_rows():
    workbook = make_workbook(("Cohort of the department", None, None, None), ((), HEADER, *ROWS))
    workbook.active.merge_cells("A1:D1")
    return workbook


def make_leading_zeros():
    """Patients are numbers, shown with leading zeros by their number format."""
    rows = [
        (slide, number, path, label) for (slide, _, path, label), number in zip(ROWS, (7, 7, 8, 9, 10), strict=True)
    ]
    workbook = make_workbook(rows=rows)
    for cell in workbook.active["B"][1:]:
        cell.number_format = "0000"
    return workbook


def make_formula_errors():
    """Labels from VLOOKUP: #N/A where the patient was not found."""
    workbook = make_workbook(rows=(*ROWS, ("S6", "P5", "S6.svs", None)))
    workbook.active["D7"] = "#N/A"
    workbook.active["D7"].data_type = "e"
    return workbook


def make_reference_errors():
    """Patients from a deleted column."""
    workbook = make_workbook()
    for cell in ("B3", "B4"):
        workbook.active[cell] = "#REF!"
        workbook.active[cell].data_type = "e"
    return workbook


def make_formulas():
    """A formula that no program has computed."""
    workbook = make_workbook()
    workbook.active["D2"] = "=1-0"
    return workbook


def make_dates():
    """Ids that Excel turned into dates, beside others that it did not."""
    rows = [(slide, patient, path, label) for slide, patient, path, label in ROWS]
    rows[2] = ("S3", datetime.datetime(2023, 3, 1), "S3.svs", 0)  # typed as 1-3
    return make_workbook(rows=rows)


def make_empty_rows_and_columns():
    """The table starts in cell B3, with an empty row between the slides and a comment at the right."""
    workbook = Workbook()
    for number, row in enumerate((HEADER, *ROWS[:2], (), *ROWS[2:]), start=3):
        for column, value in enumerate(row, start=2):
            workbook.active[f"{get_column_letter(column)}{number}"] = value
    workbook.active["H4"] = "checked by M."
    return workbook


WORKBOOKS = {
    "several-sheets.xlsx": make_several_sheets,
    "merged-cells.xlsx": make_merged_cells,
    "title-rows.xlsx": make_title_rows,
    "leading-zeros.xlsx": make_leading_zeros,
    "formula-errors.xlsx": make_formula_errors,
    "reference-errors.xlsx": make_reference_errors,
    "formulas.xlsx": make_formulas,
    "dates.xlsx": make_dates,
    "empty-rows.xlsx": make_empty_rows_and_columns,
}
