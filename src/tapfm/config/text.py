"""Format RUN.toml: a starter file with comments, and a configuration with all defaults filled in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.cohort.cohort_table import read_cohort
from tapfm.cohort.splits import fold_names
from tapfm.config.loading import resolve_config
from tapfm.config.settings import RunConfig, SettingsModel
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import LabelError
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import find_binary_columns, read_labels

_SETTING_WIDTH = 36  # characters of `key = value`, so that comments are aligned


def format_starter_config(
    *,
    recipe: str,
    encoder: str,
    method: str,
    cohort: Path | None,
    tiles: Path | None,
    features: Path | None,
    targets: Sequence[str],
    folder: Path | None,
) -> str:
    """Return a RUN.toml to start from, with a comment for each setting.

    Without `targets`, all binary label columns of the cohort table are used. Paths are written relative to `folder`,
    the folder of the new file; None: the current folder.
    """
    cohort_section: dict[str, str | int] = {"table": _relative_path(cohort or Path("cohort.csv"), folder)}
    if cohort is not None:
        table = read_cohort(cohort, must_exist=False)
        if not any(row.split for row in table.rows) and fold_names(table):
            cohort_section["fold"] = int(fold_names(table)[0].removeprefix("fold_"))
        read_labels(table, target_kinds(targets))
        targets = targets or find_binary_columns(table)
        if not targets:
            raise LabelError(
                f"{cohort} has no label column to train on: one with both 0 and 1, and no other values.",
                hint="Write 1, 0, or nothing (unknown) in a label column. Its label columns are: "
                f"{', '.join(table.label_names) or 'none'}",
            )
    tiles_section = {"folder": _relative_path(tiles or Path("tiles"), folder)} if method != "fixed" or tiles else {}
    if method == "fixed" or features is not None:
        tiles_section["features"] = _relative_path(features or Path("features"), folder)
    return _format_all_settings(
        {
            "recipe": recipe,
            "seed": 0,
            "cohort": cohort_section,
            "tiles": tiles_section,
            "encoder": {"name": find_encoder_card(encoder).key},
            "task": {"targets": list(targets) or ["FGFR3"]},
            "adaptation": {"method": method},
        }
    )


def _relative_path(path: Path, folder: Path | None) -> str:
    """Make a path relative to `folder` instead of the current folder. Absolute paths stay unchanged."""
    if path.is_absolute() or folder is None:
        return path.as_posix()
    return Path(
        os.path.relpath(path, folder.resolve())
    ).as_posix()  # resolved, because ".." does not undo a symbolic link


def _format_all_settings(tables: Mapping[str, Any]) -> str:
    """Return a RUN.toml with all settings: the given ones, and the others commented out with their defaults."""
    config = resolve_config(tables)
    lines = [
        "# Settings of a tapfm run. To start it: tapfm train run.toml --out runs/first",
        "# Lines that start with # show the default of the recipe, or an example. To change it, edit and remove the #.",
        "# Paths are relative to this file.",
        "",
    ]
    lines += _format_section_lines(config, tables, skip_sections=True)
    for name, value in config:
        if isinstance(value, SettingsModel):
            lines += ["", f"[{name}]  # {first_line(value.__doc__)}"]
            lines += _format_section_lines(value, tables.get(name, {}))
    return "\n".join(lines) + "\n"


def _format_section_lines(
    section: SettingsModel, given: Mapping[str, Any], *, skip_sections: bool = False
) -> list[str]:
    """Format the settings of one table; settings that are not `given` are commented out."""
    lines = []
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), field.alias or name
        if skip_sections and isinstance(value, SettingsModel):
            continue
        shown_value, description = given.get(key, value), field.description
        if shown_value is None and field.examples:
            shown_value, description = field.examples[0], f"not set; {description}"
        text = f"{key} = {format_toml_value(shown_value)}"
        lines.append(f"{text if key in given else '# ' + text:<{_SETTING_WIDTH}}  # {description}")
    return lines


def format_config(config: RunConfig) -> str:
    """Return a configuration as TOML, with all settings that have a value."""
    return format_toml(config.as_tables())


def format_toml(tables: Mapping[str, Any]) -> str:
    """Return tables of settings as TOML. Nested tables are written as inline tables."""
    lines = [f"{key} = {format_toml_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {format_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def format_toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key} = {format_toml_value(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml_value, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # JSON strings are TOML strings, except for the one control character that JSON does not escape
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def first_line(text: str | None) -> str:
    """Return the first line of a docstring."""
    return (text or "").strip().splitlines()[0]
