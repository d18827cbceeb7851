"""`tapfm demo`: all of tapfm on painted slides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.demo.sizes import SIZES, Size
from tapfm.errors import InputError
from tapfm.runtime.options import Option, options

if TYPE_CHECKING:
    from tapfm.demo.results import DemoResults


@options
class DemoOptions:
    """Options of `tapfm demo`."""

    _: KW_ONLY
    out: Annotated[
        Path | None,
        Option("Folder for everything.", metavar="DIR", default="demo; with --full demo-full, with --tiny demo-tiny"),
    ] = None
    full: Annotated[bool, Option("More slides, a signal that is harder to see, more epochs.")] = False
    tiny: Annotated[bool, Option("Every step in a minute or two, to see that it works; the numbers mean nothing.")] = (
        False
    )

    @property
    def size(self) -> Size:
        """How many slides, how many epochs."""
        return SIZES["full" if self.full else "tiny" if self.tiny else "demo"]

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.out or Path("demo" if self.size.name == "demo" else f"demo-{self.size.name}")

    def check(self) -> None:
        """Refuse two sizes, and a file for a folder."""
        if self.full and self.tiny:
            raise InputError("--full and --tiny were both given.", hint="Give one of them, or neither.")
        if self.folder.is_file():
            raise InputError(f"{self.folder} is a file.", hint="Give a folder with --out.")


def demo(options: DemoOptions, console: Console, run_command: Callable[[Sequence[str]], int]) -> DemoResults:
    """Run the demo, or resume it, and return its results. Raises CommandFailedError where a command failed.

    run_command: runs a tapfm command in this process, given its words, and returns the exit code.
    """
    from tapfm.demo.results import read_results
    from tapfm.demo.run import run_demo

    return read_results(run_demo(options.size, options.folder, run_command, console=console))
