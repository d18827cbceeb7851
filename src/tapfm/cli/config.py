"""`tapfm config`."""

from __future__ import annotations

import typer

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console
from tapfm.runtime.messages import format_command
from tapfm.workflows import config as workflow


@command(workflow.ConfigOptions)
def config(options: workflow.ConfigOptions) -> None:
    """Write a configuration to start from, with comments; or print one with everything filled in.

    \b
    tapfm config --cohort split.csv --encoder h-optimus-0 --out run.toml
    tapfm config --recipe reference            on the screen
    tapfm config run.toml                      with every setting filled in

    Settings that are not given come from the recipe: the paper's protocol, or its authors' scripts.
    """
    text = workflow.config.run(options, stderr_console())
    if options.out is None:
        typer.echo(text, nl=False)
        return
    following = format_command("train", options.out, "--out", "runs/first")
    print_line(stderr_console(), f"Written: {options.out}. Next: {following}")
