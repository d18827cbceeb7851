"""STUDY.toml: which methods are compared, on which slides. As strict as RUN.toml: all problems are reported at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from tapfm.aggregators.catalog import aggregator_card
from tapfm.config.loading import all_settings, problems_error, read_toml, resolve_paths
from tapfm.config.problems import Place, did_you_mean, invalid_values
from tapfm.config.recipes import Method
from tapfm.config.settings import Count, Section, setting
from tapfm.config.text import toml_value
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import InputError

REGIMES: tuple[Method, ...] = get_args(Method)
ReportKind = Literal["comparison", "ablation", "stability", "forgetting"]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
_WRITE_PRESET = "tapfm study --preset paper-table1 --write study.toml"
_NAME = re.compile(r"[\w][\w .,+=:-]*")  # of a study or a variant: it becomes part of a path


class SlidesSection(Section):
    """Slides, and their tiles."""

    table: Path = setting("slides, patients and labels, as `tapfm split` writes it")
    slides: Path | None = setting("where to look for slides that the table names without their path", default=None)
    tiles: Path = setting("what `tapfm tile` wrote for them")


class ProbeSection(Section):
    """An unrelated task on tiles, for the forgetting study."""

    tiles: Path = setting("a folder with a folder of pictures for each class, or train/ and test/ with such folders")
    seed: Seed = setting("which tiles are tested on, where there is no test/", default=0)


class Variant(Section):
    """One value of what is varied."""

    name: str = setting("as it stands in tables and folders")
    settings: dict[str, Any] = setting("tables of RUN.toml that make it different", default_factory=dict)


class StudyConfig(Section):
    """A study: encoders x regimes x aggregators x variants x folds x seeds."""

    name: str = setting("as it stands above the tables")
    report: ReportKind = setting(
        "what is asked besides: comparison, ablation, stability or forgetting", default="comparison"
    )
    targets: list[str] = setting("label columns of the tables", min_length=1)
    task: Literal["binary", "multilabel"] | None = setting(
        "binary: a model for each target; multilabel: one for all", default=None
    )
    encoders: list[str] = setting("of `tapfm encoders`", min_length=1)
    regimes: list[Method] = setting("fixed, finetune, tapfm", default=["fixed", "finetune", "tapfm"], min_length=1)
    aggregators: list[str] = setting("of fixed and finetune", default=["abmil"])
    tapfm_aggregators: list[str] = setting("of tapfm", default=["cls-attention"])
    seeds: list[Seed] = setting("each is a run of its own", default=[0], min_length=1)
    folds: list[Annotated[int, Field(ge=0)]] = setting(
        "columns fold_N of the table; none: the column split", default=[]
    )
    unit: Literal["slide", "patient"] = setting("what an AUC counts", default="patient")
    resamples: Count = setting("of the patients, for intervals", default=2000)
    cohort: SlidesSection
    external: SlidesSection | None = None
    weights: dict[str, Path] = setting("a weights file or folder, by encoder", default_factory=dict)
    settings: dict[str, Any] = setting(
        "tables of RUN.toml for all runs; below fixed, finetune or tapfm for those only", default_factory=dict
    )
    variants: list[Variant] = setting("what is varied: each is run", default_factory=list)
    probe: ProbeSection | None = None
    notes: list[str] = setting("what a reader of the tables should know", default_factory=list)

    @property
    def multilabel(self) -> bool:
        """Whether one model predicts all targets."""
        return len(self.targets) > 1 if self.task is None else self.task == "multilabel"

    @property
    def allow_failures(self) -> int:
        """How many slides may fail in a run, or in an evaluation, for it to count."""
        return int(self.settings.get("machine", {}).get("allow_failures", 0))

    def as_tables(self) -> dict[str, Any]:
        """Return the settings as tables of TOML, without those that are not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


_PATHS = [(section, key) for section in ("cohort", "external", "probe") for key in ("table", "slides", "tiles")]


def load_study(file: Path) -> StudyConfig:
    """Read STUDY.toml; paths in it start at the file."""
    tables = read_toml(file, hint=f"Write one to start from: {_WRITE_PRESET}")
    place_paths(tables, file.parent)
    return resolve_study(tables, str(file))


def resolve_study(tables: Mapping[str, Any], where: str = "The study") -> StudyConfig:
    """Check everything that can be checked without looking at slides."""
    problems: list[str] = []
    try:
        config = StudyConfig.model_validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        problems = invalid_values(error, list(_places()))
    else:
        config, problems = _with_known_encoders(config)
        problems += _contradictions(config)
        if not problems:
            return config
    raise problems_error(where, problems, hint=f"What one looks like: {_WRITE_PRESET}")


