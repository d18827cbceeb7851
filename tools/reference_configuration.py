"""Generate configuration.md: every setting of RUN.toml and STUDY.toml, from the pydantic models and the recipes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from reference_text import code, code_list, escape_text, format_page, format_paragraph, format_table

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.config.recipes import Method, Recipe, build_recipe_settings
from tapfm.config.settings import RunConfig
from tapfm.config.study import StudyConfig
from tapfm.config.text import first_line, format_toml_value
from tapfm.encoders.catalog import load_encoder_cards
from tapfm.study.presets import PRESETS

METHODS: tuple[Method, ...] = get_args(Method)
PROBE_EPOCHS = 7  # no recipe has this value: a setting that gets it is set from schedule.epochs
TYPE_NAMES: dict[Any, str] = {
    bool: "`true`, `false`",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    Any: "any value",
}
BOUND_TEXTS: dict[type, tuple[str, str]] = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "above"),
    Le: ("le", "at most"),
    Lt: ("lt", "below"),
}
MAX_SHOWN_BOUND = 2**31  # larger bounds, such as 2**63 of a seed, only guard against overflow and are not shown


def generate_configuration_page() -> str:
    """Return configuration.md."""
    return format_page(
        ["# Configuration"],
        format_paragraph(
            "All settings of RUN.toml, the configuration of `tapfm train`, and of STUDY.toml, the configuration of "
            "`tapfm study`. `make docs` generates this page from the code. Unknown names and invalid values are "
            "errors; all of them are reported at once."
        ),
        ["## RUN.toml"],
        format_paragraph(
            "`tapfm config --out run.toml` writes a file with the descriptions below as comments. `tapfm config "
            "run.toml` prints a configuration with all defaults filled in. `--set SECTION.KEY=VALUE` changes a setting "
            "for one command. Paths in the file are relative to its folder, paths in `--set` to the current folder. "
            "Settings that are not in the file come from the recipe: `paper` is the protocol of the paper, `reference` "
            "is that of its authors' scripts. Defaults that depend on recipe, method or encoder are marked."
        ),
        *_section_blocks(RunConfig, _recipe_defaults()),
        *_encoder_blocks(),
        *_aggregator_blocks(),
        ["## STUDY.toml"],
        format_paragraph(
            "`tapfm study --preset NAME --write study.toml` writes a file to start from. A study runs every "
            "combination of the listed values; `aggregators` are used with the methods fixed and finetune, "
            "`tapfm_aggregators` with tapfm."
        ),
        *_section_blocks(StudyConfig, {}, prefix="STUDY.toml: "),
        ["### Presets"],
        format_table(
            ["preset", "what it compares"], [[code(name), escape_text(each.summary)] for name, each in PRESETS.items()]
        ),
    )


def _section_blocks(model: type[BaseModel], recipes: Mapping[str, str], prefix: str = "") -> Iterator[list[str]]:
    """Yield the top-level settings of a file, then those of each section."""
    sections = {name: found for name, field in model.model_fields.items() if (found := _as_section(field))}
    yield [f"### {prefix}top-level settings" if prefix else "### Top-level settings"]
    top_level = {name: field for name, field in model.model_fields.items() if name not in sections}
    yield _settings_table("", top_level, recipes)
    for name, (section, brackets, optional) in sections.items():
        yield [f"### {prefix}{brackets[0]}{name}{brackets[1]}"]
        yield format_paragraph(first_line(section.__doc__) + (" This section is optional." if optional else ""))
        yield _settings_table(f"{name}.", section.model_fields, recipes)


def _as_section(field: FieldInfo) -> tuple[type[BaseModel], tuple[str, str], bool] | None:
    """Return model, brackets and whether it is optional if a field is a section; None if it is a single setting."""
    kinds = [each for each in _union_members(field.annotation) if each is not NoneType]
    is_list = len(kinds) == 1 and get_origin(kinds[0]) is list
    kind = get_args(kinds[0])[0] if is_list else kinds[0]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return None
    return kind, ("[[", "]]") if is_list else ("[", "]"), NoneType in _union_members(field.annotation)


def _settings_table(prefix: str, fields: Mapping[str, FieldInfo], recipes: Mapping[str, str]) -> list[str]:
    rows = []
    for name, field in fields.items():
        key = field.alias or name
        if not field.description:
            raise ValueError(f"{prefix}{key} has no description")
        default = _default_text(prefix + key, field, recipes)
        rows.append([code(key), _type_text(field), default, escape_text(field.description)])
    return format_table(["setting", "type", "default", "meaning"], rows)


def _type_text(field: FieldInfo) -> str:
    """Describe the type and the bounds of a setting."""
    kinds = [_kind_text(each) for each in _union_members(field.annotation) if each is not NoneType]
    return (", or " if "," in kinds[0] else " or ").join(kinds) + _bounds_text(field.metadata)


def _union_members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _kind_text(kind: Any) -> str:
    """Describe a single type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [bound for extra in arguments[1:] for bound in _bounds(extra)]
        return _kind_text(arguments[0]) + _bounds_text(bounds)
    if origin is Literal:
        return code_list(format_toml_value(each) for each in arguments)
    if origin is list:
        (item,) = arguments
        return f"list of {_kind_text(item)}" if get_origin(item) is Literal else _list_text(item)
    if origin is tuple:
        return f"{len(arguments)} values: {_kind_text(arguments[0])}"
    if origin is dict:
        return "table"
    return TYPE_NAMES[kind]


