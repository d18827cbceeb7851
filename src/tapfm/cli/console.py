"""The consoles that commands print to (results on stdout, messages on stderr), and printing that commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tapfm.runtime.messages import group_hints

_PIPED_WIDTH = 160  # columns of a table that no terminal limits
_ADVICE_SHOWN = 10  # lines; the rest is in failures.csv


def stdout_console() -> Console:
    """Make the console for results: as wide as the terminal, wide enough for a table when piped."""
    at_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(width=None if at_terminal else _PIPED_WIDTH, highlight=False)


def stderr_console() -> Console:
    """Make the console for messages and progress."""
    return Console(stderr=True, highlight=False)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, without markup, on one line that the terminal wraps: paths and commands can be copied."""
    console.print(Text(text, style), soft_wrap=True)


def print_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    print(json.dumps(data, indent=1))


def print_failures(console: Console, failed: Sequence[tuple[str, str]], table: Path) -> None:
    """Print how many slides failed, given as (slide_id, what to do), and each advice once; nothing where none failed.

    table: the file that lists all of them.
    """
    if not failed:
        return
    print_line(console, f"{len(failed):,} failed: {table}", "bold red")
    lines = group_hints(failed)
    for line in lines[:_ADVICE_SHOWN]:
        print_line(console, f"  {line}")
    if len(lines) > _ADVICE_SHOWN:
        print_line(console, f"  ... and {len(lines) - _ADVICE_SHOWN:,} more")
