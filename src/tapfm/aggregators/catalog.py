"""The catalogue of aggregators: a table that can be read without torch. A new one is a file and an entry here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tapfm.aggregators.option import Option
from tapfm.aggregators.torchmil_catalog import TORCHMIL, TORCHMIL_MODELS
from tapfm.errors import SettingError, UnknownNameError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class AggregatorCard:
    """What is known of one aggregator.

    `uses_attention`: it weighs tiles by the encoder's raw attention, so it takes `tau` and needs features stored with
    their attention. `uses_positions`: it has to know where on the slide its tiles are. `implementation`: the module and the
    class. `torchmil`: the model of torchmil that it is; that has one target and a head of its own, and takes the
    options that its constructor has.
    """

    name: str
    summary: str
    implementation: tuple[str, str]
    uses_attention: bool = False
    uses_positions: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    torchmil: str | None = None

    def settings(self, given: Mapping[str, object]) -> dict[str, object]:
        """Complete the options that are given with the defaults of the others; refuse what is not one."""
        options = self.options
        if self.torchmil is not None and given:  # only then: they are read from the constructor, which takes torch
            options = dict(options) | _torchmil_options(self.torchmil)
        for name, value in given.items():
            if name not in options:
                raise UnknownNameError.with_suggestions(
                    f"option of the aggregator {self.name}", name, options, see=", ".join(options) or "none"
                )
            if not options[name].takes(value):
                raise SettingError(
                    f"The option {name} of the aggregator {self.name} is {value!r}.",
                    hint=f"It has to be {options[name].valid}; the default is {options[name].default}.",
                )
        return {name: option.default for name, option in self.options.items()} | dict(given)

    def check(self, targets: int, *, layer_norm: bool) -> None:
        """Refuse what a model of torchmil cannot do."""
        if self.torchmil is None:
            return
        if targets != 1:
            raise SettingError(
                f"{self.name} has one logit, and there are {targets} targets.",
                hint=f"Train it for one target at a time, or use an aggregator of tapfm: {', '.join(AGGREGATORS)}",
            )
        if layer_norm:
            raise SettingError(
                f"{self.name} has a head of its own, before which there is no LayerNorm.",
                hint="Leave it out: head.layer_norm = false",
            )


_GATED_OPTIONS = {
    "hidden": Option(512, "size of the projected features", at_least=1),
    "attention": Option(256, "size of the layer that the weights are computed from", at_least=1),
    "gated": Option(True, "with the sigmoid gate"),
    "dropout": Option(0.0, "part of the projected features dropped in training", at_least=0, below=1),
}


AGGREGATORS: dict[str, AggregatorCard] = {
    card.name: card
    for card in (
        AggregatorCard(
            name="cls-attention",
            summary="the paper's: tiles weighed by the encoder's own CLS attention",
            implementation=("tapfm.aggregators.cls_attention", "ClsAttention"),
            uses_attention=True,
        ),
        AggregatorCard(
            name="cls-gated",
            summary="ours: a gate learnt for each target, with that attention as its prior",
            implementation=("tapfm.aggregators.cls_gated", "ClsGated"),
            uses_attention=True,
            options={
                "attention": Option(128, "size of the layer that the gate is computed from", at_least=1),
                "dropout": Option(0.0, "part of the features dropped before the gate in training", at_least=0, below=1),
            },
        ),
        AggregatorCard(
            name="abmil",
            summary="a small network learns the weight of each tile (Ilse et al., 2018)",
            implementation=("tapfm.aggregators.abmil", "Abmil"),
            options=_GATED_OPTIONS,
        ),
        AggregatorCard(
            name="dsmil",
            summary="weights by likeness to the most telling tile (Li et al., 2021)",
            implementation=("tapfm.aggregators.dsmil", "Dsmil"),
            options={
                "attention": Option(128, "size of the queries that are compared", at_least=1),
                "nonlinear": Option(True, "queries of two layers instead of one"),
                "values": Option(False, "a layer before the tiles are summed"),
                "dropout": Option(0.0, "part of the features dropped before that layer", at_least=0, below=1),
                "instance_weight": Option(0.5, "part of the loss that is the critical tile's", at_least=0, below=1),
            },
        ),
        AggregatorCard(
            name="clam",
            summary="abmil with a loss of its tiles' own (Lu et al., 2021)",
            implementation=("tapfm.aggregators.clam", "Clam"),
            options={
                **_GATED_OPTIONS,
                "branches": Option("single", "one attention, or one for each target", choices=("single", "multi")),
                "instances": Option(8, "tiles of highest and of lowest attention that are told apart", at_least=1),
                "instance_weight": Option(0.3, "part of the loss that is the tiles'", at_least=0, below=1),
                "margin": Option(1.0, "1: the original's smooth SVM, 0: cross-entropy", at_least=0),
            },
        ),
        AggregatorCard(
            name="varmil",
            summary="abmil that also sees how tiles vary (Schirris et al., 2022)",
            implementation=("tapfm.aggregators.varmil", "VarMil"),
            options=_GATED_OPTIONS,
        ),
        AggregatorCard(
            name="mean",
            summary="the mean of the tiles",
            implementation=("tapfm.aggregators.mean", "MeanPool"),
        ),
        AggregatorCard(
            name="max",
            summary="the most telling tile of each target",
            implementation=("tapfm.aggregators.max", "MaxPool"),
        ),
    )
}


def aggregator_card(name: str) -> AggregatorCard:
    """Find a card by its name; "torchmil:TransMIL" is a model of torchmil."""
    if name.startswith(TORCHMIL):
        return _torchmil_card(name.removeprefix(TORCHMIL))
    if name not in AGGREGATORS:
        see = f"{', '.join(AGGREGATORS)}, {TORCHMIL}MODEL"
        raise UnknownNameError.with_suggestions("aggregator", name, AGGREGATORS, see=see)
    return AGGREGATORS[name]


def _torchmil_card(model: str) -> AggregatorCard:
    """Make the card of a model of torchmil."""
    if model not in TORCHMIL_MODELS:
        raise UnknownNameError.with_suggestions(
            "model of torchmil", model, TORCHMIL_MODELS, see=", ".join(TORCHMIL_MODELS)
        )
    facts = TORCHMIL_MODELS[model]
    return AggregatorCard(
        name=f"{TORCHMIL}{model}",
        summary=facts.summary,
        implementation=("tapfm.aggregators.torchmil_models", "TorchmilAggregator"),
        uses_positions=facts.uses_graph,
        torchmil=model,
    )


def _torchmil_options(model: str) -> dict[str, Option]:
    """Read the options of a model of torchmil from its constructor."""
    from tapfm.aggregators.torchmil_models import read_options

    return read_options(model)


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
    card.check(targets, layer_norm=layer_norm)
    settings = card.settings(options or {})
    if card.torchmil is not None:
        settings["model"] = card.torchmil
    if card.uses_attention:
        settings["tau"] = tau
    module, made = card.implementation
    aggregator: nn.Module = getattr(importlib.import_module(module), made)(
        feature_size, targets, layer_norm=layer_norm, **settings
    )
    return aggregator
