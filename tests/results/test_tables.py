"""Tables as CSV, Markdown, LaTeX, HTML and terminal output."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tapfm.results.estimate import Estimate
from tapfm.results.formatting import format_bytes, format_duration, format_estimate, format_p_value, format_percentage
from tapfm.results.html import html_table
from tapfm.results.latex import _escape_latex as escape_latex
from tapfm.results.latex import latex_table
from tapfm.results.markdown import markdown_table
from tapfm.results.table import Cell, Column, Row, Table, list_reasons, table_csv, table_row
from tapfm.results.terminal import rich_table

AUC = Estimate(0.87654321, 0.8, 0.95)
TABLE = Table(
    [
        Column("Model", "model", text=True),
        Column("Test (N = 40)", "auc", group="FGFR3", interval=True, float_format=".4f"),
        Column("External", "external", group="FGFR3"),
        Column("seconds", shown=False),
    ],
    [
        Row(heading="TAPFM"),
        table_row("UNI | 1", Cell(AUC, "p 0.04", rank=1), -0.25, 12.5),
        table_row("ABMIL_2", Cell(Estimate(0.7), rank=2), Estimate(None, reason="no positive slide"), 7.0),
    ],
    "A table",
    ["A note."],
)


def test_csv_has_all_columns_in_full_precision_and_no_headings():
    rows = list(csv.DictReader(io.StringIO(table_csv(TABLE))))
    assert list(rows[0]) == ["model", "auc", "auc_low", "auc_high", "external", "seconds"]
    assert [float(rows[0][name]) for name in ("auc", "auc_low", "auc_high")] == [AUC.value, AUC.low, AUC.high]
    assert (rows[1]["auc_low"], rows[1]["external"], rows[1]["seconds"]) == ("", "", "7.0")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_written_to_csv_without_loss(number):
    text = table_csv(Table([Column("x")], [table_row(number)]))
    assert float(list(csv.reader(io.StringIO(text)))[1][0]) == number


def test_markdown_table():
    lines = markdown_table(TABLE).splitlines()
    assert lines[:6] == [
        "**A table**",
        "",
        "| Model | FGFR3, Test (N = 40) | FGFR3, External |",
        "|---|--:|--:|",
        "| *TAPFM* |  |  |",
        "| UNI \\| 1 | **0.8765** (0.8000 to 0.9500, p 0.04) | -0.250 |",
    ]
    assert lines[6] == "| ABMIL_2 | <u>0.7000</u> | - <sup>1</sup> |"
    assert lines[7:] == ["", "<sup>1</sup> no positive slide", "", "A note."]


def test_latex_table_has_column_groups_and_escaped_names():
    text = latex_table(TABLE, "50% of it", "label")
    assert r"\multirow{2}{*}{\textbf{Model}} & \multicolumn{2}{c}{\textbf{FGFR3}} \\" in text
    assert r"\cmidrule(lr){2-3}" in text
    assert r"ABMIL\_2 & \underline{0.7000} & -- \\" in text
    assert r"\textbf{0.8765} {\scriptsize (0.8000--0.9500, p 0.04)}" in text
    assert r"\caption{50\% of it}" in text
    assert text.count("{") == text.count("}")


@given(st.text())
def test_all_special_characters_of_latex_are_escaped(text):
    escaped = escape_latex(text)
    for character in "&%$#_":
        assert escaped.count(character) == escaped.count(f"\\{character}")


def test_html_table_is_escaped_and_has_footnotes():
    html = html_table(Table([Column("<b>")], [table_row(Estimate(None, reason="<none>")), table_row(-1.5)], "<t>"))
    assert "<b>" not in html.replace("&lt;b&gt;", "")
    assert '<sup class="reason">1</sup>' in html
    assert "<li>&lt;none&gt;</li>" in html
    assert "\N{MINUS SIGN}1.500" in html
    assert ">-<" in html_table(Table([Column("p")], [table_row("-")]))  # only numbers get a minus sign


def test_missing_values_are_dashes_in_all_formats():
    table = Table([Column("a"), Column("b")], [table_row(Estimate(None), None)])
    assert "| - |  |" in markdown_table(table)
    assert "-- &  " in latex_table(table, "", "")
    assert ">-</th>" in html_table(table)


def test_terminal_table_has_intervals_and_no_hidden_columns():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(rich_table(TABLE))
    text = console.export_text()
    assert "0.8765 (0.8000 to 0.9500, p 0.04)" in text
    assert "seconds" not in text
    assert "TAPFM" in text


def test_row_with_missing_cells_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        table_csv(Table([Column("a"), Column("b")], [table_row(1)]))


def test_equal_reasons_are_listed_once():
    assert list_reasons(Table([Column("a")], [table_row(Cell(reason="x")), table_row(Estimate(None, reason="x"))])) == [
        "x"
    ]


def test_number_formats():
    assert format_estimate(Estimate(None)) == "-"
    assert format_estimate(Estimate(0.5, 0.25, 0.75), "+.2f") == "+0.50 (+0.25 to +0.75)"
    assert [format_p_value(p) for p in (None, 0.0004, 0.04)] == ["-", "< 0.001", "0.040"]
    assert [format_percentage(part, 1000) for part in (0, 3, 996, 1000, 420)] == ["0%", "0.3%", "99.6%", "100%", "42%"]
    assert format_percentage(0, 0) == "-"
    assert [format_duration(seconds) for seconds in (2, 600, 7200)] == ["2 s", "10.0 min", "2.0 h"]
    assert [format_bytes(count) for count in (10, 20_000, 2_500_000)] == ["1 kB", "20 kB", "2.5 MB"]
