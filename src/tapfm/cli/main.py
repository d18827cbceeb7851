"""The command `tapfm`. torch is not imported at module level, so that help and input errors are fast."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from tapfm.cli.bench import bench
from tapfm.cli.compare import compare
from tapfm.cli.config import config
from tapfm.cli.console import print_line, stderr_console
from tapfm.cli.demo import demo
from tapfm.cli.doctor import doctor
from tapfm.cli.embed import embed
from tapfm.cli.encoders import encoders
from tapfm.cli.evaluate import evaluate
from tapfm.cli.export import export
from tapfm.cli.inspect import inspect
from tapfm.cli.plan import plan
from tapfm.cli.predict import predict
from tapfm.cli.probe import probe
from tapfm.cli.report import report
from tapfm.cli.split import split
from tapfm.cli.study import study
from tapfm.cli.synth import synth
from tapfm.cli.tile import tile
from tapfm.cli.train import train
from tapfm.cli.view import view
from tapfm.errors import TapfmError
from tapfm.runtime.commands import stop_when_parent_exits
from tapfm.version import __version__

app = typer.Typer(
    name="tapfm",
    help="Adapt a pathology foundation model to your task from slide labels, on one GPU.",
    epilog="To start: `tapfm doctor` checks this machine, `tapfm demo` runs the whole workflow on synthetic slides.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"tapfm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Adapt a pathology foundation model to your task from slide labels, on one GPU."""


app.command()(inspect)
app.command()(tile)
app.command()(synth)
app.command()(demo)
app.command()(split)
app.command()(embed)
app.command()(config)
app.command()(plan)
app.command()(train)
app.command()(evaluate)
app.command()(compare)
app.command()(study)
app.command(hidden=True)(probe)  # a step of `tapfm study`, rarely used alone
app.command()(export)
app.command()(predict)
app.command()(report)
app.command()(view)
app.command()(bench)
app.command()(encoders)
app.command()(doctor)


def main() -> None:
    """Run the command line. A TapfmError is printed as a message and a hint, without a traceback."""
    stop_when_parent_exits()
    # job schedulers send SIGTERM before they kill a process; SystemExit lets the command save its results
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except TapfmError as error:
        console = stderr_console()
        console.print("error:", style="bold red", end=" ")
        print_line(console, error.message)
        if error.hint:
            print_line(console, error.hint)
        sys.exit(error.exit_code)