def _places() -> Iterator[Place]:
    """List all settings of a study, as they are written."""
    sections: dict[str, type[Section]] = {"cohort": SlidesSection, "external": SlidesSection, "probe": ProbeSection}
    for name in StudyConfig.model_fields:
        yield (name,)
        if name in sections:
            yield from ((name, key) for key in sections[name].model_fields)


def _with_known_encoders(config: StudyConfig) -> tuple[StudyConfig, list[str]]:
    """Spell encoders as the catalogue does."""
    problems: list[str] = []
    keys: dict[str, str] = {}
    for name in dict.fromkeys([*config.encoders, *config.weights]):
        try:
            keys[name] = encoder_card(name).key
        except InputError as error:
            problems.append(f"encoders: {error.message} {error.hint}")
    if problems:
        return config, problems
    weights = {keys[name]: path for name, path in config.weights.items()}
    return config.model_copy(update={"encoders": [keys[name] for name in config.encoders], "weights": weights}), []


def _contradictions(config: StudyConfig) -> Iterator[str]:
    """Yield what is unknown, listed twice, or contradictory."""
    listed: dict[str, list[Any]] = {
        "targets": config.targets,
        "encoders": config.encoders,
        "regimes": config.regimes,
        "aggregators": config.aggregators,
        "tapfm_aggregators": config.tapfm_aggregators,
        "seeds": config.seeds,
        "folds": config.folds,
        "variants": [each.name for each in config.variants],
    }
    for name, values in listed.items():
        if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            yield f"{name}: {twice[0]!r} is listed twice"
    for key in ("aggregators", "tapfm_aggregators"):
        for name in listed[key]:
            try:
                aggregator_card(name)
            except InputError as error:
                yield f"{key}: {error.message} {error.hint}"
    for name in (config.name, *listed["variants"]):
        if not _NAME.fullmatch(name):
            yield f"name: {name!r} cannot be a folder; letters, digits and . , + = : - will do"
    if config.multilabel and len(config.targets) == 1:
        yield "task: multilabel needs several targets"
    if config.report == "forgetting" and config.probe is None:
        yield "probe: is missing; a forgetting study needs [probe] with tiles of another task"
    if config.report in ("ablation", "stability") and not config.variants:
        yield f"variants: is missing; {config.report} compares variants"
    if config.report == "stability":
        orders = {each.settings.get("adaptation", {}).get("bag_gradient") for each in config.variants}
        if not {"before", "after", "joint"} <= orders:
            yield "variants: stability compares adaptation.bag_gradient before, after and joint"
    yield from _unknown_tables(config)


def _unknown_tables(config: StudyConfig) -> Iterator[str]:
    """Find names in settings that RUN.toml does not have, before any run is begun."""
    known = list(all_settings())
    given = [("settings", {name: each for name, each in config.settings.items() if name not in REGIMES})]
    given += [(f"settings.{name}", config.settings[name]) for name in REGIMES if name in config.settings]
    given += [(f"variants {each.name}", each.settings) for each in config.variants]
    for where, tables in given:
        if not isinstance(tables, Mapping):
            yield f"{where}: is a table of tables of RUN.toml"
            continue
        for section, values in tables.items():
            inside = [(section, key) for key in values] if isinstance(values, Mapping) else []
            for place in [(section,), *inside]:
                if place not in known:
                    yield f"{where}.{'.'.join(place)}: there is no such setting{did_you_mean(place, known)}"
                    break


def place_paths(tables: dict[str, Any], base: Path) -> None:
    """Make paths absolute, so that they mean the same wherever the study is resumed from."""
    weights, settings, variants = (tables.get(name) for name in ("weights", "settings", "variants"))
    named = weights if isinstance(weights, dict) else {}
    resolve_paths(tables, base, [*_PATHS, *(("weights", name) for name in named)])
    of_runs = [settings, *(settings.get(regime) for regime in REGIMES)] if isinstance(settings, dict) else []
    if isinstance(variants, list):
        of_runs += [each.get("settings") for each in variants if isinstance(each, dict)]
    for each in of_runs:
        if isinstance(each, dict):
            resolve_paths(each, base)


def study_text(tables: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return a study as TOML; comments stand beside settings that are not in a table."""
    lines = []
    for name, value in tables.items():
        if not isinstance(value, Mapping) and not _is_tables(value):
            comment = f"  # {comments[name]}" if comments and name in comments else ""
            lines.append(f"{name} = {toml_value(value)}{comment}")
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            lines += ["", f"[{name}]", *_dotted_lines(value)]
        elif _is_tables(value):
            for each in value:
                lines += ["", f"[[{name}]]", *_dotted_lines(each)]
    return "\n".join(lines) + "\n"


def _dotted_lines(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return keys and values, with dotted keys for tables within the table."""
    lines: list[str] = []
    for key, value in table.items():
        name = prefix + (key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key))
        lines += _dotted_lines(value, f"{name}.") if isinstance(value, Mapping) else [f"{name} = {toml_value(value)}"]
    return lines


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)
