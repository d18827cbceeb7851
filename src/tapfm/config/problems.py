"""What is wrong with a RUN.toml, in words: one line for each setting, with what would be valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tapfm.aggregators.catalog import aggregator_card
from tapfm.encoders.adapters import Scope
from tapfm.errors import InputError

if TYPE_CHECKING:
    from tapfm.config.settings import RunConfig

Place = tuple[str, ...]  # of a setting: ("seed",), ("cohort",), ("cohort", "table")


def invalid_values(error: ValidationError, settings: Sequence[Place]) -> list[str]:
    """Say which settings are unknown, missing, or not what they should be."""
    problems: dict[str, list[str]] = {}  # several where a setting may be of several types
    values: dict[str, str] = {}
    for each in error.errors():
        place = tuple(map(str, each["loc"][:2]))  # then comes an item of a list, or one of several types
        name, message = ".".join(place), f"{each['msg'][0].lower()}{each['msg'][1:]}"
        if each["type"] == "extra_forbidden":
            message = f"there is no such setting{did_you_mean(place, settings)}"
        elif each["type"] == "missing" and len(each["loc"]) <= 2:
            message = "is missing"
        elif each["type"] == "json_invalid":
            name, message = "a name", "is not UTF-8, so that it cannot be written to a file"
        else:
            message = "input should have one more item" if each["type"] == "missing" else message
            values[name] = f"; got {each['input']!r}"
        problems.setdefault(name, []).append(message)
    return [
        f"{name}: {' or '.join(dict.fromkeys(said)).replace(' or input should be', ' or')}{values.get(name, '')}"
        for name, said in problems.items()
    ]


def did_you_mean(place: Place, settings: Sequence[Place]) -> str:
    """Offer the same name in another section; else the nearest name, first of the same section."""
    *section, key = place
    siblings = [setting for setting in settings if list(setting[:-1]) == section]
    meant = [setting for setting in settings if setting[-1] == key]
    for among, likeness in ((siblings, 0.5), (settings, 0.7)):
        near = difflib.get_close_matches(key, [setting[-1] for setting in among], n=1, cutoff=likeness)
        meant = meant or [setting for setting in among if setting[-1] in near]
    return f"; did you mean {' or '.join('.'.join(setting) for setting in meant)}?" if meant else ""


def contradictions(config: RunConfig) -> Iterator[str]:
    """Find settings that are each valid and do not go together."""
    method, optimiser, schedule = config.adaptation.method, config.optimiser, config.schedule
    yield from _aggregator_problems(config)
    if method != "tapfm" and config.adaptation.lambda_ != 0:
        yield f"adaptation.lambda: is 0 with method {method}; got {config.adaptation.lambda_:g}"
    if method == "fixed" and config.tiles.features is None:
        yield "tiles.features: is missing; method fixed learns from what `tapfm embed` wrote"
    if method != "fixed" and config.tiles.folder is None:
        yield f"tiles.folder: is missing; method {method} learns from what `tapfm tile` wrote"
    for setting, value, usual in (
        ("adaptation.backward_tiles", config.adaptation.backward_tiles, 0),
        ("optimiser.moments", optimiser.moments, "auto"),
    ):
        if method == "fixed" and value != usual:
            yield f"{setting}: is {usual} with method fixed, which trains no encoder; got {value}"
    for part, lowest, highest in (
        ("encoder", schedule.encoder_lr_min, optimiser.encoder_lr),
        ("aggregator", schedule.aggregator_lr_min, optimiser.aggregator_lr),
    ):
        if lowest > highest:
            yield f"schedule.{part}_lr_min: {lowest:g} is above optimiser.{part}_lr, {highest:g}"
    low, high = config.augmentation.blur_radius
    if low > high:
        yield f"augmentation.blur_radius: from {low:g} to {high:g} is no range"
    if len(set(config.task.targets)) < len(config.task.targets):
        yield "task.targets: names a target twice"
    try:
        Scope.parse(config.adaptation.scope)
    except InputError as error:
        yield f"adaptation.scope: {error.message} {error.hint}"


def _aggregator_problems(config: RunConfig) -> Iterator[str]:
    """Find an aggregator that is none, does not go with the method, or has no such options."""
    try:
        aggregator = aggregator_card(config.aggregator.name)
    except InputError as error:
        yield f"aggregator.name: {error.message} {error.hint}"
        return
    if config.adaptation.method == "tapfm" and not aggregator.uses_attention:
        yield (
            f"aggregator.name: '{aggregator.name}' does not use the encoder's attention, so method tapfm would be "
            'finetune; say adaptation.method = "finetune", or use cls-attention or cls-gated'
        )
    for place, targets, layer_norm in (
        ("task.targets", len(config.task.targets), False),
        ("head.layer_norm", 1, config.head.layer_norm),
    ):
        try:
            aggregator.check(targets, layer_norm=layer_norm)
        except InputError as error:
            yield f"{place}: {error.message} {error.hint}"
    for name, value in config.aggregator.options.items():
        try:
            aggregator.settings({name: value})
        except InputError as error:
            yield f"aggregator.options.{name}: {error.message} {error.hint}"
