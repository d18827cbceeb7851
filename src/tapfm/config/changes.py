"""Compare two configurations of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapfm.config.loading import PATH_SETTINGS

_MEMORY_SETTINGS = (("adaptation", "chunk"), ("adaptation", "recompute"))  # may change after running out of memory


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each setting that differs. Paths, [machine] and memory settings may change and are ignored."""
    old, new = _flatten(before), _flatten(now)
    lines = []
    for name in dict.fromkeys([*old, *new]):
        if name.split(".")[0] == "machine" or tuple(name.split(".")) in (*PATH_SETTINGS, *_MEMORY_SETTINGS):
            continue
        if old.get(name) != new.get(name):
            lines.append(f"{name} was {old.get(name, 'not set')!r} and is now {new.get(name, 'not set')!r}")
    return lines


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all settings by their dotted names."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            values |= _flatten(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values
