"""What to do next: commands to paste, and advice once for all the slides it is the same for."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

_NAMES_SHOWN = 5


def grouped_advice(advice_of: Iterable[tuple[str, str]]) -> list[str]:
    """Turn (slide, advice) pairs into one line for each advice, in the order they came."""
    slides: dict[str, list[str]] = {}
    for slide_id, advice in advice_of:
        if advice:
            slides.setdefault(advice, []).append(slide_id)
    lines = []
    for advice, names in slides.items():
        others = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
        lines.append(f"{', '.join(names[:_NAMES_SHOWN])}{others}: {advice}")
    return lines


def counted(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def command(*words: str | Path) -> str:
    """Write a command that can be pasted, whatever is in its paths."""
    return shlex.join(["tapfm", *map(str, words)])
