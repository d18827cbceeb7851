"""Load and validate STUDY.toml. One error lists the problems that were found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from tapfm.aggregators.catalog import find_aggregator_card
from tapfm.config.loading import list_settings, make_problems_error, read_toml, resolve_paths
from tapfm.config.problems import SettingPath, describe_invalid_values, suggest_setting
from tapfm.config.recipes import Method
from tapfm.config.settings import ClassesOfTarget, Count, SettingsModel, TableSection, setting
from tapfm.config.text import format_toml_key, format_toml_value
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import InputError
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import TargetKind

METHODS: tuple[Method, ...] = get_args(Method)
ReportKind = Literal["comparison", "ablation", "stability", "forgetting"]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
_EXAMPLE_COMMAND = "tapfm study --preset paper-table1 --write study.toml"
_VALID_FOLDER_NAME = re.compile(r"[\w][\w .,+=:-]*")  # of a study or a variant; that of a variant becomes a folder name


class SlidesSection(TableSection):
    """A cohort: slides, labels and tiles."""

    tiles: Path = setting("output folder of `tapfm tile` for these slides")


class ProbeSection(SettingsModel):
    """A linear probe on tiles of a task unrelated to the targets, to measure how much a trained encoder forgets."""

    tiles: Path = setting(
        "folder of tile images in train/CLASS/ and test/CLASS/, or only in CLASS/; in the second case, a random half "
        "of each class is for testing"
    )
    seed: Seed = setting(
        "random seed of the split into training and test tiles, if `tiles` has no train/ and test/", default=0
    )


class Variant(SettingsModel):
    """One of the variants to compare: its name and its changes to the settings of RUN.toml."""

    name: str = setting("name of the variant in tables and folders")
    settings: dict[str, Any] = setting(
        "settings of RUN.toml that this variant changes, such as adaptation.lambda = 0.5", default_factory=dict
    )


class StudyConfig(SettingsModel):
    """A study: runs of all encoders and methods, with the aggregators of each method, variants, folds and seeds."""

    name: str = setting("name of the study; the title above its result tables")
    report: ReportKind = setting(
        "tables to write besides those of the metrics: comparison (of models), ablation (of settings), stability (of "
        "training, by adaptation.bag_gradient) or forgetting (accuracy in the task of [probe], before and after "
        "training)",
        default="comparison",
    )
    targets: list[str] = setting(
        "label columns of the cohort tables; `task` sets whether one model predicts all of them", min_length=1
    )
    labels: dict[str, ClassesOfTarget] = setting(
        "texts of the classes of targets whose labels are not 0 and 1, as in [task.labels] of RUN.toml",
        default_factory=dict,
    )
    task: Literal["binary", "multilabel"] | None = setting(
        "binary: one model per target; multilabel: one model for all targets (the default with several targets)",
        default=None,
    )
    encoders: list[str] = setting("encoders to compare, from `tapfm encoders`", min_length=1)
    methods: list[Method] = setting(
        "training methods to compare: fixed, finetune, tapfm", default=["fixed", "finetune", "tapfm"], min_length=1
    )
    aggregators: list[str] = setting("aggregators to train with methods fixed and finetune", default=["abmil"])
    tapfm_aggregators: list[str] = setting("aggregators to train with method tapfm", default=["cls-attention"])
    seeds: list[Seed] = setting("random seeds; every model is trained with each seed", default=[0], min_length=1)
    folds: list[Annotated[int, Field(ge=0)]] = setting(
        "fold numbers to run, for example [0, 1] for the columns fold_0 and fold_1; empty: the column `split` is used",
        default=[],
    )
    unit: Literal["slide", "patient"] = setting(
        "unit of the metrics: slide, or patient (mean probability of the patient's slides)", default="patient"
    )
    resamples: Count = setting(
        "bootstrap resamples for confidence intervals: of patients; for the accuracy in the task of [probe], of tiles",
        default=2000,
    )
    cohort: SlidesSection
    external: SlidesSection | None = None
    weights: dict[str, Path] = setting("weights file or folder of each encoder, by encoder name", default_factory=dict)
    settings: dict[str, Any] = setting(
        "settings of RUN.toml for all runs; settings.fixed, settings.finetune and settings.tapfm are for runs of that "
        "method only",
        default_factory=dict,
    )
    variants: list[Variant] = setting(
        "variants of the settings; every model is trained with each variant", default_factory=list
    )
    probe: ProbeSection | None = None
    notes: list[str] = setting("notes for readers; shown in the overview of study.md", default_factory=list)

    @property
    def target_kinds(self) -> dict[str, TargetKind]:
        """The kind of each target."""
        texts = {name: {"negative": each.negative, "positive": each.positive} for name, each in self.labels.items()}
        return target_kinds(self.targets, texts)

    @property
    def is_multilabel(self) -> bool:
        """Whether one model predicts all targets."""
        return len(self.targets) > 1 if self.task is None else self.task == "multilabel"

    @property
    def allowed_failures(self) -> int:
        """Number of slides that may fail in each run or evaluation. Results with more failures are not used."""
        return int(self.settings.get("machine", {}).get("allow_failures", 0))

    def as_tables(self) -> dict[str, Any]:
        """Return the settings as TOML tables, without settings that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


