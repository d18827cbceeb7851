"""`tapfm study`."""

from __future__ import annotations

import typer

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_command
from tapfm.workflows import study as workflow


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
    study.md                            all results on a page, and what failed
    study.json                          the same as data, for tapfm report
    table_binary.*, table_multilabel.*  AUC, intervals, p; md, csv, tex
    roc.png                             ROC curves
    costs.*, curves.png                 best epoch, seconds, memory; curves
    ablation.*, stability.*, forgetting.*   in studies that ask for it
    status.csv, logs/                   each step, and the command to repeat it
    runs/, evaluations/, ensembles/     each can be used on its own

    Exit code 3 when something failed, 130 after Ctrl-C, 143 after SIGTERM.
    """
    from tapfm.results.terminal import rich_table

    results = workflow.run_study.run(options, stderr_console())
    if options.write is not None:
        following = format_command("study", options.write, "--list")
        print_line(stderr_console(), f"Written: {options.write}. Next: {following}")
    for result in results:
        if options.list and len(results) > 1:
            typer.echo(f"{result.name}:")
        for run in result.runs:
            state = f"  {run.state}" if run.state else ""
            print_line(stdout_console(), f"{run.name}{state}")
        if result.table is not None:
            stdout_console().print(rich_table(result.table) if result.table.rows else "No run is finished yet.")
    if any(result.failed for result in results):
        raise typer.Exit(3)
