"""Consoles of the commands, with results on stdout and messages on stderr, and shared print functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tapfm.runtime.messages import format_count, group_hints

_PIPED_WIDTH = 160  # characters, if there is no terminal
_MAX_HINTS = 10  # the others are in failures.csv


def stdout_console() -> Console:
    """Return the console for results. It has a fixed width if the output is piped."""
    at_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(width=None if at_terminal else _PIPED_WIDTH, highlight=False)


def stderr_console() -> Console:
    """Return the console for messages and progress."""
    return Console(stderr=True, highlight=False)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text without markup or hard line breaks, so that paths and commands can be copied."""
    console.print(Text(text, style), soft_wrap=True)


def print_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    print(json.dumps(data, indent=1))


def print_failures(console: Console, failed: Sequence[tuple[str, str]], table: Path) -> None:
    """Print the number of failed slides and up to _MAX_HINTS distinct hints. Prints nothing if no slide failed.

    failed: pairs of slide_id and hint.
    table: the file with all failures.
    """
    if not failed:
        return
    print_line(console, f"{format_count(len(failed), 'slide')} failed. Reasons: {table}", "bold red")
    lines = group_hints(failed)
    for line in lines[:_MAX_HINTS]:
        print_line(console, f"  {line}")
    if len(lines) > _MAX_HINTS:
        print_line(console, f"  ... and {len(lines) - _MAX_HINTS:,} more hints")
