"""RUN.toml: everything that decides a run. Unknown keys and wrong values are refused, all of them at once."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.config.problems import Place, contradictions, invalid_values
from tapfm.config.recipes import Method, Recipe, recipe_settings
from tapfm.config.settings import RunConfig, Section
from tapfm.encoders.card import EncoderCard
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import InputError, SettingError

PATHS = (("cohort", "table"), ("cohort", "slides"), ("tiles", "folder"), ("tiles", "features"), ("encoder", "weights"))
_DEFAULT_ENCODER = "uni"


def load_config(file: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Read RUN.toml with `--set` changes on top. Paths in the file start at the file, others where we are."""
    tables = read_toml(file, hint="Write one to start from: tapfm config > run.toml")
    resolve_paths(tables, file.parent)
    _apply_changes(tables, changes)
    return resolve(tables, f"{file}, with what --set changes," if changes else str(file))


def read_toml(file: Path, hint: str) -> dict[str, Any]:
    """Read a TOML file. Raises InputError, with this hint, if that is not possible."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}.", hint=hint) from error


def change_config(config: RunConfig, changes: Sequence[str]) -> RunConfig:
    """Return a configuration with `--set` changes on top."""
    if not changes:
        return config
    tables = config.as_tables()
    _apply_changes(tables, changes)
    return resolve(tables, "The configuration, with what --set changes,")


def _apply_changes(tables: dict[str, Any], changes: Sequence[str]) -> None:
    """Put `--set` changes on top of tables, in place. Paths in them start in the current folder."""
    changed: dict[str, Any] = {}
    for change in changes:
        _put_change(changed, change)
    resolve_paths(changed, Path())
    merge_tables(tables, changed)


def resolve(tables: Mapping[str, Any], where: str = "The configuration") -> RunConfig:
    """Fill in the recipe and check everything."""
    problems = _shape_problems(tables)
    if not problems:
        card, problems = _find_encoder(tables)
        filled = _fill_in(tables, card)
        if not problems and isinstance(filled.get("encoder", {}).get("name"), str):
            merge_tables(filled, {"encoder": {"name": card.key}})  # however it was spelled
        try:
            # as JSON, strictly: "5" is no number and 1 is not true, yet text does for a path and a list for a pair
            config = RunConfig.model_validate_json(json.dumps(filled, default=str), strict=True)
        except ValidationError as error:
            problems += invalid_values(error, list(all_settings()))
        else:
            problems += contradictions(config)
            if not problems:
                return config
    raise problems_error(where, problems, hint="All settings, with what they mean: tapfm config")


def problems_error(where: str, problems: Sequence[str], hint: str) -> SettingError:
    """Return the error that lists all problems of a configuration."""
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    return SettingError(f"{where} has {count}:\n  " + "\n  ".join(problems), hint=hint)


def all_settings() -> Iterator[Place]:
    """List all sections and settings, as they are written."""
    for section, field in RunConfig.model_fields.items():
        yield (section,)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from ((section, each.alias or name) for name, each in field.annotation.model_fields.items())


def _shape_problems(tables: Mapping[str, Any]) -> list[str]:
    """Find what would make sense of nothing else: a section that is no table."""
    keys: dict[str, list[str]] = {}
    for section, *key in all_settings():
        keys.setdefault(section, []).extend(key)
    return [
        f"{name}: is a table, [{name}], with {', '.join(keys[name])}"
        for name, value in tables.items()
        if keys.get(name) and not isinstance(value, Mapping)
    ]


def _find_encoder(tables: Mapping[str, Any]) -> tuple[EncoderCard, list[str]]:
    """Find the encoder's card; where there is none, the default's, so that other problems are found as well."""
    name = tables.get("encoder", {}).get("name")
    try:
        return encoder_card(name if isinstance(name, str) else _DEFAULT_ENCODER), []
    except InputError as error:
        return encoder_card(_DEFAULT_ENCODER), [f"encoder.name: {error.message} {error.hint}"]


def _fill_in(tables: Mapping[str, Any], card: EncoderCard) -> dict[str, Any]:
    """Lay what is given over what the recipe says; what cannot be used is passed by here and refused later."""
    recipe: Any = tables.get("recipe")
    method: Any = tables.get("adaptation", {}).get("method")
    epochs: Any = tables.get("schedule", {}).get("epochs")
    filled: dict[str, Any] = recipe_settings(
        recipe if recipe in get_args(Recipe) else "paper",
        card,
        method if method in get_args(Method) else "tapfm",
        epochs if type(epochs) is int and epochs > 0 else None,
    )
    aggregator = tables.get("aggregator", {}).get("name", filled["aggregator"]["name"])
    if isinstance(aggregator, str) and aggregator in AGGREGATORS:
        filled["aggregator"]["options"] = AGGREGATORS[aggregator].settings({})
    merge_tables(filled, tables)
    return filled


def _put_change(tables: dict[str, Any], change: str) -> None:
    """Read `--set section.key=value`; a value that is not TOML is text."""
    name, equals, text = change.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise SettingError(
            f"--set {change} is not of the form key=value.", hint="For example: --set adaptation.lambda=0.5"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in reversed(parts):
        value = {part: value}
    merge_tables(tables, value)


def merge_tables(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Lay tables over tables, in place."""
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(name), Mapping):
            below[name] = dict(below[name])
            merge_tables(below[name], value)
        else:
            below[name] = value


def resolve_paths(tables: dict[str, Any], base: Path, places: Iterable[tuple[str, str]] = PATHS) -> None:
    """Make paths absolute, so that they mean the same wherever the run is resumed from."""
    for section, key in places:
        table = tables.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            path = Path(table[key])
            with contextlib.suppress(RuntimeError):  # ~name where nobody has that name: a file's name like any other
                path = path.expanduser()
            table[key] = str((base / path).absolute())
