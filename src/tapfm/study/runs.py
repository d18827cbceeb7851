"""The runs of a study: the cross product of what STUDY.toml lists, each with a name that is its folder."""

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
from tapfm.encoders.catalog import encoder_card
from tapfm.errors import InputError, SettingError

_TITLES = {"abmil": "ABMIL", "dsmil": "DSMIL", "clam": "CLAM", "varmil": "VarMIL"}  # as the paper writes them
_SHOWN = 20  # runs that a message names


@dataclass(frozen=True)
class StudyMethod:
    """What is compared: a row of a table. Folds and seeds of it are summed up."""

    encoder: str
    regime: Regime
    aggregator: str
    variant: str | None
    target: str | None  # of one model for each target; None where a model predicts all

    @property
    def name(self) -> str:
        """Name its folder."""
        parts = (self.target, self.encoder, self.regime, self.aggregator, self.variant)
        return "/".join(safe_folder_name(part) for part in parts if part is not None)

    @property
    def row(self) -> str:
        """Name of its row in tables, which have a column for each target."""
        return "/".join(filter(None, (self.encoder, self.regime, self.aggregator, self.variant)))

    @property
    def title(self) -> str:
        """Write it as the paper does."""
        encoder, aggregator = encoder_card(self.encoder).name, _TITLES.get(self.aggregator, self.aggregator)
        if self.regime == "tapfm":
            ours = "" if self.aggregator == "cls-attention" else f", {aggregator}"
            title = f"{encoder} (TAPFM{ours})"
        else:
            title = f"{encoder} + {aggregator}{' (FT)' if self.regime == 'finetune' else ''}"
        return title if self.variant is None else f"{title}, {self.variant}"

    @property
    def full_title(self) -> str:
        """The title, with the target if every target has a model of its own."""
        return self.title if self.target is None else f"{self.target}: {self.title}"


@dataclass(frozen=True)
class PlannedRun:
    """One run of `tapfm train`."""

    method: StudyMethod
    seed: int
    fold: int | None

    @property
    def name(self) -> str:
        """Name its folder."""
        fold = "" if self.fold is None else f"fold{self.fold}/"
        return f"{self.method.name}/{fold}seed{self.seed}"


def list_methods(study: StudyConfig) -> list[StudyMethod]:
    """List what is compared, in the order of the table: regime, encoder, aggregator, variant."""
    targets: Sequence[str | None] = [None] if study.multilabel or len(study.targets) == 1 else study.targets
    variants: Sequence[str | None] = [each.name for each in study.variants] or [None]
    return [
        StudyMethod(encoder, regime, aggregator, variant, target)
        for target in targets
        for regime in REGIMES_IN_TABLE
        if regime in study.regimes
        for encoder in study.encoders
        for aggregator in (study.tapfm_aggregators if regime == "tapfm" else study.aggregators)
        for variant in variants
    ]


REGIMES_IN_TABLE: tuple[Regime, ...] = ("fixed", "finetune", "tapfm")


def list_runs(study: StudyConfig) -> list[PlannedRun]:
    """List all runs: first one seed of everything, so that a table is there early."""
    runs = [
        run for seed in study.seeds for method in list_methods(study) for run in list_fold_runs(study, method, seed)
    ]
    names: dict[str, PlannedRun] = {}
    for run in runs:
        if (other := names.setdefault(run.name.lower(), run)) is not run:
            raise SettingError(
                f"Two runs would have the folder {run.name}: {other.method.title} and {run.method.title}.",
                hint="Give the variants names that differ in more than signs.",
            )
    return runs


def list_fold_runs(study: StudyConfig, method: StudyMethod, seed: int) -> list[PlannedRun]:
    """Return the runs of a method with one seed: one for each fold, or one."""
    folds: Sequence[int | None] = study.folds or [None]
    return [PlannedRun(method, seed, fold) for fold in folds]


def select_runs(runs: Sequence[PlannedRun], only: Sequence[str]) -> list[PlannedRun]:
    """Return the runs that match a pattern, or all without patterns. A pattern may be a folder above runs."""
    for pattern in only:
        if not any(_matches(run.name, pattern) for run in runs):
            names = [run.name for run in runs[:_SHOWN]] + (["..."] if len(runs) > _SHOWN else [])
            raise InputError(f"--only {pattern} fits no run.", hint="Runs are: " + ", ".join(names))
    return [run for run in runs if not only or any(_matches(run.name, pattern) for pattern in only)]


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name, or a folder above it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern.rstrip('/')}/*")


def run_tables(study: StudyConfig, run: PlannedRun, features: Path) -> dict[str, Any]:
    """Return RUN.toml of one run: the settings of the study, then of the regime, then of the variant."""
    method = run.method
    tables: dict[str, Any] = {
        "seed": run.seed,
        "cohort": {"table": str(study.cohort.table)},
        # method fixed does not read them, but the colour baseline beside it does
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


def run_config(study: StudyConfig, run: PlannedRun, features: Path) -> RunConfig:
    """Resolve the configuration of one run. Raises InputError with the name of the run."""
    return resolve_config(run_tables(study, run, features), f"The run {run.name}")


def safe_folder_name(part: str) -> str:
    """Return a name that can be a folder on any file system."""
    return re.sub(r"[^\w.+=-]+", "-", part).strip("-.") or "-"
