"""`tapfm demo`: run all steps of tapfm on synthetic slides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.demo.sizes import SIZES, DemoSize
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
        Option("Output folder.", metavar="DIR", show_default="demo; demo-full with --full, demo-tiny with --tiny"),
    ] = None
    full: Annotated[
        bool, Option("More slides, a signal that is harder to detect, and more epochs: an hour or more on two cores.")
    ] = False
    tiny: Annotated[
        bool,
        Option("Only test that every step works: one or two minutes, with too few slides for meaningful metrics."),
    ] = False

    @property
    def size(self) -> DemoSize:
        """Number of slides and epochs."""
        return SIZES["full" if self.full else "tiny" if self.tiny else "demo"]

    @property
    def folder(self) -> Path:
        """Output folder: `out`, or a default that depends on the size."""
        return self.out or Path("demo" if self.size.name == "demo" else f"demo-{self.size.name}")

    def check(self) -> None:
        """Raise InputError for two sizes, or if the output folder is a file."""
        if self.full and self.tiny:
            raise InputError("--full and --tiny cannot be combined.", hint="Use one of them, or neither.")
        if self.folder.is_file():
            raise InputError(f"{self.folder} is a file, not a folder.", hint="Choose another folder with --out.")


def demo(options: DemoOptions, console: Console, run_command: Callable[[Sequence[str]], int]) -> DemoResults:
    """Run or resume the demo and return its results. Raises CommandFailedError if a command fails.

    run_command: runs a tapfm command, given its arguments, in this process and returns the exit code.
    """
    from tapfm.demo.results import read_results
    from tapfm.demo.runner import run_demo

    return read_results(run_demo(options.size, options.folder, run_command, console=console))
