"""A table of AUCs as text: CSV with everything, markdown to be read, LaTeX in the paper's layout."""

from __future__ import annotations

from collections.abc import Sequence

from tapfm.results.estimate import Estimate
from tapfm.runtime.csv_files import csv_text
from tapfm.study.tables import COHORT_TITLES, MACRO, Cell, ResultTable, TableColumn

_COLUMNS = (
    *("model", "encoder", "regime", "aggregator", "variant", "cohort", "target", "patients"),
    *("auc", "low", "high", "seeds", "seed_sd", "minus_best", "minus_best_low", "minus_best_high"),
    *("p_bootstrap", "p_delong", "p_holm", "rank", "why"),
)


def table_csv(table: ResultTable) -> str:
    """Return a line for each cell, with all that is known of it."""
    rows = []
    for row in table.rows:
        for place, cell in row.cells.items():
            pair = cell.against_best
            difference = Estimate(None) if pair is None else pair.difference
            tests = (None, None, None) if pair is None else (pair.p_bootstrap, pair.p_delong, pair.p_holm)
            numbers = [cell.auc.value, cell.auc.low, cell.auc.high]
            numbers_after = [cell.seed_sd, difference.value, difference.low, difference.high, *tests]
            rows.append(
                [row.title, row.encoder, row.regime, row.aggregator, row.variant, *place, table.patients[place]]
                + [exact(number) for number in numbers]
                + [cell.seeds, *(exact(number) for number in numbers_after), cell.rank or "", cell.auc.why]
            )
    return csv_text(_COLUMNS, rows)


def exact(number: float | None) -> str:
    """Write a number so that it comes back as it was."""
    return "" if number is None else repr(float(number))