# section and key of the settings that are paths
_STUDY_PATH_SETTINGS = [
    (section, key)
    for section in ("cohort", "external", "probe")
    for key in ("table", "slides", "clini", "clam_splits", "tiles")
]


def load_study(file: Path) -> StudyConfig:
    """Read and validate STUDY.toml. Paths are relative to the folder of the file."""
    tables = read_toml(file, create_command=_EXAMPLE_COMMAND)
    resolve_study_paths(tables, file.parent)
    return resolve_study(tables, str(file))


def resolve_study(tables: Mapping[str, Any], source: str = "The study") -> StudyConfig:
    """Validate the settings, without opening slides. Raises SettingError with the problems that were found.

    Names and contradictory settings are checked only if all values are valid.

    source: name of the study in the error message.
    """
    problems: list[str] = []
    try:
        config = StudyConfig.model_validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        problems = describe_invalid_values(error, list(_list_study_settings()))
    else:
        config, problems = _resolve_encoder_names(config)
        problems += _find_problems(config)
        if not problems:
            return config
    raise make_problems_error(source, problems, hint=f"To create an example: {_EXAMPLE_COMMAND}")


def _list_study_settings() -> Iterator[SettingPath]:
    """Yield the key path of each section and setting that STUDY.toml can have, such as ("probe", "tiles")."""
    sections: dict[str, type[SettingsModel]] = {
        "cohort": SlidesSection,
        "external": SlidesSection,
        "probe": ProbeSection,
    }
    for name in StudyConfig.model_fields:
        yield (name,)
        if name in sections:
            yield from ((name, key) for key in sections[name].model_fields)


def _resolve_encoder_names(config: StudyConfig) -> tuple[StudyConfig, list[str]]:
    """Return the study with the canonical encoder names, and a problem for each unknown name."""
    problems: list[str] = []
    keys: dict[str, str] = {}
    for name in dict.fromkeys([*config.encoders, *config.weights]):
        try:
            keys[name] = find_encoder_card(name).key
        except InputError as error:
            setting_name = "encoders" if name in config.encoders else "weights"
            problems.append(f"{setting_name}: {error.message} {error.hint}")
    if problems:
        return config, problems
    weights = {keys[name]: path for name, path in config.weights.items()}
    return config.model_copy(update={"encoders": [keys[name] for name in config.encoders], "weights": weights}), []


