"""Options of aggregators (`aggregator.options` in RUN.toml)."""

from __future__ import annotations

import math
from dataclasses import dataclass

Value = int | float | bool | str


@dataclass(frozen=True)
class AggregatorOption:
    """An option of one aggregator. Its type is `kind`, or the type of the default."""

    default: Value | None
    summary: str = ""
    at_least: float = -math.inf
    below: float = math.inf
    choices: tuple[str, ...] = ()  # allowed strings; if empty, any string is allowed
    kind: type | None = None  # needed if the default is None or of another type

    @property
    def valid_values(self) -> str:
        """Description of the valid values, for a message."""
        kind = self.kind or type(self.default)
        if kind is bool:
            return "true or false"
        if kind is str:
            return " or ".join(f'"{choice}"' for choice in self.choices) or "a string"
        minimum = f", at least {self.at_least:g}" if self.at_least > -math.inf else ""
        maximum = f", below {self.below:g}" if self.below < math.inf else ""
        return f"{'an integer' if kind is int else 'a number'}{minimum}{maximum}"

    def accepts(self, value: object) -> bool:
        """Return whether a value has the right type and is in range. An integer is accepted for a float."""
        kind = self.kind or type(self.default)
        if kind in (bool, str) or isinstance(value, bool):
            return type(value) is kind and (not self.choices or value in self.choices)
        kinds = (int, float) if kind is float else (int,)
        return isinstance(value, kinds) and self.at_least <= value < self.below
