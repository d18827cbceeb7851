"""A setting that belongs to one aggregator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


Value = int | float | bool | str


@dataclass(frozen=True)
class Option:
    """A setting that one aggregator has and others have not; its type is that of its default, or `kind`."""

    default: Value | None
    summary: str = ""
    at_least: float = -math.inf
    below: float = math.inf
    choices: tuple[str, ...] = ()  # of a text; without any it is free
    kind: type | None = None  # where the default is None, or does not tell

    @property
    def valid(self) -> str:
        """Description of the valid values, for a message."""
        kind = self.kind or type(self.default)
        if kind is bool:
            return "true or false"
        if kind is str:
            return " or ".join(f'"{choice}"' for choice in self.choices) or "a text"
        lowest = f", at least {self.at_least:g}" if self.at_least > -math.inf else ""
        highest = f", below {self.below:g}" if self.below < math.inf else ""
        return f"{'a whole number' if kind is int else 'a number'}{lowest}{highest}"

    def takes(self, value: object) -> bool:
        """Say whether a value is of the right type and in range; a whole number does for any number."""
        kind = self.kind or type(self.default)
        if kind in (bool, str) or isinstance(value, bool):
            return type(value) is kind and (not self.choices or value in self.choices)
        kinds = (int, float) if kind is float else (int,)
        return isinstance(value, kinds) and self.at_least <= value < self.below
