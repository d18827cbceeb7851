"""Describe the problems of a configuration: one line per problem."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from tapfm.aggregators.catalog import find_aggregator_card
from tapfm.encoders.adapters import Scope
from tapfm.errors import InputError

if TYPE_CHECKING:
    from tapfm.config.settings import RunConfig

SettingPath = tuple[str, ...]  # key path of a setting or section: ("seed",), ("cohort",), ("cohort", "table")


def describe_invalid_values(error: ValidationError, settings: Sequence[SettingPath]) -> list[str]:
    """Describe each setting that is unknown, not set or invalid.

    settings: the valid settings, to suggest one instead of an unknown setting.
    """
    problems: dict[str, list[str]] = {}  # by setting; a setting that accepts several types can have several messages
    values: dict[str, str] = {}
    for each in error.errors():
        # section and key; pydantic may append a list index or the type that it tried
        path = tuple(map(str, each["loc"][:2]))
        name, message = ".".join(path), f"{each['msg'][0].lower()}{each['msg'][1:]}"
        if each["type"] == "extra_forbidden":
            message = f"unknown setting{suggest_setting(path, settings)}"
        elif each["type"] == "missing" and len(each["loc"]) <= 2:
            message = "is not set"
        elif each["type"] in ("list_type", "tuple_type"):
            message, values[name] = 'must be a list, such as ["A", "B"] or [1, 2]', f"; got {each['input']!r}"
            if isinstance(each["input"], dict):
                message = f"must be a list of tables: write [[{name}]] instead of [{name}]"
        elif each["type"] == "json_invalid":
            name, message = "a path or name", "is not valid UTF-8 and cannot be written to a file"
        else:
            message = "has too few items" if each["type"] == "missing" else message
            values[name] = f"; got {each['input']!r}"
        problems.setdefault(name, []).append(message)
    return [
        f"{name}: {' or '.join(dict.fromkeys(messages)).replace(' or input should be', ' or')}{values.get(name, '')}"
        for name, messages in problems.items()
    ]


def suggest_setting(path: SettingPath, settings: Sequence[SettingPath]) -> str:
    """Return a suggestion for an unknown setting, such as "; did you mean cohort.table?", or "" if there is none.

    Suggests all settings with the same key in other sections. If there are none, suggests a similar key of the same
    section, else a similar key of any section.
    """
    *section, key = path
    siblings = [setting for setting in settings if list(setting[:-1]) == section]
    suggested = [setting for setting in settings if setting[-1] == key]
    for candidates, cutoff in ((siblings, 0.5), (settings, 0.7)):
        matches = difflib.get_close_matches(key, [setting[-1] for setting in candidates], n=1, cutoff=cutoff)
        suggested = suggested or [setting for setting in candidates if setting[-1] in matches]
    return f"; did you mean {' or '.join('.'.join(setting) for setting in suggested)}?" if suggested else ""


def find_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each problem that involves several settings, the aggregator, the targets or the scope."""
    method, optimiser, schedule = config.adaptation.method, config.optimiser, config.schedule
    yield from _find_aggregator_problems(config)
    if method != "tapfm" and config.adaptation.lambda_ != 0:
        yield (
            f"adaptation.lambda: must be 0 with method {method}, which has no attention loss; "
            f"got {config.adaptation.lambda_:g}"
        )
    if method == "fixed" and config.tiles.features is None:
        yield 'tiles.features: is not set; method = "fixed" needs a folder of features, for example from `tapfm embed`'
    if method != "fixed" and config.tiles.folder is None:
        yield f"tiles.folder: is not set; method {method} needs a folder of tiles, for example from `tapfm tile`"
    for setting, value, required in (
        ("adaptation.backward_tiles", config.adaptation.backward_tiles, 0),
        ("optimiser.moments", optimiser.moments, "auto"),
    ):
        if method == "fixed" and value != required:
            yield f"{setting}: must be {required} with method fixed, which does not train the encoder; got {value}"
    for part, minimum, initial in (
        ("encoder", schedule.encoder_lr_min, optimiser.encoder_lr),
        ("aggregator", schedule.aggregator_lr_min, optimiser.aggregator_lr),
    ):
        if minimum > initial:
            yield f"schedule.{part}_lr_min: {minimum:g} is larger than optimiser.{part}_lr, {initial:g}"
    low, high = config.augmentation.blur_radius
    if low > high:
        yield f"augmentation.blur_radius: the minimum {low:g} is larger than the maximum {high:g}"
    if len(set(config.task.targets)) < len(config.task.targets):
        yield "task.targets: a target is listed twice"
    for target in config.task.labels:
        if target not in config.task.targets:
            yield f"task.labels: '{target}' is not one of task.targets"
    try:
        Scope.parse(config.adaptation.scope)
    except InputError as error:
        yield f"adaptation.scope: {error.message} {error.hint}"


def _find_aggregator_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of an aggregator that is unknown, does not support the method, or has invalid options."""
    try:
        aggregator = find_aggregator_card(config.aggregator.name)
    except InputError as error:
        yield f"aggregator.name: {error.message} {error.hint}"
        return
    if config.adaptation.method == "tapfm" and not aggregator.uses_raw_attention:
        yield (
            f"aggregator.name: '{aggregator.name}' does not use the encoder's attention, which method tapfm trains; "
            'set adaptation.method = "finetune", or use cls-attention or cls-gated'
        )
    for setting, targets, layer_norm in (
        ("task.targets", len(config.task.targets), False),
        ("head.layer_norm", 1, config.head.layer_norm),
    ):
        try:
            aggregator.check(targets, layer_norm=layer_norm)
        except InputError as error:
            yield f"{setting}: {error.message} {error.hint}"
    for name, value in config.aggregator.options.items():
        try:
            aggregator.complete_options({name: value})
        except InputError as error:
            yield f"aggregator.options.{name}: {error.message} {error.hint}"
