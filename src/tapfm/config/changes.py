"""What differs between two configurations of a run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapfm.config.loading import PATHS

_MEMORY_ONLY = (("adaptation", "chunk"), ("adaptation", "recompute"))  # a run that ran out of it may change them


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare settings; where files are and what the machine does may change."""
    old, new = _flat(before), _flat(now)
    lines = []
    for name in dict.fromkeys([*old, *new]):
        if name.split(".")[0] == "machine" or tuple(name.split(".")) in (*PATHS, *_MEMORY_ONLY):
            continue
        if old.get(name) != new.get(name):
            lines.append(f"{name} was {old.get(name, 'not set')!r}, is {new.get(name, 'not set')!r}")
    return lines


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name each setting by its whole path."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            values |= _flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values
