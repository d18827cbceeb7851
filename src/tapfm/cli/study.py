"""`tapfm study`."""

from __future__ import annotations

import typer

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_command
from tapfm.workflows import study as workflow


@command(workflow.StudyOptions)
def study(options: workflow.StudyOptions) -> None:
    """Train and evaluate many models to compare encoders, methods and aggregators, and write tables.

    Runs all combinations that STUDY.toml or a preset defines, each in its own
    process. If a run fails, the others continue. With --resume, finished runs
    are kept and stopped runs are resumed. Tables contain the finished runs. A
    full study takes hours to weeks.

    \b
    Examples:
      tapfm study --preset paper-table1 --write study.toml   # file to edit
      tapfm study study.toml --list                          # list the runs
      tapfm study study.toml --out studies/first
      tapfm study study.toml --out studies/first --resume    # after Ctrl-C
      tapfm study --preset layers --scale mini --out mini    # synthetic slides

    \b
    Output files:
      study.md                             all results, and what failed
      study.json                           the results as data, for tapfm report
      table_binary.*, table_multilabel.*   AUCs, intervals and p values
      roc.png                              ROC curves
      costs.*, curves.png                  epochs, time, memory; training curves
      ablation.*, stability.*, forgetting.*   in studies of these kinds
      status.csv, logs/                    command, state and output of each step
      runs/, evaluations/                  folders of `tapfm train` and `evaluate`
      ensembles/                           with folds: the runs of each ensemble

    Exit code 3 if a step failed, 130 after Ctrl-C, 143 after SIGTERM.
    """
    from tapfm.results.terminal import rich_table

    results = workflow.run_study.run(options, stderr_console())
    if options.write is not None:
        next_command = format_command("study", options.write, "--list")
        print_line(stderr_console(), f"Wrote {options.write}. Edit it, then: {next_command}")
    for result in results:
        if options.list and len(results) > 1:
            typer.echo(f"{result.name}:")
        for run in result.runs:
            state = f"  {run.state}" if run.state else ""
            print_line(stdout_console(), f"{run.name}{state}")
        if result.headline is not None:
            stdout_console().print(rich_table(result.headline) if result.headline.rows else "No run is finished yet.")
            for note in result.headline.notes:
                print_line(stdout_console(), note)
    if any(result.failed for result in results):
        raise typer.Exit(3)
