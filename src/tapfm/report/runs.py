"""A run as a report sees it: what its folder says, finished or not. Neither weights nor torch are loaded."""

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

_CONFIGURATION = "config.toml"  # marks a run
_BEST = Path("checkpoints") / "best.safetensors"


@dataclass(frozen=True)
class ReportedRun:
    """Everything that the folder of a run tells, besides its weights."""

    name: str
    folder: Path
    settings: Mapping[str, Any]
    configuration: str  # config.toml as it is
    slides: Sequence[Mapping[str, str]]  # split.csv
    history: Sequence[Mapping[str, Any]]
    predictions: Mapping[str, Sequence[Prediction]]  # by split
    environments: Sequence[Mapping[str, Any]]
    failures: Sequence[Mapping[str, str]]
    finished: bool

    @cached_property
    def weights_sha256(self) -> str | None:
        """Fingerprint the weights of the best epoch; when it is asked for: a study has many runs of gigabytes."""
        return file_sha256(self.folder / _BEST) if (self.folder / _BEST).is_file() else None

    @property
    def targets(self) -> tuple[str, ...]:
        """What it learns."""
        return tuple(self.settings.get("task", {}).get("targets", ()))

    @property
    def unit(self) -> Unit:
        """What counts once."""
        return "patient" if self.settings.get("selection", {}).get("unit") == "patient" else "slide"

    @property
    def encoder(self) -> str:
        """Name the encoder."""
        return str(self.settings.get("encoder", {}).get("name", ""))

    @property
    def aggregator(self) -> str:
        """Name the aggregator."""
        return str(self.settings.get("aggregator", {}).get("name", ""))

    @property
    def method(self) -> str:
        """Say how the encoder was adapted."""
        return str(self.settings.get("adaptation", {}).get("method", ""))

    @property
    def epochs_planned(self) -> int | None:
        """Say how many epochs were asked for."""
        return self.settings.get("schedule", {}).get("epochs")

    @property
    def best(self) -> Mapping[str, Any] | None:
        """Find the epoch that was kept: the highest score, of equal ones the earlier; the last where none has one."""
        scored = [row for row in self.history if row.get("score") is not None]
        if scored:
            return max(scored, key=lambda row: float(row["score"]))
        return self.history[-1] if self.history else None

    def of_split(self, split: str) -> list[Mapping[str, str]]:
        """List the slides of a split."""
        return [row for row in self.slides if row.get("split") == split]

    @property
    def validation_auc(self) -> float | None:
        """Give what the kept epoch reached on validation."""
        value = None if self.best is None else self.best.get("val_macro_auc")
        return None if value is None else float(value)


def read_run(folder: Path, name: str | None = None) -> ReportedRun:
    """Read all small files of a run; what is not there yet is left out."""
    try:
        text = (folder / _CONFIGURATION).read_text("utf-8")
        settings = tomllib.loads(text)
        if not settings.get("task", {}).get("targets"):
            raise ValueError(f"{_CONFIGURATION} names no targets")
        history = [json.loads(line) for line in _text_of(folder / "history.jsonl").splitlines()]
        environments = json.loads(_text_of(folder / "environment.json") or "[]")
        slides, failures = read_table(folder / "split.csv"), read_table(folder / "failures.csv")
    except (OSError, ValueError) as error:  # TOML's and JSON's errors are ValueErrors
        raise RunError(
            f"The folder of the run {folder} cannot be read ({error}).", hint="Copy the whole folder of the run again."
        ) from error
    predictions = {
        split: read_predictions(path)
        for split in (VALIDATION, TEST)
        if (path := folder / f"predictions-{split}.csv").is_file()
    }
    return ReportedRun(
        name=name or _name_of(folder),
        folder=folder,
        settings=settings,
        configuration=text,
        slides=slides,
        history=history,
        predictions={split: found for split, found in predictions.items() if found},
        environments=environments if isinstance(environments, list) else [environments],
        failures=failures,
        finished=(folder / "summary.md").is_file(),  # which is written last
    )


def _text_of(path: Path) -> str:
    """Read a file; nothing where there is none."""
    return path.read_text("utf-8") if path.is_file() else ""


def read_table(path: Path) -> list[dict[str, str]]:
    """Read a CSV file; nothing where there is none."""
    return read_csv(path) if path.is_file() else []


def _name_of(folder: Path) -> str:
    """Name a run by its place below `runs`, or by its folder."""
    parts = folder.resolve().parts
    below = [place for place, part in enumerate(parts[:-1]) if part == "runs"]
    return "/".join(parts[below[-1] + 1 :]) if below else parts[-1]


def count_training_slides(run: ReportedRun) -> tuple[int, int]:
    """Count slides and patients of the training split."""
    rows = run.of_split(TRAIN)
    return len(rows), len({(row.get("cohort"), row.get("patient_id")) for row in rows})
