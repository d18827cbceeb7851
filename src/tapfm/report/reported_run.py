"""Contents of a run folder that a report shows. Weights are not loaded, and torch is not imported."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tapfm.cohort.splits import TEST, TRAIN, VALIDATION
from tapfm.errors import RunError
from tapfm.evaluation.predictions import Prediction, Unit, read_predictions
from tapfm.runtime.csv_files import read_csv
from tapfm.runtime.files import file_sha256
from tapfm.runtime.messages import format_count
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import TargetKinds

_CONFIG_TOML = "config.toml"
_BEST_CHECKPOINT = Path("checkpoints") / "best.safetensors"


@dataclass(frozen=True)
class ReportedRun:
    """Contents of a run folder, finished or not."""

    name: str
    folder: Path
    settings: Mapping[str, Any]  # config.toml
    config_text: str  # config.toml as text
    slides: Sequence[Mapping[str, str]]  # rows of split.csv
    history: Sequence[Mapping[str, Any]]  # rows of history.jsonl
    predictions: Mapping[str, Sequence[Prediction]]  # by split
    environments: Sequence[Mapping[str, Any]]  # one for each start or resumption
    failures: Sequence[Mapping[str, str]]  # rows of failures.csv
    finished: bool

    @cached_property
    def best_checkpoint_sha256(self) -> str | None:
        """SHA-256 of the best checkpoint, or None if there is none yet.

        Computed on first use, because a study has many large checkpoints.
        """
        path = self.folder / _BEST_CHECKPOINT
        return file_sha256(path) if path.is_file() else None

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self.settings.get("task", {}).get("targets", ()))

    @property
    def kinds(self) -> TargetKinds:
        """The kind of each target."""
        return target_kinds(self.targets, self.settings.get("task", {}).get("labels"))

    @property
    def unit(self) -> Unit:
        """Unit of the metrics: slide or patient."""
        return "patient" if self.settings.get("selection", {}).get("unit") == "patient" else "slide"

    @property
    def encoder(self) -> str:
        return str(self.settings.get("encoder", {}).get("name", ""))

    @property
    def aggregator(self) -> str:
        return str(self.settings.get("aggregator", {}).get("name", ""))

    @property
    def method(self) -> str:
        """Adaptation method: tapfm, finetune or fixed."""
        return str(self.settings.get("adaptation", {}).get("method", ""))

    @property
    def planned_epochs(self) -> int | None:
        return self.settings.get("schedule", {}).get("epochs")

    @property
    def best_epoch_row(self) -> Mapping[str, Any] | None:
        """Row of the first epoch with the highest score, or of the last epoch if no epoch has a score."""
        scored = [row for row in self.history if row.get("score") is not None]
        if scored:
            return max(scored, key=lambda row: float(row["score"]))
        return self.history[-1] if self.history else None

    def slides_of_split(self, split: str) -> list[Mapping[str, str]]:
        """Return the rows of split.csv for one split."""
        return [row for row in self.slides if row.get("split") == split]

    @property
    def validation_auc(self) -> float | None:
        """Validation AUC of the best epoch."""
        value = None if self.best_epoch_row is None else self.best_epoch_row.get("val_macro_auc")
        return None if value is None else float(value)


def read_run(folder: Path, name: str | None = None) -> ReportedRun:
    """Read a run folder, finished or not. The fields of missing files are empty.

    Raises InputError if config.toml is missing or a file cannot be read.
    """
    try:
        text = (folder / _CONFIG_TOML).read_text("utf-8")
        settings = tomllib.loads(text)
        if not settings.get("task", {}).get("targets"):
            raise ValueError(f"{_CONFIG_TOML} has no targets")
        history = [json.loads(line) for line in _read_text_or_empty(folder / "history.jsonl").splitlines()]
        environments = json.loads(_read_text_or_empty(folder / "environment.json") or "[]")
        slides, failures = read_table(folder / "split.csv"), read_table(folder / "failures.csv")
    except (OSError, ValueError) as error:  # errors of tomllib and json are ValueErrors
        raise RunError(
            f"The run folder {folder} cannot be read ({error}).", hint="Copy the complete run folder again."
        ) from error
    predictions = {
        split: read_predictions(path)
        for split in (VALIDATION, TEST)
        if (path := folder / f"predictions-{split}.csv").is_file()
    }
    return ReportedRun(
        name=name or _name_from_folder(folder),
        folder=folder,
        settings=settings,
        config_text=text,
        slides=slides,
        history=history,
        predictions={split: found for split, found in predictions.items() if found},
        environments=environments if isinstance(environments, list) else [environments],
        failures=failures,
        finished=(folder / "summary.md").is_file(),  # the last file that training writes
    )


def _read_text_or_empty(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; an empty list if it does not exist."""
    return read_csv(path) if path.is_file() else []


def _name_from_folder(folder: Path) -> str:
    """Return the path below `runs/`, or the name of the folder."""
    parts = folder.resolve().parts
    runs_indices = [index for index, part in enumerate(parts[:-1]) if part == "runs"]
    return "/".join(parts[runs_indices[-1] + 1 :]) if runs_indices else parts[-1]


def describe_run(run: ReportedRun) -> str:
    """Return what the model of a run predicts, and how it was trained. Its AUCs are in the headline."""
    rows = run.slides_of_split(TRAIN)
    patients = len({(row.get("cohort"), row.get("patient_id")) for row in rows})
    text = (
        f"The model predicts {', '.join(run.targets)}. It was trained on {format_count(len(rows), 'slide')} of "
        f"{format_count(patients, 'patient')}. "
    )
    if run.method == "fixed":
        text += (
            f"The encoder {run.encoder} was not adapted; the aggregator {run.aggregator} was trained on its features."
        )
    else:
        text += (
            f"The encoder {run.encoder} was adapted with the method {run.method} and the aggregator {run.aggregator}."
        )
    if run.best_epoch_row is not None:
        by = "" if run.validation_auc is None else " by its validation AUC"
        text += f" Epoch {run.best_epoch_row['epoch']} of {len(run.history)} was selected{by}."
    return text
