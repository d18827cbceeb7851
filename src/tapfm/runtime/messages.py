"""Format parts of messages: commands for the shell, counts such as "2 slides", and hints with slide ids."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

_MAX_SLIDES_SHOWN = 5  # per hint


def group_hints(slide_hints: Iterable[tuple[str, str]]) -> list[str]:
    """Return one line per distinct hint, with the slides it applies to, from (slide_id, hint) pairs."""
    slides_by_hint: dict[str, list[str]] = {}
    for slide_id, hint in slide_hints:
        if hint:
            slides_by_hint.setdefault(hint, []).append(slide_id)
    lines = []
    for hint, slide_ids in slides_by_hint.items():
        others = f" and {len(slide_ids) - _MAX_SLIDES_SHOWN:,} more" if len(slide_ids) > _MAX_SLIDES_SHOWN else ""
        lines.append(f"{', '.join(slide_ids[:_MAX_SLIDES_SHOWN])}{others}: {hint}")
    return lines


def format_count(number: int, noun: str) -> str:
    """Return "1 slide", "2 slides", ..."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_command(*arguments: str | Path) -> str:
    """Return a tapfm command line, quoted so that it can be pasted into a shell."""
    return shlex.join(["tapfm", *map(str, arguments)])


def format_command_option(option: str, value: str) -> str:
    """Return an option with its value, quoted so that it can be pasted into a shell."""
    return f"{option} {shlex.quote(value)}"
