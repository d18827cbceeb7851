"""`tapfm demo`. What it needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console

from tapfm.errors import InputError


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for everything.",
            show_default="demo; with --full demo-full, with --tiny demo-tiny",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="More slides, a signal that is harder to see, more epochs.")
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Every step in a minute or two, to see that it works; figures mean nothing.")
    ] = False,
) -> None:
    """Go through all of tapfm on painted slides: from files to a report, in minutes, on any computer.

    \b
    tapfm demo                  9 to 10 minutes on two cores, no GPU
    tapfm demo --full           longer, with more slides
    tapfm demo --out elsewhere

    Slides are painted with a signal in some nests, inspected, tiled and split. An
    encoder of 0.9 million parameters learns from slide labels in three ways: fixed
    with ABMIL, fine-tuned with ABMIL, TAPFM. Each is evaluated on held-out and on
    external slides; TAPFM predicts them, with maps; a report has it all. At the end
    you see the table, whether attention found what was planted, and what to type
    next. Every command is shown as you would type it.

    Ctrl-C stops it, the same command goes on. What is done is not done again.

    \b
    report.html               all of it on a page
    planted.png               what was planted, attention before and after
    predictions/              maps of slides
    study/                    runs, evaluations, tables
    painted/, tiles/, ...     slides, tiles
    logs/                     the result of each command
    """
    from tapfm.cli.console import terminal
    from tapfm.demo.run import run_demo
    from tapfm.demo.show import say_what_comes, show
    from tapfm.demo.sizes import SIZES

    if full and tiny:
        raise InputError("--full and --tiny were both given.", hint="Give one of them, or neither.")
    size = SIZES["full" if full else "tiny" if tiny else "demo"]
    folder = out or Path("demo" if size.name == "demo" else f"demo-{size.name}")
    if folder.is_file():
        raise InputError(f"{folder} is a file.", hint="Give a folder to --out.")
    messages = Console(stderr=True, highlight=False)
    say_what_comes(size, messages)
    show(size, run_demo(size, folder, run_in_this_process, console=messages), terminal())


def run_in_this_process(words: Sequence[str]) -> int:
    """Run a command as if it were typed; torch is loaded once for all of them."""
    root = click.get_current_context().find_root().command
    return root.main(list(words), prog_name="tapfm", standalone_mode=False) or 0
