"""Runs of a study: every combination of encoder, regime, aggregator, variant, fold and seed in STUDY.toml."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tapfm.config.loading import merge_tables, resolve_config
from tapfm.config.recipes import Method as Regime
from tapfm.config.settings import RunConfig
from tapfm.config.study import REGIMES, StudyConfig
from tapfm.encoders.catalog import find_encoder_card
from tapfm.errors import InputError, SettingError

_TITLES = {"abmil": "ABMIL", "dsmil": "DSMIL", "clam": "CLAM", "varmil": "VarMIL"}  # as the paper writes them
_MAX_LISTED_RUNS = 20  # in an error message


@dataclass(frozen=True)
class StudyMethod:
    """A method to compare, which is one row of a table. It is trained once per fold and seed."""

    encoder: str
    regime: Regime
    aggregator: str
    variant: str | None
    target: str | None  # None if one model predicts all targets

    @property
    def name(self) -> str:
        """Relative path of the folder with its runs."""
        parts = (self.target, self.encoder, self.regime, self.aggregator, self.variant)
        return "/".join(safe_folder_name(part) for part in parts if part is not None)

    @property
    def row_key(self) -> str:
        """Key of its row in tables. Models of the same method for different targets share a row."""
        return "/".join(filter(None, (self.encoder, self.regime, self.aggregator, self.variant)))

    @property
    def title(self) -> str:
        """Title in tables, as in the paper."""
        encoder, aggregator = find_encoder_card(self.encoder).name, _TITLES.get(self.aggregator, self.aggregator)
        if self.regime == "tapfm":
            other = "" if self.aggregator == "cls-attention" else f", {aggregator}"
            title = f"{encoder} (TAPFM{other})"
        else:
            title = f"{encoder} + {aggregator}{' (FT)' if self.regime == 'finetune' else ''}"
        return title if self.variant is None else f"{title}, {self.variant}"

    @property
    def full_title(self) -> str:
        """Title with the target, if each target has its own model."""
        return self.title if self.target is None else f"{self.target}: {self.title}"


@dataclass(frozen=True)
class PlannedRun:
    """One run of `tapfm train`."""

    method: StudyMethod
    seed: int
    fold: int | None

    @property
    def name(self) -> str:
        """Relative path of its folder."""
        fold = "" if self.fold is None else f"fold{self.fold}/"
        return f"{self.method.name}/{fold}seed{self.seed}"


def list_methods(study: StudyConfig) -> list[StudyMethod]:
    """Return the methods of a study, ordered by target, regime, encoder, aggregator and variant."""
    targets: Sequence[str | None] = [None] if study.multilabel or len(study.targets) == 1 else study.targets
    variants: Sequence[str | None] = [each.name for each in study.variants] or [None]
    return [
        StudyMethod(encoder, regime, aggregator, variant, target)
        for target in targets
        for regime in REGIME_ORDER
        if regime in study.regimes
        for encoder in study.encoders
        for aggregator in (study.tapfm_aggregators if regime == "tapfm" else study.aggregators)
        for variant in variants
    ]


REGIME_ORDER: tuple[Regime, ...] = ("fixed", "finetune", "tapfm")


def list_runs(study: StudyConfig) -> list[PlannedRun]:
    """Return all runs. Seeds are the outermost loop, so that one seed of each method is finished early."""
    runs = [
        run for seed in study.seeds for method in list_methods(study) for run in list_fold_runs(study, method, seed)
    ]
    names: dict[str, PlannedRun] = {}
    for run in runs:
        if (other := names.setdefault(run.name.lower(), run)) is not run:
            raise SettingError(
                f"{other.method.title} and {run.method.title} would have the same run folder, {run.name}.",
                hint="Rename a variant: names must differ in more than case and punctuation.",
            )
    return runs


def list_fold_runs(study: StudyConfig, method: StudyMethod, seed: int) -> list[PlannedRun]:
    """Return the runs of a method with one seed: one per fold, or a single run without folds."""
    folds: Sequence[int | None] = study.folds or [None]
    return [PlannedRun(method, seed, fold) for fold in folds]


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

    Settings of the regime override those of the study, and settings of the variant override both.
    """
    method = run.method
    tables: dict[str, Any] = {
        "seed": run.seed,
        "cohort": {"table": str(study.cohort.table)},
        # the regime fixed does not read tiles, but the colour baseline of its evaluation does
        "tiles": {"folder": str(study.cohort.tiles)},
        "encoder": {"name": method.encoder},
        "aggregator": {"name": method.aggregator},
        "task": {"targets": study.targets if method.target is None else [method.target]},
        "adaptation": {"method": method.regime},
        "selection": {"unit": study.unit},
    }
    if study.cohort.slides is not None:
        tables["cohort"]["slides"] = str(study.cohort.slides)
    if run.fold is not None:
        tables["cohort"]["fold"] = run.fold
    if method.regime == "fixed":
        tables["tiles"]["features"] = str(features)
    if method.encoder in study.weights:
        tables["encoder"]["weights"] = str(study.weights[method.encoder])
    merge_tables(tables, {name: each for name, each in study.settings.items() if name not in REGIMES})
    merge_tables(tables, study.settings.get(method.regime, {}))
    for variant in study.variants:
        if variant.name == method.variant:
            merge_tables(tables, variant.settings)
    return tables


def resolve_run_config(study: StudyConfig, run: PlannedRun, features: Path) -> RunConfig:
    """Return the configuration of one run. Raises InputError, with the name of the run, if settings are invalid."""
    return resolve_config(build_run_tables(study, run, features), f"The run {run.name}")


def safe_folder_name(part: str) -> str:
    """Return a name that is valid for a folder on any file system."""
    return re.sub(r"[^\w.+=-]+", "-", part).strip("-.") or "-"
