"""Compare the saved configuration of a run with a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapfm.config.loading import PATH_SETTINGS

_MEMORY_SETTINGS = (("adaptation", "chunk"), ("adaptation", "recompute"))  # may change after running out of memory


def describe_changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each setting that differs, except paths, [machine] and memory settings, which are allowed to differ."""
    old, new = _flatten(before), _flatten(now)
    lines = []
    for name in dict.fromkeys([*old, *new]):
        if name.split(".")[0] == "machine" or tuple(name.split(".")) in (*PATH_SETTINGS, *_MEMORY_SETTINGS):
            continue
        if old.get(name) != new.get(name):
            lines.append(f"{name} was {old.get(name, 'not set')!r} and is now {new.get(name, 'not set')!r}")
    return lines


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values by dotted name, such as "adaptation.lambda"."""
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            values |= _flatten(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values
