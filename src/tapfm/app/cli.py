"""The command `tapfm`. Nothing here, nor what it imports at the top, imports torch: help and errors come at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tapfm import __version__
from tapfm.errors import InputError, TapfmError

app = typer.Typer(
    name="tapfm",
    help="Adapt a pathology foundation model to your task from slide labels, on one GPU.",
    epilog="First time here? tapfm doctor says what this machine can do.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

PIPED_WIDTH = 160  # columns of a table that no terminal limits


def terminal() -> Console:
    """Make the console for results: as wide as the terminal, wide enough for a table when piped."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def show_version(asked: bool) -> None:
    """Print the version and stop."""
    if asked:
        typer.echo(f"tapfm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Adapt a pathology foundation model to your task from slide labels, on one GPU."""


@app.command()
def encoders(
    name: Annotated[
        str | None,
        typer.Argument(help="One encoder, in full: its key or name ('uni', 'Virchow2'), or timm:<architecture>."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Load the weights (cache, then hub, or --weights), verify them, encode a tile."),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="With --check: a weights file, or a folder in the shape of a hub repository."),
    ] = None,
) -> None:
    """List the foundation models tapfm can adapt, or show one.

    \b
    tapfm encoders               the catalogue
    tapfm encoders uni           one card: architecture, pixels, licence, weights
    tapfm encoders uni --check   can it be loaded here? (if gated: how to get access)
    tapfm encoders uni --check --weights pytorch_model.bin
    """
    from tapfm.app import encoder_views
    from tapfm.encoders.catalog import encoder_card, encoder_cards

    if name is None:
        if check or weights is not None:
            raise InputError("--check needs the name of an encoder.", hint="For example: tapfm encoders uni --check")
        encoder_views.show_table(encoder_cards().values(), terminal(), as_json=as_json)
        return
    if weights is not None and not check:
        raise InputError(
            "--weights is used by --check.", hint=f"Type: tapfm encoders {name} --check --weights {weights}"
        )
    card = encoder_card(name)
    if check:
        encoder_views.check_encoder(card, weights, terminal(), as_json=as_json)
    else:
        encoder_views.show_card(card, terminal(), as_json=as_json)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the hub which gated encoders open.")] = False,
) -> None:
    """Say what this machine can do, and what to do about what it cannot.

    Python and packages, GPU and memory, hub token and the gated encoders it opens, cached weights with their SHA-256,
    OpenSlide, free disk. Exit code 1 when something needed is broken.
    """
    from tapfm.app import doctor as examination

    findings = examination.examine(offline=offline, progress=Console(stderr=True))
    examination.show(findings, terminal(), as_json=as_json)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; errors of ours are one message and a hint, not a traceback."""
    try:
        app()
    except TapfmError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("error:", style="bold red", end=" ")
        console.print(error.message, markup=False)
        if error.hint:
            console.print(error.hint, markup=False)
        sys.exit(error.exit_code)
