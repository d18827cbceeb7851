"""Make a study from a preset and options."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfm.config.loading import merge_tables
from tapfm.config.study import REGIMES, StudyConfig, format_study, resolve_study, resolve_study_paths
from tapfm.errors import InputError
from tapfm.study import mini as study_mini
from tapfm.study.presets import ALL, MINI, MINI_NOTE, PRESETS, get_preset

_HEADING = """# A study of tapfm: tapfm study {file} --out studies/first
# {summary}
# Paths are relative to this file. [settings] takes tables of RUN.toml for all runs (tapfm config shows them), and
# [settings.fixed], [settings.finetune] and [settings.tapfm] those for the runs of one regime.

"""


@dataclass(frozen=True)
class PresetOptions:
    """Options about a preset; None or empty: not given."""

    cohort: Path | None = None
    slides: Path | None = None
    tiles: Path | None = None
    external: Path | None = None
    external_slides: Path | None = None
    external_tiles: Path | None = None
    probe_tiles: Path | None = None
    targets: Sequence[str] = ()
    encoders: Sequence[str] = ()
    seeds: Sequence[int] = ()
    folds: Sequence[int] = ()

    def has_paths(self) -> bool:
        """Return whether any path was given."""
        return any(isinstance(value, Path) for value in vars(self).values())


def _preset_tables(name: str, options: PresetOptions) -> dict[str, Any]:
    """Return the tables of STUDY.toml, with placeholders for slides that were not given."""
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
    """Return the table [cohort] or [external]."""
    return {"table": str(table), **({} if slides is None else {"slides": str(slides)}), "tiles": str(tiles)}


def build_preset_study(name: str, options: PresetOptions) -> StudyConfig:
    """Return the study of a preset on given slides."""
    if options.cohort is None:
        raise InputError(
            f"The preset {name} needs slides.",
            hint=f"Give --cohort and --tiles; or write it to a file: tapfm study --preset {name} --write study.toml\n"
            f"To see what it does on painted slides: tapfm study --preset {name} --scale mini --out studies/mini",
        )
    if options.external_tiles is not None and options.external is None:
        raise InputError("--external-tiles are tiles of an external cohort.", hint="Name it as well: --external CSV")
    if get_preset(name).study.get("report") == "forgetting" and options.probe_tiles is None:
        raise InputError(
            "The preset forgetting needs tiles of another task.",
            hint="Give a folder with a folder of pictures for each class: --probe-tiles DIR",
        )
    tables = _preset_tables(name, options)
    resolve_study_paths(tables, Path())
    return resolve_study(tables, f"The preset {name}")


def build_mini_study(name: str, folder: Path, seeds: Sequence[int] = ()) -> StudyConfig:
    """Return the small form of a preset, on slides that are painted into a folder."""
    chosen = get_preset(name)
    tables = copy.deepcopy(dict(chosen.study))
    for above in (MINI, chosen.mini):
        merge_tables(tables, copy.deepcopy(dict(above)))
    task = chosen.synth_task
    made = study_mini.synthetic_folder(folder, task)
    for cohort, section in (("test", "cohort"), ("external", "external")):
        table = made / study_mini.TABLES[cohort]
        tables[section] = _slides_table(table, None, study_mini.tiles_folder(folder, task, cohort))
    if tables.get("report") == "forgetting":
        tables["probe"] = {"tiles": str(folder / "probe-tiles")}
    if seeds:
        tables["seeds"] = list(seeds)
    tables["notes"] = [MINI_NOTE, _describe_sizes(tables), *tables.get("notes", [])]
    resolve_study_paths(tables, Path())
    return resolve_study(tables, f"The preset {name}")


def _describe_sizes(tables: Mapping[str, Any]) -> str:
    """Describe the slides, K and epochs of a small form."""
    settings = tables["settings"]
    tiles = settings["adaptation"]["tiles_per_slide"]
    varied = [each["settings"].get("adaptation", {}).get("tiles_per_slide") for each in tables.get("variants", [])]
    counts = ", ".join(map(str, varied)) if any(varied) else str(tiles)
    fixed = settings["fixed"]["schedule"]["epochs"]
    beside = f" (fixed encoders: all tiles, {fixed} epochs)" if "fixed" in tables["regimes"] else ""
    return (
        f"{study_mini.SLIDES} painted slides of about {study_mini.TILES} tiles (60% training, 20% validation, 20% "
        f"test) and {study_mini.EXTERNAL} external ones; K = {counts} tiles of a slide in a step, "
        f"{settings['schedule']['epochs']} epochs{beside}."
    )


def expand_preset_name(name: str, *, mini: bool) -> list[str]:
    """Return the presets that a name stands for: itself, or all of them."""
    if name != "all":
        get_preset(name)
        return [name]
    if not mini:
        raise InputError(
            "--preset all is for --scale mini: the paper's tables are of different cohorts.",
            hint=f"Run them one by one: {', '.join(PRESETS)}",
        )
    return list(ALL)


def format_preset_toml(name: str, options: PresetOptions, file: Path) -> str:
    """Return STUDY.toml to edit, with paths relative to the folder of the file."""
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
    comments = {"regimes": ", ".join(REGIMES), "aggregators": "of fixed and finetune", "tapfm_aggregators": "of tapfm"}
    return _HEADING.format(file=file.name, summary=get_preset(name).summary) + format_study(tables, comments)
