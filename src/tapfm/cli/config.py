"""`tapfm config`."""

from __future__ import annotations

import typer

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console
from tapfm.workflows import config as workflow


@command(workflow.ConfigOptions)
def config(options: workflow.ConfigOptions) -> None:
    """Create RUN.toml, the configuration of a training run, with comments and defaults.

    With an existing RUN.toml as argument, prints it with all settings,
    including defaults. Defaults come from a recipe: the protocol of the paper,
    or the scripts of its authors.

    \b
    Examples:
      tapfm config --cohort split.csv --encoder h-optimus-0 --out run.toml
      tapfm config --cohort split.csv --positive EGFR=MUT --out run.toml
      tapfm config --recipe reference                # print to the terminal
      tapfm config run.toml                          # print all settings
      tapfm config run.toml --set schedule.epochs=5
    """
    text = workflow.config.run(options, stderr_console())
    if options.out is None:
        typer.echo(text, nl=False)
        return
    print_line(stderr_console(), f"Wrote {options.out}. Next:")
    for command_line in workflow.next_commands(options.out):
        print_line(stderr_console(), f"  {command_line}")
