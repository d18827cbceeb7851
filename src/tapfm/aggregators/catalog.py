"""The catalogue of aggregators. Does not import torch.

To add an aggregator, add a module to this package and an entry to `AGGREGATORS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tapfm.aggregators.aggregator_option import AggregatorOption
from tapfm.aggregators.torchmil_catalog import TORCHMIL_MODELS, TORCHMIL_PREFIX
from tapfm.errors import SettingError, UnknownNameError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class AggregatorCard:
    """Description of an aggregator.

    implementation: module and class.
    uses_raw_attention: weights tiles by the raw attention of the encoder, so it has the argument `tau`, and stored
        features must contain the attention.
    uses_coordinates: needs the coordinates of the tiles on the slide.
    torchmil: name of the torchmil model, if it is one. These models have one target, their own head, and the arguments
        of their constructor as options.
    """

    name: str
    summary: str
    implementation: tuple[str, str]
    uses_raw_attention: bool = False
    uses_coordinates: bool = False
    options: Mapping[str, AggregatorOption] = field(default_factory=dict)
    torchmil: str | None = None

    def complete_options(self, given: Mapping[str, object]) -> dict[str, object]:
        """Check the given options and add the defaults of the others; torchmil applies its own defaults."""
        options = self.options
        if self.torchmil is not None and given:  # reading them from the constructor imports torch
            options = dict(options) | _read_torchmil_options(self.torchmil)
        for name, value in given.items():
            if name not in options:
                raise UnknownNameError.with_suggestions(
                    f"option of the aggregator {self.name}", name, options, see=", ".join(options) or "none"
                )
            if not options[name].accepts(value):
                raise SettingError(
                    f"The option {name} of the aggregator {self.name} is {value!r}, which is not valid.",
                    hint=f"It has to be {options[name].valid_values}; the default is {options[name].default}.",
                )
        return {name: option.default for name, option in self.options.items()} | dict(given)

    def check(self, targets: int, *, layer_norm: bool) -> None:
        """Raise SettingError if this is a torchmil model and there are several targets or a LayerNorm."""
        if self.torchmil is None:
            return
        if targets != 1:
            raise SettingError(
                f"{self.name} supports one target, but there are {targets}.",
                hint=f"Train one model per target, or use one of these aggregators: {', '.join(AGGREGATORS)}",
            )
        if layer_norm:
            raise SettingError(
                f"{self.name} has its own head, so head.layer_norm cannot be true.",
                hint="Set head.layer_norm = false.",
            )


_GATED_OPTIONS = {
    "hidden": AggregatorOption(512, "size of the projected features", at_least=1),
    "attention": AggregatorOption(256, "size of the hidden layer of the attention network", at_least=1),
    "gated": AggregatorOption(True, "use gated attention"),
    "dropout": AggregatorOption(0.0, "dropout of the projected features", at_least=0, below=1),
}


AGGREGATORS: dict[str, AggregatorCard] = {
    card.name: card
    for card in (
        AggregatorCard(
            name="cls-attention",
            summary="the aggregator of the paper: tiles weighted by the encoder's CLS attention",
            implementation=("tapfm.aggregators.cls_attention", "ClsAttention"),
            uses_raw_attention=True,
        ),
        AggregatorCard(
            name="cls-gated",
            summary="our own: the tile weights of cls-attention times a trained factor per tile and target",
            implementation=("tapfm.aggregators.cls_gated", "ClsGated"),
            uses_raw_attention=True,
            options={
                "attention": AggregatorOption(128, "size of the hidden layer of the gate", at_least=1),
                "dropout": AggregatorOption(0.0, "dropout of the input of the gate", at_least=0, below=1),
            },
        ),
        AggregatorCard(
            name="abmil",
            summary="attention-based MIL (Ilse et al., 2018)",
            implementation=("tapfm.aggregators.abmil", "Abmil"),
            options=_GATED_OPTIONS,
        ),
        AggregatorCard(
            name="dsmil",
            summary="dual-stream MIL: weights by similarity to the critical tile (Li et al., 2021)",
            implementation=("tapfm.aggregators.dsmil", "Dsmil"),
            options={
                "attention": AggregatorOption(128, "size of the queries", at_least=1),
                "nonlinear": AggregatorOption(True, "compute queries with two layers instead of one"),
                "values": AggregatorOption(False, "apply a layer to the features before they are summed"),
                "dropout": AggregatorOption(0.0, "dropout of the input of the `values` layer", at_least=0, below=1),
                "instance_weight": AggregatorOption(
                    0.5, "loss of the critical tiles as a fraction of the total loss", at_least=0, below=1
                ),
            },
        ),
        AggregatorCard(
            name="clam",
            summary="abmil with an instance loss (Lu et al., 2021)",
            implementation=("tapfm.aggregators.clam", "Clam"),
            options={
                **_GATED_OPTIONS,
                "branches": AggregatorOption(
                    "single", "one attention for all targets, or one per target", choices=("single", "multi")
                ),
                "instances": AggregatorOption(
                    8,
                    "number of tiles with the highest, and with the lowest, attention in the instance loss",
                    at_least=1,
                ),
                "instance_weight": AggregatorOption(
                    0.3, "instance loss as a fraction of the total loss", at_least=0, below=1
                ),
                "margin": AggregatorOption(
                    1.0,
                    "margin of the instance loss: 1 is the smooth SVM loss of the original, 0 is cross-entropy",
                    at_least=0,
                ),
            },
        ),
        AggregatorCard(
            name="varmil",
            summary="abmil that also uses the variance of the tiles (Schirris et al., 2022)",
            implementation=("tapfm.aggregators.varmil", "VarMil"),
            options=_GATED_OPTIONS,
        ),
        AggregatorCard(
            name="mean",
            summary="mean pooling",
            implementation=("tapfm.aggregators.mean", "MeanPool"),
        ),
        AggregatorCard(
            name="max",
            summary="max pooling: the highest tile logit of each target",
            implementation=("tapfm.aggregators.max", "MaxPool"),
        ),
    )
}


def find_aggregator_card(name: str) -> AggregatorCard:
    """Return the card of an aggregator, such as "abmil" or "torchmil:TransMIL"."""
    if name.startswith(TORCHMIL_PREFIX):
        return _build_torchmil_card(name.removeprefix(TORCHMIL_PREFIX))
    if name not in AGGREGATORS:
        see = f"{', '.join(AGGREGATORS)}, {TORCHMIL_PREFIX}MODEL"
        raise UnknownNameError.with_suggestions("aggregator", name, AGGREGATORS, see=see)
    return AGGREGATORS[name]


def _build_torchmil_card(model: str) -> AggregatorCard:
    if model not in TORCHMIL_MODELS:
        raise UnknownNameError.with_suggestions(
            "torchmil model", model, TORCHMIL_MODELS, see=", ".join(TORCHMIL_MODELS)
        )
    torchmil_model = TORCHMIL_MODELS[model]
    return AggregatorCard(
        name=f"{TORCHMIL_PREFIX}{model}",
        summary=torchmil_model.summary,
        implementation=("tapfm.aggregators.torchmil_models", "TorchmilAggregator"),
        uses_coordinates=torchmil_model.uses_graph,
        torchmil=model,
    )


def _read_torchmil_options(model: str) -> dict[str, AggregatorOption]:
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
    """Build an aggregator of the catalogue. `tau` is ignored unless the aggregator uses the raw attention."""
    card = find_aggregator_card(name)
    card.check(targets, layer_norm=layer_norm)
    arguments = card.complete_options(options or {})
    if card.torchmil is not None:
        arguments["model"] = card.torchmil
    if card.uses_raw_attention:
        arguments["tau"] = tau
    module, class_name = card.implementation
    aggregator_class = getattr(importlib.import_module(module), class_name)
    aggregator: nn.Module = aggregator_class(feature_size, targets, layer_norm=layer_norm, **arguments)
    return aggregator