def _list_text(kind: Any) -> str:
    """Describe a list by the plural of its item type."""
    text = _kind_text(kind)
    for singular in ("integer", "number", "path"):
        if singular in text:
            return f"list of {text.replace(singular, singular + 's', 1)}"
    return f"list of {text}"


def _bounds(extra: Any) -> Sequence[Any]:
    return extra.metadata if isinstance(extra, FieldInfo) else [extra]


def _bounds_text(bounds: Sequence[Any]) -> str:
    texts = []
    for bound in bounds:
        if isinstance(bound, MinLen):
            texts.append("one or more" if bound.min_length == 1 else f"{bound.min_length} or more")
        elif type(bound) in BOUND_TEXTS:
            attribute, text = BOUND_TEXTS[type(bound)]
            if abs(value := getattr(bound, attribute)) < MAX_SHOWN_BOUND:
                texts.append(f"{text} {value}")
    return f", {', '.join(texts)}" if texts else ""


def _default_text(name: str, field: FieldInfo, recipes: Mapping[str, str]) -> str:
    if name in recipes:
        return recipes[name]
    if name == "aggregator.options":
        return "[by aggregator](#aggregator-options)"
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return f"not set; for example {code(format_toml_value(field.examples[0]))}" if field.examples else "not set"
    return code(format_toml_value(value))


def _recipe_defaults() -> dict[str, str]:
    """Return the text of the default for each setting that recipes set."""
    return {name: recipe_text(name) for name in recipe_values("paper", "tapfm", "uni")}


def recipe_text(name: str) -> str:
    """Return the defaults of a setting: for recipe paper and method tapfm first, then those that differ.

    Raises ValueError if the recipes differ in a way that this function cannot describe.
    """
    encoder_values = _values_by_encoder(name)
    by_encoder = len(set(encoder_values)) > 1
    texts = ["[by encoder](#defaults-by-encoder)" if by_encoder else code(encoder_values[0])]
    paper = {method: _typical_value(name, "paper", method) for method in METHODS}
    for value in dict.fromkeys(paper.values()):
        methods = [method for method in METHODS if paper[method] == value]
        if "tapfm" not in methods:
            texts.append(f"{' and '.join(methods)}: {code(value)}")
    reference = {method: _typical_value(name, "reference", method) for method in METHODS}
    if recipe_values("reference", "tapfm", "uni", PROBE_EPOCHS)[name] == PROBE_EPOCHS:
        texts.append("reference: same as `schedule.epochs`")
    elif len(set(reference.values())) == 1 and reference != paper:
        texts.append(f"reference: {code(reference['tapfm'])}")
    elif reference != paper:
        raise ValueError(f"{name}: recipe_text cannot describe how recipe reference differs from paper")
    return "; ".join(texts)


def _typical_value(name: str, recipe: Recipe, method: Method) -> str:
    """Return a recipe's value for UNI, an encoder of the paper."""
    return format_toml_value(recipe_values(recipe, method, "uni")[name])


def _values_by_encoder(name: str) -> list[str]:
    """Return the value of recipe paper for each encoder of the catalogue."""
    return [format_toml_value(recipe_values("paper", "tapfm", key)[name]) for key in load_encoder_cards()]


def recipe_values(recipe: Recipe, method: Method, encoder: str, epochs: int | None = None) -> dict[str, Any]:
    """Return the settings of a recipe by their full names."""
    settings = build_recipe_settings(recipe, load_encoder_cards()[encoder], method, epochs)
    return {f"{section}.{key}": value for section, values in settings.items() for key, value in values.items()}


def _encoder_blocks() -> Iterator[list[str]]:
    """Yield a table of the settings whose default depends on the encoder."""
    yield ["### Defaults by encoder"]
    yield format_paragraph(
        "The paper samples as many tiles per slide as fit on its GPU. The number for other encoders "
        "depends on the cost of a tile: 300 up to 165 GFLOP, 100 up to 460 GFLOP, else 75. Small encoders that come "
        "with tapfm need larger learning rates."
    )
    rows = []
    for name in recipe_values("paper", "tapfm", "uni"):
        encoders_by_value: dict[str, list[str]] = defaultdict(list)
        for key, value in zip(load_encoder_cards(), _values_by_encoder(name), strict=True):
            encoders_by_value[value].append(key)
        most_common = max(encoders_by_value, key=lambda value: len(encoders_by_value[value]))
        if len(encoders_by_value) == 1:
            continue
        list_all = len(encoders_by_value) > 2
        values = sorted(encoders_by_value, key=lambda value: value == most_common)  # "all others" is last
        rows += [
            [code(name), code(value), code_list(encoders_by_value[value])]
            if value != most_common or list_all
            else [code(name), code(value), "all others"]
            for value in values
        ]
    yield format_table(["setting", "default", "encoders"], rows)


def _aggregator_blocks() -> Iterator[list[str]]:
    """Yield a table of the options of each aggregator."""
    yield ["### Aggregator options"]
    yield format_paragraph(
        "Valid keys of `aggregator.options`. Aggregators without options are not listed. The options of "
        "`torchmil:<Model>` are the arguments of its constructor."
    )
    rows = [
        [
            code(card.name),
            code(name),
            escape_text(option.valid_values),
            code(format_toml_value(option.default)),
            escape_text(option.summary),
        ]
        for card in AGGREGATORS.values()
        for name, option in card.options.items()
    ]
    yield format_table(["aggregator", "option", "type", "default", "meaning"], _blank_repeats(rows))


def _blank_repeats(rows: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Leave the first cell of a row empty if it is the same as in the row above."""
    before = None
    for first, *others in rows:
        yield ["" if first == before else first, *others]
        before = first
