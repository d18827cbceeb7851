"""Alignment, ranks and number formats of tables."""

import io

from rich.console import Console

from tapfm.results.estimate import Estimate
from tapfm.results.latex import _escape_latex as escape_latex
from tapfm.results.markdown import markdown_table
from tapfm.results.table import Cell, Column, Table, table_row
from tapfm.results.terminal import rich_table


def print_table(table, **options):
    console = Console(file=io.StringIO(), width=100, **options)
    console.print(rich_table(table))
    return console.file.getvalue()


def test_values_with_intervals_are_aligned():
    columns = [Column("", text=True), Column("AUC"), Column("count")]
    rows = [table_row("a", Estimate(0.5, 0.25, 0.75), 7), table_row("b", Estimate(0.25), 1234)]
    first, second = print_table(Table(columns, rows)).splitlines()[-2:]
    assert first.index("0.500") == second.index("0.250")
    assert first.rstrip().endswith("    7")  # plain numbers are right-aligned


def test_best_value_is_bold_and_second_best_is_underlined():
    table = Table([Column("AUC")], [table_row(Cell(0.9, rank=1)), table_row(Cell(0.8, "p = 0.2", rank=2))])
    text = print_table(table, force_terminal=True, color_system="standard")
    assert "\x1b[1m0.900\x1b[0m" in text
    assert "\x1b[4m0.800\x1b[0m (p = 0.2)" in text


def test_intervals_may_have_fewer_digits_than_values():
    column = Column("AUC", float_format=".4f", interval_format=".2f")
    assert "| 0.5000 (0.25 to 0.75) |" in markdown_table(Table([column], [table_row(Estimate(0.5, 0.25, 0.75))]))


def test_latex_commands_are_escaped():
    assert escape_latex(r"a_b\c^d") == r"a\_b\textbackslash{}c\textasciicircum{}d"
