"""configuration.md: every setting of RUN.toml and STUDY.toml, from the classes that check them and from the recipes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from reference_text import any_of, code, page, paragraph, prose, table

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.config.recipes import Method, Recipe, recipe_settings
from tapfm.config.settings import RunConfig
from tapfm.config.study import StudyConfig
from tapfm.config.text import one_line, toml_value
from tapfm.encoders.catalog import encoder_cards
from tapfm.study.presets import PRESETS

METHODS: tuple[Method, ...] = get_args(Method)
SOME_EPOCHS = 7  # no recipe says that: a setting that has it follows schedule.epochs
KINDS: dict[Any, str] = {
    bool: "`true`, `false`",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Any: "anything",
}
BOUNDS: dict[type, tuple[str, str]] = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "above"),
    Le: ("le", "at most"),
    Lt: ("lt", "below"),
}
HUGE = 2**31  # a bound beyond it is the format's, not the setting's


def configuration_page() -> str:
    """Write configuration.md."""
    return page(
        ["# Configuration"],
        paragraph(
            "Every setting of RUN.toml, which `tapfm train` takes, and of STUDY.toml, which `tapfm study` takes. "
            "It is written from the code by `make docs`. Unknown names and wrong values are refused, all of them at "
            "once."
        ),
        ["## RUN.toml"],
        paragraph(
            "`tapfm config --out run.toml` writes one with these words as comments, `tapfm config run.toml` prints one "
            "with nothing left open, and `--set SECTION.KEY=VALUE` changes a setting for one command. Paths start at "
            "the file. What is not given comes from the recipe: `paper` is the paper's protocol, `reference` its "
            "authors' scripts. Where a default below depends on recipe, method or encoder, it says so."
        ),
        *section_blocks(RunConfig, of_recipes()),
        *encoder_blocks(),
        *aggregator_blocks(),
        ["## STUDY.toml"],
        paragraph(
            "`tapfm study --preset NAME --write study.toml` writes one to start from. Every combination of what is "
            "listed is a run."
        ),
        *section_blocks(StudyConfig, {}, prefix="STUDY.toml: "),
        ["### Presets"],
        table(["preset", "what it compares"], [[code(name), prose(each.summary)] for name, each in PRESETS.items()]),
    )


def section_blocks(model: type[BaseModel], recipes: Mapping[str, str], prefix: str = "") -> Iterator[list[str]]:
    """Write the settings of a file: those before any section, then section by section."""
    sections = {name: each for name, field in model.model_fields.items() if (each := section_of(field)) is not None}
    yield [f"### {prefix}before the sections" if prefix else "### Before the sections"]
    plain = {name: field for name, field in model.model_fields.items() if name not in sections}
    yield settings_table("", plain, recipes)
    for name, (section, brackets, optional) in sections.items():
        yield [f"### {prefix}{brackets[0]}{name}{brackets[1]}"]
        yield paragraph(one_line(section.__doc__) + (" May be left out." if optional else ""))
        yield settings_table(f"{name}.", section.model_fields, recipes)


def section_of(field: FieldInfo) -> tuple[type[BaseModel], tuple[str, str], bool] | None:
    """Tell a table of settings from a setting: its class, its brackets, and whether it may be left out."""
    kinds = [each for each in parts_of(field.annotation) if each is not NoneType]
    listed = len(kinds) == 1 and get_origin(kinds[0]) is list
    kind = get_args(kinds[0])[0] if listed else kinds[0]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return None
    return kind, ("[[", "]]") if listed else ("[", "]"), NoneType in parts_of(field.annotation)


def settings_table(prefix: str, fields: Mapping[str, FieldInfo], recipes: Mapping[str, str]) -> list[str]:
    """Write settings with their type, default and meaning."""
    rows = []
    for name, field in fields.items():
        key = field.alias or name
        if not field.description:
            raise ValueError(f"{prefix}{key} has no description")
        rows.append([code(key), type_text(field), default_text(prefix + key, field, recipes), prose(field.description)])
    return table(["setting", "type", "default", "meaning"], rows)


def type_text(field: FieldInfo) -> str:
    """Say what a setting may be."""
    kinds = [kind_text(each) for each in parts_of(field.annotation) if each is not NoneType]
    words = (", or " if "," in kinds[0] else " or ").join(kinds)
    return words + bounds_text(field.metadata)


def parts_of(kind: Any) -> tuple[Any, ...]:
    """List the types of which a value may be one."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def kind_text(kind: Any) -> str:
    """Name one type."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return kind_text(inside[0]) + bounds_text([each for extra in inside[1:] for each in expanded(extra)])
    if origin is Literal:
        return any_of(toml_value(each) for each in inside)
    if origin is list:
        (inner,) = inside
        return f"list of {any_of(map(toml_value, get_args(inner)))}" if get_origin(inner) is Literal else plural(inner)
    if origin is tuple:
        return f"{len(inside)} values: {kind_text(inside[0])}"
    if origin is dict:
        return "table"
    return KINDS[kind]


def plural(kind: Any) -> str:
    """Name a list by what is in it."""
    words = kind_text(kind)
    return f"list of {words.replace('number', 'numbers', 1) if 'number' in words else words + 's' * (words == 'path')}"


def expanded(extra: Any) -> Sequence[Any]:
    """Take the bounds out of what pydantic was told."""
    return extra.metadata if isinstance(extra, FieldInfo) else [extra]


def bounds_text(bounds: Sequence[Any]) -> str:
    """Say within which bounds."""
    said = []
    for each in bounds:
        if isinstance(each, MinLen):
            said.append("one or more" if each.min_length == 1 else f"{each.min_length} or more")
        elif type(each) in BOUNDS:
            attribute, words = BOUNDS[type(each)]
            if abs(value := getattr(each, attribute)) < HUGE:
                said.append(f"{words} {value}")
    return f", {', '.join(said)}" if said else ""


def default_text(name: str, field: FieldInfo, recipes: Mapping[str, str]) -> str:
    """Say what holds where a setting is not given."""
    if name in recipes:
        return recipes[name]
    if name == "aggregator.options":
        return "[by aggregator](#what-depends-on-the-aggregator)"
    if field.is_required():
        return "has to be given"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return f"not set; such as {code(toml_value(field.examples[0]))}" if field.examples else "not set"
    return code(toml_value(value))


def of_recipes() -> dict[str, str]:
    """Say what the recipes set, by setting: the paper's value with method tapfm, then where another one holds."""
    return {name: recipe_text(name) for name in values_of("paper", "tapfm", "uni")}


