"""The consoles that commands print to: results on stdout, messages on stderr."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 160  # columns of a table that no terminal limits


def terminal() -> Console:
    """Make the console for results: as wide as the terminal, wide enough for a table when piped."""
    at_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(width=None if at_terminal else PIPED_WIDTH, highlight=False)
