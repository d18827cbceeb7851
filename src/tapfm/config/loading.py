"""Load and validate RUN.toml. One error lists the problems that were found."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from tapfm.aggregators.catalog import AGGREGATORS
from tapfm.config.problems import SettingPath, describe_invalid_values, find_problems
from tapfm.config.recipes import Method, Recipe, build_recipe_settings
from tapfm.config.settings import RunConfig, SettingsModel
from tapfm.encoders.card import EncoderCard
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import InputError, SettingError
from tapfm.runtime.messages import format_command

# section and key of the settings that are paths
PATH_SETTINGS = (
    ("cohort", "table"),
    ("cohort", "slides"),
    ("cohort", "clini"),
    ("cohort", "clam_splits"),
    ("tiles", "folder"),
    ("tiles", "features"),
    ("encoder", "weights"),
)
_PLACEHOLDER_ENCODER = "uni"  # its defaults are used to validate the other settings if encoder.name is not valid


def load_config(file: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read RUN.toml and apply `--set` overrides.

    Settings that neither the file nor an override gives get the defaults of the resulting recipe, encoder and method.
    Paths in the file are relative to the folder of the file, paths in overrides are relative to the current folder.
    """
    tables = read_toml(file, create_command=format_command("config", "--out", file))
    resolve_paths(tables, file.parent)
    if not overrides:
        return resolve_config(tables, str(file))
    return _resolve_with_overrides(tables, overrides, f"{file} with the command-line options")


def read_toml(file: Path, create_command: str) -> dict[str, Any]:
    """Read a TOML file. Raises InputError if that fails.

    create_command: the command that creates such a file, for the hint if it does not exist.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise InputError(f"{file} does not exist.", hint=f"To create a new file: {create_command}") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}).", hint="Pass the path of a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} is not a valid TOML file: {error}.", hint='Correct the file. Strings need quotes, such as "uni".'
        ) from error


def override_settings(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return a configuration with `--set` overrides applied, as if they had been given together with its settings.

    Settings that were not given are computed again, because their defaults may depend on the overrides.
    """
    if not overrides:
        return config
    tables = config.given_tables()
    if not tables or resolve_config(tables) != config:  # built in another way, or changed by `model_copy`
        tables = config.as_tables()
    return _resolve_with_overrides(tables, overrides, "The configuration changed by --set")


def _resolve_with_overrides(tables: dict[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    """Apply `--set` overrides to the given settings in place, then resolve them.

    Paths in overrides are relative to the current folder.
    """
    override_tables: dict[str, Any] = {}
    for override in overrides:
        _add_override(override_tables, override)
    resolve_paths(override_tables, Path())
    merge_tables(tables, override_tables)
    hint = "--set keeps all other settings that RUN.toml contains: change or remove those that contradict it."
    return resolve_config(tables, source, hint=hint)


def resolve_config(tables: Mapping[str, Any], source: str = "The configuration", *, hint: str = "") -> RunConfig:
    """Add the defaults of the recipe and validate all settings. Raises SettingError with the problems that were found.

    source: name of the configuration in the error message. hint: first line of the hint of the error.
    """
    problems = _describe_non_tables(tables)
    if not problems:
        card, problems = _find_encoder(tables)
        completed = _add_defaults(tables, card)
        if not problems and isinstance(completed.get("encoder", {}).get("name"), str):
            merge_tables(completed, {"encoder": {"name": card.key}})  # the canonical spelling
        try:
            # Strict JSON validation rejects "5" as a number; it converts strings to paths, and lists to tuples
            config = RunConfig.model_validate_json(json.dumps(completed, default=str), strict=True)
        except ValidationError as error:
            problems += describe_invalid_values(error, list(list_settings()))
        else:
            problems += find_problems(config)
            if not problems:
                return config.with_given_settings(tables)
    help_hint = "To see all settings with descriptions: tapfm config"
    raise make_problems_error(source, problems, hint=f"{hint}\n{help_hint}" if hint else help_hint)


def make_problems_error(source: str, problems: Sequence[str], hint: str) -> SettingError:
    """Return an error that lists all problems of a configuration."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return SettingError(f"{source} has {count}:\n  " + "\n  ".join(problems), hint=hint)


def list_settings() -> Iterator[SettingPath]:
    """Yield the key path of each section and setting that RUN.toml can have, such as ("cohort", "table")."""
    for section, field in RunConfig.model_fields.items():
        yield (section,)
        if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsModel):
            yield from ((section, each.alias or name) for name, each in field.annotation.model_fields.items())


def _describe_non_tables(tables: Mapping[str, Any]) -> list[str]:
    """Return a problem for each section that is not a table, such as `head = 3`."""
    keys: dict[str, list[str]] = {}  # of each section; empty for a top-level setting
    for section, *key in list_settings():
        keys.setdefault(section, []).extend(key)
    return [
        f"{name}: must be a table, [{name}], with {', '.join(keys[name])}"
        for name, value in tables.items()
        if keys.get(name) and not isinstance(value, Mapping)
    ]


def _find_encoder(tables: Mapping[str, Any]) -> tuple[EncoderCard, list[str]]:
    """Return the card of the encoder. If its name is unknown, return a placeholder card and a problem."""
    name = tables.get("encoder", {}).get("name")
    try:
        return find_encoder_card(name if isinstance(name, str) else _PLACEHOLDER_ENCODER), []
    except InputError as error:
        return find_encoder_card(_PLACEHOLDER_ENCODER), [f"encoder.name: {error.message} {error.hint}"]


def _add_defaults(tables: Mapping[str, Any], card: EncoderCard) -> dict[str, Any]:
    """Return the given settings, and the defaults of the recipe for all others. Does not validate the values."""
    recipe: Any = tables.get("recipe")
    method: Any = tables.get("adaptation", {}).get("method")
    epochs: Any = tables.get("schedule", {}).get("epochs")
    completed: dict[str, Any] = build_recipe_settings(
        recipe if recipe in get_args(Recipe) else "paper",
        card,
        method if method in get_args(Method) else "tapfm",
        epochs if type(epochs) is int and epochs > 0 else None,
    )
    aggregator = tables.get("aggregator", {}).get("name", completed["aggregator"]["name"])
    if isinstance(aggregator, str) and aggregator in AGGREGATORS:
        completed["aggregator"]["options"] = AGGREGATORS[aggregator].complete_options({})
    merge_tables(completed, tables)
    return completed


def _add_override(tables: dict[str, Any], override: str) -> None:
    """Parse `section.key=value` and add it to tables. A value that is not valid TOML is read as a string."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise SettingError(
            f"--set {override} does not have the form key=value.", hint="For example: --set adaptation.lambda=0.5"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in reversed(parts):
        value = {part: value}
    merge_tables(tables, value)


def merge_tables(base: dict[str, Any], overriding: Mapping[str, Any]) -> None:
    """Merge the nested tables `overriding` into `base` in place. Values of `overriding` take precedence."""
    for name, value in overriding.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            base[name] = dict(base[name])
            merge_tables(base[name], value)
        else:
            base[name] = value


def resolve_paths(tables: dict[str, Any], base: Path, settings: Iterable[tuple[str, str]] = PATH_SETTINGS) -> None:
    """Make paths absolute in place, so that a run can be resumed from any folder.

    base: folder that the relative paths refer to. settings: section and key of each path.
    """
    for section, key in settings:
        table = tables.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            path = Path(table[key])
            with contextlib.suppress(RuntimeError):  # ~name of an unknown user is an ordinary file name
                path = path.expanduser()
            table[key] = str((base / path).absolute())