def recipe_text(name: str) -> str:
    """Say what the recipes set for one setting: the paper's for method tapfm first; what has no words is an error."""
    of_encoder = by_encoder(name)
    several = len(set(of_encoder)) > 1
    said = ["[by encoder](#what-depends-on-the-encoder)" if several else code(of_encoder[0])]
    paper = {method: plain(name, "paper", method) for method in METHODS}
    for value in dict.fromkeys(paper.values()):
        methods = [method for method in METHODS if paper[method] == value]
        if "tapfm" not in methods:
            said.append(f"{' and '.join(methods)}: {code(value)}")
    reference = {method: plain(name, "reference", method) for method in METHODS}
    if values_of("reference", "tapfm", "uni", SOME_EPOCHS)[name] == SOME_EPOCHS:
        said.append("reference: as `schedule.epochs`")
    elif len(set(reference.values())) == 1 and reference != paper:
        said.append(f"reference: {code(reference['tapfm'])}")
    elif reference != paper:
        raise ValueError(f"{name}: recipe reference differs from paper in a way that there are no words for")
    return "; ".join(said)


def plain(name: str, recipe: Recipe, method: Method) -> str:
    """Give a recipe's value for an encoder like those of the paper."""
    return toml_value(values_of(recipe, method, "uni")[name])


def by_encoder(name: str) -> list[str]:
    """Give the paper's value for each encoder of the catalogue."""
    return [toml_value(values_of("paper", "tapfm", key)[name]) for key in encoder_cards()]


def values_of(recipe: Recipe, method: Method, encoder: str, epochs: int | None = None) -> dict[str, Any]:
    """Ask a recipe, and give its settings by their full names."""
    settings = recipe_settings(recipe, encoder_cards()[encoder], method, epochs)
    return {f"{section}.{key}": value for section, values in settings.items() for key, value in values.items()}


def encoder_blocks() -> Iterator[list[str]]:
    """List the settings whose default depends on the encoder, value by value."""
    yield ["### What depends on the encoder"]
    yield paragraph(
        "The paper draws as many tiles of a slide as its GPU holds; another encoder gets the number of the one whose "
        "cost per tile it does not exceed. Small encoders that come with tapfm need larger steps."
    )
    rows = []
    for name in values_of("paper", "tapfm", "uni"):
        of_value: dict[str, list[str]] = defaultdict(list)
        for key, value in zip(encoder_cards(), by_encoder(name), strict=True):
            of_value[value].append(key)
        most = max(of_value, key=lambda value: len(of_value[value]))
        if len(of_value) == 1:
            continue
        several = len(of_value) > 2
        rows += [
            [code(name), code(value), any_of(keys) if value != most or several else "all others"]
            for value, keys in of_value.items()
        ]
    yield table(["setting", "default", "encoders"], once(rows))


def aggregator_blocks() -> Iterator[list[str]]:
    """List the options of each aggregator, for aggregator.options."""
    yield ["### What depends on the aggregator"]
    yield paragraph(
        "`aggregator.options`, of those that have any. Options of `torchmil:<Model>` are those of its constructor."
    )
    rows = [
        [code(card.name), code(name), prose(option.valid), code(toml_value(option.default)), prose(option.summary)]
        for card in AGGREGATORS.values()
        for name, option in card.options.items()
    ]
    yield table(["aggregator", "option", "type", "default", "meaning"], once(rows))


def once(rows: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Name what several rows are about in the first of them."""
    before = None
    for first, *others in rows:
        yield ["" if first == before else first, *others]
        before = first
