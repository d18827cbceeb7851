"""The catalogue of aggregators: a table that can be read without torch. A new one is a file and an entry here."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tapfm.errors import SettingError, UnknownNameError

if TYPE_CHECKING:
    from torch import nn

Value = int | float | bool


@dataclass(frozen=True)
class Option:
    """A setting that one aggregator has and others have not; its type is that of its default."""

    default: Value
    summary: str
    at_least: float = -math.inf
    below: float = math.inf

    @property
    def valid(self) -> str:
        """What may be given, in words."""
        if isinstance(self.default, bool):
            return "true or false"
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        lowest = f", at least {self.at_least:g}" if self.at_least > -math.inf else ""
        return f"{kind}{lowest}" + (f", below {self.below:g}" if self.below < math.inf else "")

    def takes(self, value: object) -> bool:
        """Say whether a value is of the right type and in range; a whole number does for any number."""
        if isinstance(self.default, bool) or isinstance(value, bool):
            return type(value) is type(self.default)
        kinds = (int, float) if isinstance(self.default, float) else (int,)
        return isinstance(value, kinds) and self.at_least <= value < self.below


@dataclass(frozen=True)
class AggregatorCard:
    """What is known of one aggregator.

    `uses_attention`: it weighs tiles by the encoder's raw attention, so it takes `tau` and needs features stored with
    their attention. `made_by`: the module and the class.
    """

    name: str
    summary: str
    made_by: tuple[str, str]
    uses_attention: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)

    def settings(self, given: Mapping[str, object]) -> dict[str, object]:
        """Complete the options that are given with the defaults of the others; refuse what is not one."""
        for name, value in given.items():
            if name not in self.options:
                raise UnknownNameError.of(
                    f"option of the aggregator {self.name}", name, self.options, see=", ".join(self.options) or "none"
                )
            if not self.options[name].takes(value):
                raise SettingError(
                    f"The option {name} of the aggregator {self.name} is {value!r}.",
                    hint=f"It has to be {self.options[name].valid}; the default is {self.options[name].default}.",
                )
        return {name: option.default for name, option in self.options.items()} | dict(given)


AGGREGATORS: dict[str, AggregatorCard] = {
    card.name: card
    for card in (
        AggregatorCard(
            name="cls-attention",
            summary="the paper's: tiles weighed by the encoder's own CLS attention",
            made_by=("tapfm.aggregators.cls_attention", "ClsAttention"),
            uses_attention=True,
        ),
        AggregatorCard(
            name="abmil",
            summary="a small network learns the weight of each tile (Ilse et al., 2018)",
            made_by=("tapfm.aggregators.abmil", "Abmil"),
            options={
                "hidden": Option(512, "size of the projected features", at_least=1),
                "attention": Option(256, "size of the layer that the weights are computed from", at_least=1),
                "gated": Option(True, "with the sigmoid gate"),
                "dropout": Option(0.0, "part of the projected features dropped in training", at_least=0, below=1),
            },
        ),
        AggregatorCard(
            name="mean",
            summary="the mean of the tiles",
            made_by=("tapfm.aggregators.mean", "MeanPool"),
        ),
    )
}


def aggregator_card(name: str) -> AggregatorCard:
    """Find a card by its name."""
    if name not in AGGREGATORS:
        raise UnknownNameError.of("aggregator", name, AGGREGATORS, see=", ".join(AGGREGATORS))
    return AGGREGATORS[name]


def build_aggregator(
    name: str,
    feature_size: int,
    targets: int,
    *,
    tau: float = 1.0,
    layer_norm: bool = False,
    options: Mapping[str, object] | None = None,
) -> nn.Module:
    """Build an aggregator of the catalogue; `tau` is for those that use the encoder's attention."""
    card = aggregator_card(name)
    settings = card.settings(options or {})
    if card.uses_attention:
        settings["tau"] = tau
    module, made = card.made_by
    aggregator: nn.Module = getattr(importlib.import_module(module), made)(
        feature_size, targets, layer_norm=layer_norm, **settings
    )
    return aggregator