def _find_problems(config: StudyConfig) -> Iterator[str]:
    """Yield a message for each duplicate value, invalid name, missing setting, and pair of contradictory settings."""
    listed: dict[str, list[Any]] = {
        "targets": config.targets,
        "encoders": config.encoders,
        "methods": config.methods,
        "aggregators": config.aggregators,
        "tapfm_aggregators": config.tapfm_aggregators,
        "seeds": config.seeds,
        "folds": config.folds,
        "variants": [each.name for each in config.variants],
    }
    for name, values in listed.items():
        if duplicates := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
            yield f"{name}: {duplicates[0]!r} is listed twice"
    for key in ("aggregators", "tapfm_aggregators"):
        for name in listed[key]:
            try:
                find_aggregator_card(name)
            except InputError as error:
                yield f"{key}: {error.message} {error.hint}"
    for name in (config.name, *listed["variants"]):
        if not _VALID_FOLDER_NAME.fullmatch(name):
            yield (
                f"name: {name!r} cannot be a folder name; use letters, digits, spaces and _.,+=:-, and begin with a "
                "letter or digit"
            )
    for name, classes in config.labels.items():
        if name not in config.targets:
            yield f"labels: {name!r} is not one of the targets"
        if not classes.negative:
            yield f"labels.{name}.negative: is not set; a study needs the texts of both classes"
    if config.is_multilabel and len(config.targets) == 1:
        yield "task: multilabel needs at least two targets"
    if config.report == "forgetting" and config.probe is None:
        yield 'probe: missing; a study with report = "forgetting" needs a section [probe] with tiles of another task'
    if config.report in ("ablation", "stability") and not config.variants:
        yield f'variants: missing; a study with report = "{config.report}" needs at least one [[variants]]'
    if config.report == "stability":
        orders = {each.settings.get("adaptation", {}).get("bag_gradient") for each in config.variants}
        if not {"before", "after", "joint"} <= orders:
            yield 'variants: report = "stability" needs variants with adaptation.bag_gradient before, after and joint'
        if "fixed" in config.methods:
            yield 'methods: report = "stability" compares orders of updates of the encoder, so fixed cannot be in it'
    for where, tables in _list_method_and_variant_settings(config):
        if isinstance(tables, Mapping) and "allow_failures" in (tables.get("machine") or {}):
            yield f"{where}.machine.allow_failures: must be the same for all runs; set it in [settings.machine]"
    yield from _describe_unknown_settings(config)


def _list_method_and_variant_settings(config: StudyConfig) -> list[tuple[str, Any]]:
    """Return the settings that are not for all runs, but for one method or variant, each with its name."""
    by_method = [(f"settings.{name}", config.settings[name]) for name in METHODS if name in config.settings]
    return by_method + [(f"variants {each.name}", each.settings) for each in config.variants]


def _describe_unknown_settings(config: StudyConfig) -> Iterator[str]:
    """Yield a problem for each setting in `settings` and `variants` that RUN.toml does not have."""
    known = list(list_settings())
    for_all_runs = {name: each for name, each in config.settings.items() if name not in METHODS}
    for where, tables in [("settings", for_all_runs), *_list_method_and_variant_settings(config)]:
        if not isinstance(tables, Mapping):
            yield f"{where}: must contain tables of RUN.toml"
            continue
        for section, values in tables.items():
            inside = [(section, key) for key in values] if isinstance(values, Mapping) else []
            for path in inside if (section,) in known else [(section,)]:
                if path not in known:
                    yield f"{where}.{'.'.join(path)}: unknown setting{suggest_setting(path, known)}"


def resolve_study_paths(tables: dict[str, Any], base: Path) -> None:
    """Make paths absolute in place, so that a study can be resumed from any folder."""
    weights, settings, variants = (tables.get(name) for name in ("weights", "settings", "variants"))
    encoders = weights if isinstance(weights, dict) else {}
    resolve_paths(tables, base, [*_STUDY_PATH_SETTINGS, *(("weights", name) for name in encoders)])
    run_settings = [settings, *(settings.get(method) for method in METHODS)] if isinstance(settings, dict) else []
    if isinstance(variants, list):
        run_settings += [each.get("settings") for each in variants if isinstance(each, dict)]
    for each in run_settings:
        if isinstance(each, dict):
            resolve_paths(each, base)


def format_study(tables: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Return a study as TOML.

    comments: comment of a top-level setting, by name.
    """
    lines = []
    for name, value in tables.items():
        if not isinstance(value, Mapping) and not _is_list_of_tables(value):
            comment = f"  # {comments[name]}" if comments and name in comments else ""
            lines.append(f"{name} = {format_toml_value(value)}{comment}")
    for name, value in tables.items():
        if isinstance(value, Mapping) and value:
            lines += ["", f"[{name}]", *_format_dotted_lines(value)]
        elif _is_list_of_tables(value):
            for each in value:
                lines += ["", f"[[{name}]]", *_format_dotted_lines(each)]
    return "\n".join(lines) + "\n"


def _format_dotted_lines(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Format the settings of a table, with dotted keys for nested tables."""
    lines: list[str] = []
    for key, value in table.items():
        name = prefix + format_toml_key(key)
        lines += (
            _format_dotted_lines(value, f"{name}.")
            if isinstance(value, Mapping)
            else [f"{name} = {format_toml_value(value)}"]
        )
    return lines


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)
