"""`tapfm study`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from tapfm.cli.command import command
from tapfm.cli.console import messages, print_line, terminal
from tapfm.runtime.messages import command as command_text
from tapfm.workflows import study as workflow

if TYPE_CHECKING:
    from tapfm.study.tables import ResultTable


@command(workflow.StudyOptions)
def study(options: workflow.StudyOptions) -> None:
    """Compare encoders, regimes and aggregators: every run, every evaluation, and the paper's tables.

    \b
    tapfm study --preset paper-table1 --write study.toml     a file to edit
    tapfm study study.toml --list                            what would be run
    tapfm study study.toml --out studies/first               hours to weeks
    tapfm study study.toml --out studies/first --resume      after Ctrl-C, ...
    tapfm study --preset layers --scale mini --out mini      on painted slides

    Each run is a process of its own. A run that is finished is kept, one that was
    stopped is resumed; when one fails, the others continue. The tables are made
    from the runs that are finished.

    \b
    study.md                            all tables on a page, and what failed
    table_binary.*, table_multilabel.*  AUC, intervals, p; md, csv, tex
    costs.*, curves.png                 best epoch, seconds, memory; curves
    ablation.*, stability.*, forgetting.*   in studies that ask for it
    status.csv, logs/                   each step, and the command to repeat it
    runs/, evaluations/, ensembles/     each can be used on its own

    Exit code 3 when something failed, 130 after Ctrl-C, 143 after SIGTERM.
    """
    results = workflow.run_study.run(options, messages())
    if options.write is not None:
        following = command_text("study", options.write, "--list")
        print_line(messages(), f"Written: {options.write}. Next: {following}")
    for result in results:
        if options.list and len(results) > 1:
            typer.echo(f"{result.name}:")
        for run in result.runs:
            state = f"  {run.state}" if run.state else ""
            print_line(terminal(), f"{run.name}{state}")
        if result.table is not None:
            _print_table(result.table, terminal())
    if any(result.failed for result in results):
        raise typer.Exit(3)


def _print_table(table: ResultTable, console: Console) -> None:
    from tapfm.study.table_text import column_title, markdown_cell

    if not table.rows:
        console.print("No run is finished yet.")
        return
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("AUC")
    for place in table.patients:
        shown.add_column(column_title(table, place))
    for row in table.rows:
        cells = [markdown_cell(row.cells.get(place)) for place in table.patients]
        # a terminal has no underline in plain text
        cells = [cell.replace("<u>", "").replace("</u>", "").replace("**", "") for cell in cells]
        shown.add_row(row.title, *cells)
    console.print(shown)
