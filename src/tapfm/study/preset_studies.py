"""Build studies from presets and command-line options."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfm.config.loading import merge_tables
from tapfm.config.study import METHODS, StudyConfig, format_study, resolve_study, resolve_study_paths
from tapfm.errors import InputError
from tapfm.study import mini_data
from tapfm.study.presets import MINI_NOTE, MINI_SETTINGS, PRESETS, PRESETS_IN_ALL, get_preset

_HEADING = """# Preset {preset} - {summary}
# To list the runs:  tapfm study {file} --list
# To start them:     tapfm study {file} --out studies/first
#
# Paths are relative to this file. To change settings of RUN.toml (to list them: tapfm config), add a section [settings]
# for all runs, or [settings.fixed], [settings.finetune] or [settings.tapfm] for the runs of one method.

"""


@dataclass(frozen=True)
class PresetOptions:
    """Command-line options that complete or change a preset. None or empty: not given."""

    cohort: Path | None = None  # cohort table
    slides: Path | None = None  # folder of slides
    tiles: Path | None = None  # folder written by `tapfm tile`
    external: Path | None = None
    external_slides: Path | None = None
    external_tiles: Path | None = None
    probe_tiles: Path | None = None
    targets: Sequence[str] = ()
    encoders: Sequence[str] = ()
    seeds: Sequence[int] = ()
    folds: Sequence[int] = ()

    def has_paths(self) -> bool:
        return any(isinstance(value, Path) for value in vars(self).values())


def _preset_tables(name: str, options: PresetOptions) -> dict[str, Any]:
    """Return the tables of STUDY.toml. Paths that were not given are placeholders."""
    tables = copy.deepcopy(dict(get_preset(name).study))
    given = {"targets": options.targets, "encoders": options.encoders, "seeds": options.seeds, "folds": options.folds}
    tables |= {key: list(values) for key, values in given.items() if values}
    tables["cohort"] = _slides_table(options.cohort or "split.csv", options.slides, options.tiles or "tiles")
    if options.external is not None or options.cohort is None:
        tiles = options.external_tiles or "tiles-external"
        tables["external"] = _slides_table(options.external or "external.csv", options.external_slides, tiles)
    if tables.get("report") == "forgetting":
        tables["probe"] = {"tiles": str(options.probe_tiles or "probe-tiles")}
    return tables


def _slides_table(table: Path | str, slides: Path | None, tiles: Path | str) -> dict[str, str]:
    """Return the settings of [cohort] or [external]."""
    return {"table": str(table), **({} if slides is None else {"slides": str(slides)}), "tiles": str(tiles)}


def build_preset_study(name: str, options: PresetOptions) -> StudyConfig:
    """Return the study of a preset on the given slides. Raises InputError if required paths are missing."""
    if options.cohort is None:
        raise InputError(
            f"The preset {name} needs a cohort.",
            hint="Pass --cohort and --tiles, or write the preset to a file and edit it: "
            f"tapfm study --preset {name} --write study.toml\n"
            f"To try it on synthetic slides: tapfm study --preset {name} --scale mini --out studies/mini",
        )
    for option, value in (("--external-tiles", options.external_tiles), ("--external-slides", options.external_slides)):
        if value is not None and options.external is None:
            raise InputError(
                f"{option} needs an external cohort.", hint="Pass its cohort table too: --external external.csv"
            )
    if get_preset(name).study.get("report") == "forgetting" and options.probe_tiles is None:
        raise InputError(
            "The preset forgetting needs tiles of another task.",
            hint="Pass a folder with one folder of images per class: --probe-tiles DIR",
        )
    tables = _preset_tables(name, options)
    resolve_study_paths(tables, Path())
    return resolve_study(tables, f"The preset {name}")


def build_mini_study(name: str, folder: Path, seeds: Sequence[int] = ()) -> StudyConfig:
    """Return the small version of a preset, on synthetic slides in a folder."""
    preset = get_preset(name)
    tables = copy.deepcopy(dict(preset.study))
    for overrides in (MINI_SETTINGS, preset.mini_overrides):
        merge_tables(tables, copy.deepcopy(dict(overrides)))
    task = preset.synth_task
    synthetic = mini_data.synthetic_folder(folder, task)
    for cohort, section in (("test", "cohort"), ("external", "external")):
        table = synthetic / mini_data.TABLES[cohort]
        tables[section] = _slides_table(table, None, mini_data.tiles_folder(folder, task, cohort))
    if tables.get("report") == "forgetting":
        tables["probe"] = {"tiles": str(folder / "probe-tiles")}
    if seeds:
        tables["seeds"] = list(seeds)
    tables["notes"] = [MINI_NOTE, _describe_sizes(tables), *tables.get("notes", [])]
    resolve_study_paths(tables, Path())
    return resolve_study(tables, f"The preset {name}")


def _describe_sizes(tables: Mapping[str, Any]) -> str:
    """Describe the numbers of slides, tiles and epochs of a small study."""
    settings = tables["settings"]
    tiles = settings["adaptation"]["tiles_per_slide"]
    varied = [each["settings"].get("adaptation", {}).get("tiles_per_slide") for each in tables.get("variants", [])]
    counts = ", ".join(map(str, varied)) if any(varied) else str(tiles)
    fixed_epochs = settings["fixed"]["schedule"]["epochs"]
    fixed = f" (fixed encoders: all tiles, {fixed_epochs} epochs)" if "fixed" in tables["methods"] else ""
    return (
        f"{mini_data.SLIDES} synthetic slides with about {mini_data.TILES} tiles each (60% training, 20% validation, "
        f"20% test) and {mini_data.EXTERNAL} external slides; K = {counts} tiles per slide and step, "
        f"{settings['schedule']['epochs']} epochs{fixed}."
    )


def expand_preset_name(name: str, *, mini: bool) -> list[str]:
    """Return the presets to run for --preset NAME: one, or several for `all`."""
    if name != "all":
        get_preset(name)
        return [name]
    if not mini:
        raise InputError(
            "--preset all works only with --scale mini, because the tables of the paper use different cohorts.",
            hint=f"Run the presets one by one: {', '.join(PRESETS)}",
        )
    return list(PRESETS_IN_ALL)


def format_preset_toml(name: str, options: PresetOptions, file: Path) -> str:
    """Return the text of a STUDY.toml to edit, with paths relative to the folder of the file."""
    tables = _preset_tables(name, options)
    for section in ("cohort", "external", "probe"):
        for key, value in tables.get(section, {}).items():
            if options.has_paths() and not Path(value).is_absolute():
                tables[section][key] = Path(os.path.relpath(value, file.parent.resolve())).as_posix()
    checked = copy.deepcopy(tables)
    resolve_study_paths(checked, file.parent)
    resolve_study(checked, f"The preset {name}")
    for key, default in {"seeds": [0], "folds": [], "unit": "patient", "resamples": 2000}.items():
        tables.setdefault(key, default)
    comments = {
        "methods": f"any of {', '.join(METHODS)}",
        "aggregators": "for the methods fixed and finetune",
        "tapfm_aggregators": "for the method tapfm",
        "folds": "numbers N of the columns fold_N; empty: use the column split",
    }
    heading = _HEADING.format(preset=name, summary=get_preset(name).summary, file=file.name)
    return heading + format_study(tables, comments)
