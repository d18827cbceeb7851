"""Tables as LaTeX, in the layout of the paper's tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tapfm.results.table import Cell, Column, Row, Table, cell_detail, cell_text, missing_text

_RANK_FORMATS = {1: r"\textbf{{{}}}", 2: r"\underline{{{}}}"}
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def latex_table(table: Table, caption: str, label: str) -> str:
    """Return a table environment, which requires the packages booktabs, multirow and graphicx."""
    shown = table.without_hidden_columns()
    lines = [
        "% requires: booktabs, multirow, graphicx",
        r"\begin{table}[!htb]",
        rf"\caption{{{_escape_latex(caption)}}}",
        rf"\label{{tab:{label}}}",
        r"\centering",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{''.join('l' if column.text else 'c' for column in shown.columns)}}}",
        r"\toprule",
        *_header_lines(shown.columns),
        *_row_lines(shown.rows, shown.columns),
        r"\bottomrule",
        r"\end{tabular}%",
        "}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def _header_lines(columns: Sequence[Column]) -> list[str]:
    """Return the lines with column titles, and above them the titles of column groups."""
    titles = [rf"\textbf{{{_escape_latex(column.title)}}}" for column in columns]
    if not any(column.group for column in columns):
        return [f"{' & '.join(titles)} \\\\", r"\midrule"]
    above, rules, start = [], [], 0
    for group, members in groupby(columns, key=lambda column: column.group):
        width = len(list(members))
        if group:
            above.append(rf"\multicolumn{{{width}}}{{c}}{{\textbf{{{_escape_latex(group)}}}}}")
            rules.append(rf"\cmidrule(lr){{{start + 1}-{start + width}}}")
        else:
            above += [rf"\multirow{{2}}{{*}}{{{title}}}" for title in titles[start : start + width]]
            titles[start : start + width] = [""] * width
        start += width
    return [f"{' & '.join(above)} \\\\", " ".join(rules), f"{' & '.join(titles)} \\\\", r"\midrule"]


def _row_lines(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    lines: list[str] = []
    for index, row in enumerate(rows):
        if row.cells:
            cells = [_latex_cell(cell, column) for cell, column in zip(row.cells, columns, strict=True)]
            lines.append(f"{' & '.join(cells)} \\\\")
            continue
        if index:
            lines.append(r"\midrule")
        text = _escape_latex(row.heading)
        text = rf"{{c}}{{\textbf{{{text}}}}}" if row.heading_level == 1 else rf"{{l}}{{\textit{{{text}}}}}"
        lines.append(rf"\multicolumn{{{len(columns)}}}{text} \\")
        if row.heading_level == 2 or (index + 1 < len(rows) and rows[index + 1].cells):
            lines.append(r"\midrule")
    return lines


def _latex_cell(cell: Cell, column: Column) -> str:
    text = _escape_latex(cell_text(cell, column))
    if not text:
        return "--" if missing_text(cell) else ""
    ranked = _RANK_FORMATS.get(cell.rank, "{}").format(text)
    detail = _escape_latex(cell_detail(cell, column).replace(" to ", "--"))
    return rf"{ranked} {{\scriptsize ({detail})}}" if detail else ranked


def _escape_latex(text: str) -> str:
    """Return text with all special characters of LaTeX escaped."""
    return "".join(_ESCAPES.get(character, character) for character in text)
