"""Format RUN.toml: a starter file with comments, and a configuration with all defaults filled in."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tapfm.cohort.cohort_table import Cohort
from tapfm.cohort.splits import SPLITS, find_split_problems, fold_names, read_splits
from tapfm.cohort.table_options import TableOptions
from tapfm.cohort.table_problems import TableProblem
from tapfm.config.loading import resolve_config
from tapfm.config.settings import RunConfig, SettingsModel
from tapfm.encoders.catalog import find_encoder_card
from tapfm.runtime.messages import format_command
from tapfm.tasks.catalog import class_texts, target_arguments
from tapfm.tasks.label_columns import TargetRequest
from tapfm.tasks.labels import LabelledCohort, read_labelled_cohort

_SETTING_WIDTH = 36  # characters of `key = value`, so that comments are aligned


@dataclass(frozen=True)
class StarterCohort:
    """The cohort table of a starter file, and how to read it. The targets are empty if they are to be chosen."""

    table: Path
    options: TableOptions
    request: TargetRequest


def format_starter_config(
    *,
    recipe: str,
    encoder: str,
    method: str,
    cohort: StarterCohort | None,
    targets: Sequence[str] = (),
    tiles: Path | None,
    features: Path | None,
    folder: Path | None,
) -> tuple[str, LabelledCohort | None]:
    """Return a RUN.toml to start from, with a comment for each setting, and the cohort that was read for it.

    Without a cohort, `targets` and placeholders are written. Paths are written relative to `folder`, the folder of the
    new file; None: the current folder.
    """
    cohort_section: dict[str, Any] = {"table": _relative_path(Path("cohort.csv"), folder)}
    task_section: dict[str, Any] = {"targets": list(targets) or ["FGFR3"]}
    labelled = None
    if cohort is not None:
        labelled = read_labelled_cohort(
            cohort.table, cohort.options, cohort.request, checks=[_find_splits_of_starter_problems]
        )
        cohort_section = _format_table_options(cohort, folder)
        table = labelled.cohort
        if not any(row.split for row in table.rows) and fold_names(table):
            cohort_section["fold"] = int(fold_names(table)[0].removeprefix("fold_"))
        task_section = {"targets": list(labelled.targets)}
        if texts := class_texts(labelled.targets):
            task_section["labels"] = texts
    tiles_section = {"folder": _relative_path(tiles or Path("tiles"), folder)} if method != "fixed" or tiles else {}
    if method == "fixed" or features is not None:
        tiles_section["features"] = _relative_path(features or Path("features"), folder)
    text = _format_all_settings(
        {
            "recipe": recipe,
            "seed": 0,
            "cohort": cohort_section,
            "tiles": tiles_section,
            "encoder": {"name": find_encoder_card(encoder).key},
            "task": task_section,
            "adaptation": {"method": method},
        }
    )
    return text, labelled


def describe_splits(labelled: LabelledCohort) -> list[str]:
    """Return one line per split (of the first fold if there are only folds) with its slides, patients and labels."""
    cohort = labelled.cohort
    folds = fold_names(cohort)
    if not (any(row.split for row in cohort.rows) or folds):
        return [
            "The table has no splits yet. Only tapfm train --folds K trains without them. To create them: "
            + format_command(
                *("split", cohort.table_path or "COHORT.csv", "--out", "split.csv"),
                *cohort.options.command_arguments(),
                *target_arguments(labelled.targets),
            )
        ]
    has_column = any(row.split for row in cohort.rows)
    splits = read_splits(cohort, None if has_column else int(folds[0].removeprefix("fold_")))
    lines = [] if has_column else [f"Using the column {folds[0]} (cohort.fold)."]
    for split in SPLITS:
        rows = [row for row in cohort.rows if splits.get(row.slide_id) == split]
        labels = [
            f"{target}: {kind.describe_counts(labelled.labels_of(target, rows), 'slide')}"
            for target, kind in labelled.targets.items()
        ]
        patients = len({row.patient_id for row in rows})
        lines.append(f"{split}: {len(rows):,} slides of {patients:,} patients; {'; '.join(labels)}")
    return lines


def _find_splits_of_starter_problems(cohort: Cohort) -> list[TableProblem]:
    """Return the problems of the splits that training will use: the column `split`, else all folds; none if missing."""
    if any(row.split for row in cohort.rows):
        return find_split_problems(cohort)
    return [
        problem
        for name in fold_names(cohort)
        for problem in find_split_problems(cohort, int(name.removeprefix("fold_")))
    ]


def _format_table_options(cohort: StarterCohort, folder: Path | None) -> dict[str, Any]:
    """Return the section [cohort]: the table, and the options that differ from their defaults."""
    options, default = cohort.options, TableOptions()
    section: dict[str, Any] = {"table": _relative_path(cohort.table, folder)}
    for each in fields(TableOptions):
        value = getattr(options, each.name)
        if value == getattr(default, each.name):
            continue
        section[each.name] = _relative_path(value, folder) if isinstance(value, Path) else value
    return section


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
        inside = ", ".join(f"{format_toml_key(key)} = {format_toml_value(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml_value, value))}]"
    if isinstance(value, int | float):
        return repr(value)
    # JSON strings are TOML strings, except for the one control character that JSON does not escape
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def format_toml_key(key: str) -> str:
    """Return a key of a TOML table, quoted if necessary."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else format_toml_value(key)


def first_line(text: str | None) -> str:
    """Return the first line of a docstring."""
    return (text or "").strip().splitlines()[0]
