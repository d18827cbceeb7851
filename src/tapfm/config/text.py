"""RUN.toml as text: a file to start from, with comments, and the resolved one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfm.cohort.manifest import read_cohort
from tapfm.cohort.splits import fold_names
from tapfm.config.loading import resolve
from tapfm.config.settings import RunConfig, Section
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import LabelError
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.labels import binary_columns, read_labels

_WIDTH = 36  # of `key = value`, so that comments stand in a column


def starting_file(
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
    """Write a file to start from; targets are those of the table, and paths start at `folder` (default: here)."""
    of_cohort: dict[str, str | int] = {"table": _from_folder(cohort or Path("cohort.csv"), folder)}
    if cohort is not None:
        table = read_cohort(cohort, must_exist=False)
        if not any(row.split for row in table.rows) and fold_names(table):
            of_cohort["fold"] = int(fold_names(table)[0].removeprefix("fold_"))
        read_labels(table, target_kinds(targets))
        targets = targets or binary_columns(table)
        if not targets:
            raise LabelError(
                f"{cohort} has no column with both 0 and 1, so there is nothing to learn.",
                hint=f"Its label columns are: {', '.join(table.label_names) or 'none'}",
            )
    of_tiles = {"folder": _from_folder(tiles or Path("tiles"), folder)} if method != "fixed" or tiles else {}
    if method == "fixed" or features is not None:
        of_tiles["features"] = _from_folder(features or Path("features"), folder)
    return _commented(
        {
            "recipe": recipe,
            "seed": 0,
            "cohort": of_cohort,
            "tiles": of_tiles,
            "encoder": {"name": encoder_card(encoder).key},
            "task": {"targets": list(targets) or ["FGFR3"]},
            "adaptation": {"method": method},
        }
    )


def _from_folder(path: Path, folder: Path | None) -> str:
    """Write a path as seen from a folder."""
    if path.is_absolute() or folder is None:
        return path.as_posix()
    return Path(os.path.relpath(path, folder.resolve())).as_posix()  # .. leads out of where a link points to


def _commented(tables: Mapping[str, Any]) -> str:
    """Write a file to start from: what was given as settings, what the recipe adds as comments to change."""
    config = resolve(tables)
    lines = [
        "# A run of tapfm: tapfm train run.toml --out runs/first",
        "# A line that begins with # shows what the recipe says, or an example; remove the # to change it.",
        "# Paths start at this file.",
        "",
    ]
    lines += _section_lines(config, tables, only_values=True)
    for name, value in config:
        if isinstance(value, Section):
            lines += ["", f"[{name}]  # {one_line(value.__doc__)}"]
            lines += _section_lines(value, tables.get(name, {}))
    return "\n".join(lines) + "\n"


def _section_lines(section: Section, given: Mapping[str, Any], *, only_values: bool = False) -> list[str]:
    """Write the settings of one table; `given` ones count, others are shown."""
    lines = []
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), field.alias or name
        if only_values and isinstance(value, Section):
            continue
        shown, meaning = given.get(key, value), field.description
        if shown is None and field.examples:
            shown, meaning = field.examples[0], f"not set; {meaning}"
        text = f"{key} = {toml_value(shown)}"
        lines.append(f"{text if key in given else '# ' + text:<{_WIDTH}}  # {meaning}")
    return lines


def config_text(config: RunConfig) -> str:
    """Write a configuration with nothing left open."""
    return toml_text(config.as_tables())


def toml_text(tables: Mapping[str, Any]) -> str:
    """Write tables of settings."""
    lines = [f"{key} = {toml_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Write one value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key} = {toml_value(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # a JSON string is a TOML string, but for the one control character that JSON lets through
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def one_line(text: str | None) -> str:
    """Take the first line of a docstring."""
    return (text or "").strip().splitlines()[0]