def table_markdown(table: ResultTable, *, multilabel: bool) -> str:
    """Write it to be read: of several targets of one model a part for each cohort, as in the paper."""
    if not table.rows:
        return "No run is finished yet.\n"
    parts = [[cohort] for cohort in table.cohorts()] if multilabel else [table.cohorts()]
    lines: list[str] = []
    for cohorts in parts:
        places = [place for place in table.patients if place[0] in cohorts]
        if multilabel:
            lines += [f"**{COHORT_TITLES[cohorts[0]]}** (N = {table.patients[places[0]]:,} patients)", ""]
        heads = [
            _target_title(target) if multilabel else column_title(table, (cohort, target)) for cohort, target in places
        ]
        lines += [f"| Model | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
        block = ""
        for row in table.rows:
            if not any(place in row.cells for place in places):
                continue
            if row.block != block:
                block = row.block
                lines.append(f"| *{block}* |" + " |" * len(heads))
            cells = [markdown_cell(row.cells.get(place)) for place in places]
            lines.append(f"| {row.title} | {' | '.join(cells)} |")
        lines.append("")
    lines += _legend(table)
    return "\n".join(lines) + "\n"


def _legend(table: ResultTable) -> list[str]:
    """Say how to read it."""
    seeds = max((cell.seeds for row in table.rows for cell in row.cells.values()), default=1)
    averaged = f" Mean over {seeds} seeds; the interval is that of this mean." if seeds > 1 else ""
    lines = [
        f"AUC, each {table.unit} counted once; best bold, second underlined. In brackets: 95% interval by resampling "
        f"patients.{averaged} p: paired test against the best of the column, Holm-corrected.",
    ]
    return [*lines, *(f"- {note}" for note in table.notes)]


def _target_title(target: str) -> str:
    """Name a column."""
    return "Macro average" if target == MACRO else target


def column_title(table: ResultTable, place: TableColumn) -> str:
    """Name a column of one target and cohort."""
    return f"{_target_title(place[1])}, {COHORT_TITLES[place[0]].lower()} (N = {table.patients[place]:,})"


def markdown_cell(cell: Cell | None) -> str:
    """Write a cell."""
    if cell is None or cell.auc.value is None:
        return "-"
    value = f"{cell.auc.value:.4f}"
    value = {1: f"**{value}**", 2: f"<u>{value}</u>"}.get(cell.rank or 0, value)
    if cell.auc.low is not None and cell.auc.high is not None:
        value += f" ({cell.auc.low:.3f} to {cell.auc.high:.3f})"
    return value if cell.against_best is None else f"{value}, p {_p_text(cell.against_best.p_holm)}"


def _p_text(p: float | None) -> str:
    """Write a p."""
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def table_latex(table: ResultTable, *, multilabel: bool, caption: str, label: str) -> str:
    """Write it for an article: needs the packages booktabs, multirow and graphicx."""
    return _tex_multilabel(table, caption, label) if multilabel else _tex_binary(table, caption, label)


def _tex_binary(table: ResultTable, caption: str, label: str) -> str:
    """Write the layout of the paper's table 1: a group of columns for each target, a block for each regime."""
    places = list(table.patients)
    groups = [(target, [place for place in places if place[1] == target]) for target in table.targets()]
    heads = [
        rf"\multicolumn{{{len(of_target)}}}{{c}}{{\textbf{{{tex(_target_title(target))}}}}}"
        for target, of_target in groups
    ]
    rules, column = [], 2
    for _, of_target in groups:
        rules.append(rf"\cmidrule(lr){{{column}-{column + len(of_target) - 1}}}")
        column += len(of_target)
    lines = [
        rf"\multirow{{2}}{{*}}{{\textbf{{Model}}}} & {' & '.join(heads)} \\",
        " ".join(rules),
        "& " + " & ".join(rf"\textbf{{{COHORT_TITLES[cohort]}}}" for cohort, _ in places) + r" \\",
        "& " + " & ".join(f"$(N = {table.patients[place]})$" for place in places) + r" \\",
    ]
    lines += _tex_rows(table, places)
    return _tex_table(lines, len(places), caption, label)


def _tex_multilabel(table: ResultTable, caption: str, label: str) -> str:
    """Write the layout of the paper's table 2: targets and their mean, one cohort below the other."""
    targets = table.targets()
    named = [target for target in targets if target != MACRO]
    lines: list[str] = []
    for number, cohort in enumerate(table.cohorts()):
        places = [place for place in table.patients if place[0] == cohort]
        size = rf"\textbf{{{COHORT_TITLES[cohort]} $(N = {table.patients[places[0]]})$}}"
        if number:
            lines += [r"\midrule", rf"\multicolumn{{{len(targets) + 1}}}{{c}}{{{size}}} \\"]
        else:
            head = rf"\multirow{{2}}{{*}}{{\textbf{{Model}}}} & \multicolumn{{{len(named)}}}{{c}}{{{size}}}"
            lines.append(head + r" & \multirow{2}{*}{\textbf{Macro average}} \\")
            lines.append(rf"\cmidrule(lr){{2-{len(named) + 1}}}")
            lines.append("& " + " & ".join(rf"\textbf{{{tex(target)}}}" for target in named) + r" & \\")
        lines += _tex_rows(table, places)
    return _tex_table(lines, len(targets), caption, label)


def _tex_rows(table: ResultTable, places: Sequence[TableColumn]) -> list[str]:
    """Write the blocks of regimes, a rule between encoders."""
    lines: list[str] = []
    block = encoder = ""
    for row in table.rows:
        if not any(place in row.cells for place in places):
            continue
        if row.block != block:
            heading = rf"\multicolumn{{{len(places) + 1}}}{{l}}{{\textit{{{tex(row.block)}}}}} \\"
            lines += [r"\midrule", heading, r"\midrule"]
        elif row.encoder != encoder:
            lines.append(r"\midrule")
        block, encoder = row.block, row.encoder
        cells = [_tex_cell(row.cells.get(place)) for place in places]
        lines.append(rf"{tex(row.title)} & {' & '.join(cells)} \\")
    return lines


def _tex_cell(cell: Cell | None) -> str:
    """Write a cell."""
    if cell is None or cell.auc.value is None:
        return "--"
    value = f"{cell.auc.value:.4f}"
    value = {1: rf"\textbf{{{value}}}", 2: rf"\underline{{{value}}}"}.get(cell.rank or 0, value)
    beside = []
    if cell.auc.low is not None and cell.auc.high is not None:
        beside.append(f"{cell.auc.low:.3f}--{cell.auc.high:.3f}")
    if cell.against_best is not None and (p := cell.against_best.p_holm) is not None:
        beside.append("$p<0.001$" if p < 0.001 else f"$p={p:.3f}$")
    return rf"{value} {{\scriptsize ({', '.join(beside)})}}" if beside else value


def _tex_table(lines: Sequence[str], columns: int, caption: str, label: str) -> str:
    """Put a table around lines."""
    return "\n".join(
        [
            "% needs: booktabs, multirow, graphicx",
            r"\begin{table}[!htb]",
            rf"\caption{{{tex(caption)}}}",
            rf"\label{{tab:{label}}}",
            r"\centering",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{l{'c' * columns}}}",
            r"\toprule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}%",
            "}",
            r"\end{table}",
            "",
        ]
    )


_TEX = {
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


def tex(text: str) -> str:
    """Write plain text for LaTeX."""
    return "".join(_TEX.get(character, character) for character in text)
