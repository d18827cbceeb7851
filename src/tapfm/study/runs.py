"""Runs of a study: one for each encoder, method, aggregator of that method, variant, fold and seed.

If each target has its own model, there is one for each target, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tapfm.config.loading import merge_tables, resolve_config
from tapfm.config.recipes import Method
from tapfm.config.settings import RunConfig
from tapfm.config.study import METHODS, StudyConfig
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import InputError, SettingError

_TITLES = {"abmil": "ABMIL", "dsmil": "DSMIL", "clam": "CLAM", "varmil": "VarMIL"}  # as the paper writes them
_MAX_LISTED_RUNS = 20  # in an error message


@dataclass(frozen=True)
class StudyModel:
    """A model to compare, which is one row of a table. It is trained once per fold and seed."""

    encoder: str
    method: Method
    aggregator: str
    variant: str | None
    target: str | None  # None if one model predicts all targets

    @property
    def name(self) -> str:
        """Relative path of the folder with its runs."""
        parts = (self.target, self.encoder, self.method, self.aggregator, self.variant)
        return "/".join(safe_folder_name(part) for part in parts if part is not None)

    @property
    def row_key(self) -> str:
        """Key of its row in tables. Models that differ only in their target share a row."""
        return "/".join(filter(None, (self.encoder, self.method, self.aggregator, self.variant)))

    @property
    def title(self) -> str:
        """Title in tables, as in the paper."""
        encoder, aggregator = find_encoder_card(self.encoder).name, _TITLES.get(self.aggregator, self.aggregator)
        if self.method == "tapfm":
            other = "" if self.aggregator == "cls-attention" else f", {aggregator}"
            title = f"{encoder} (TAPFM{other})"
        else:
            title = f"{encoder} + {aggregator}{' (FT)' if self.method == 'finetune' else ''}"
        return title if self.variant is None else f"{title}, {self.variant}"

    @property
    def full_title(self) -> str:
        """Title with the target, if each target has its own model."""
        return self.title if self.target is None else f"{self.target}: {self.title}"


@dataclass(frozen=True)
class PlannedRun:
    """One run of `tapfm train`."""

    model: StudyModel
    seed: int
    fold: int | None

    @property
    def name(self) -> str:
        """Relative path of its folder."""
        fold = "" if self.fold is None else f"fold{self.fold}/"
        return f"{self.model.name}/{fold}seed{self.seed}"


def list_models(study: StudyConfig) -> list[StudyModel]:
    """Return the models of a study, ordered by target, method, encoder, aggregator and variant."""
    targets: Sequence[str | None] = [None] if study.is_multilabel or len(study.targets) == 1 else study.targets
    variants: Sequence[str | None] = [each.name for each in study.variants] or [None]
    return [
        StudyModel(encoder, method, aggregator, variant, target)
        for target in targets
        for method in METHOD_ORDER
        if method in study.methods
        for encoder in study.encoders
        for aggregator in (study.tapfm_aggregators if method == "tapfm" else study.aggregators)
        for variant in variants
    ]


METHOD_ORDER: tuple[Method, ...] = ("fixed", "finetune", "tapfm")


def list_runs(study: StudyConfig) -> list[PlannedRun]:
    """Return all runs. Seeds are the outermost loop, so that one seed of each model is finished early."""
    runs = [run for seed in study.seeds for model in list_models(study) for run in list_fold_runs(study, model, seed)]
    names: dict[str, PlannedRun] = {}
    for run in runs:
        if (other := names.setdefault(run.name.lower(), run)) is not run:
            raise SettingError(
                f"{other.model.full_title} and {run.model.full_title} would have the same run folder, {run.name}.",
                hint="Rename a variant or target: names must differ in more than case and punctuation.",
            )
    return runs


def list_fold_runs(study: StudyConfig, model: StudyModel, seed: int) -> list[PlannedRun]:
    """Return the runs of a model with one seed: one per fold, or a single run without folds."""
    folds: Sequence[int | None] = study.folds or [None]
    return [PlannedRun(model, seed, fold) for fold in folds]


def select_runs(runs: Sequence[PlannedRun], only: Sequence[str]) -> list[PlannedRun]:
    """Return the runs that match any pattern, or all runs without patterns.

    A pattern that matches a folder selects all runs in it. Raises InputError if a pattern matches no run.
    """
    for pattern in only:
        if not any(_matches(run.name, pattern) for run in runs):
            names = [run.name for run in runs[:_MAX_LISTED_RUNS]] + (["..."] if len(runs) > _MAX_LISTED_RUNS else [])
            raise InputError(f"--only {pattern} matches no run.", hint="The runs are: " + ", ".join(names))
    return [run for run in runs if not only or any(_matches(run.name, pattern) for pattern in only)]


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a run name or one of its parent folders."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern.rstrip('/')}/*")


def build_run_tables(study: StudyConfig, run: PlannedRun, features: Path) -> dict[str, Any]:
    """Return the tables of RUN.toml for one run.

    Settings of the method override those of the study, and settings of the variant override both.
    """
    model = run.model
    targets = study.targets if model.target is None else [model.target]
    tables: dict[str, Any] = {
        "seed": run.seed,
        "cohort": study.cohort.model_dump(mode="json", exclude={"tiles"}, exclude_defaults=True),
        # the method fixed does not read tiles, but the colour baseline of its evaluation does
        "tiles": {"folder": str(study.cohort.tiles)},
        "encoder": {"name": model.encoder},
        "aggregator": {"name": model.aggregator},
        "task": {
            "targets": targets,
            "labels": {name: each.model_dump() for name, each in study.labels.items() if name in targets},
        },
        "adaptation": {"method": model.method},
        "selection": {"unit": study.unit},
    }
    if run.fold is not None:
        tables["cohort"]["fold"] = run.fold
    if model.method == "fixed":
        tables["tiles"]["features"] = str(features)
    if model.encoder in study.weights:
        tables["encoder"]["weights"] = str(study.weights[model.encoder])
    merge_tables(tables, {name: each for name, each in study.settings.items() if name not in METHODS})
    merge_tables(tables, study.settings.get(model.method, {}))
    for variant in study.variants:
        if variant.name == model.variant:
            merge_tables(tables, variant.settings)
    return tables


def resolve_run_config(study: StudyConfig, run: PlannedRun, features: Path) -> RunConfig:
    """Return the configuration of one run. Raises InputError, with the name of the run, if settings are invalid."""
    return resolve_config(build_run_tables(study, run, features), f"The run {run.name}")


def safe_folder_name(part: str) -> str:
    """Return a name that is valid for a folder on any file system."""
    return re.sub(r"[^\w.+=-]+", "-", part).strip("-.") or "-"
