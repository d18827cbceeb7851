"""The folder of a study, which explains itself.

study.toml              what was asked, with whole paths
study.md                what was run, the tables, what failed
table_*.md, .csv, .tex  AUC of all methods; costs.*, ablation.*, stability.*, forgetting.*; figures
status.csv              each step of each run: done, failed and why, and what to type
configs/, runs/         RUN.toml and the folder of each run
evaluations/            what `tapfm evaluate` wrote for each run, on test and on external slides
ensembles/              the folds of a method, as one model
features/, probes/      stored features by encoder; probes of adapted encoders
logs/                   what each command said
"""

from __future__ import annotations

import csv
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfm.config.changes import changed_settings
from tapfm.config.settings import RunConfig
from tapfm.study.runs import Method, PlannedRun, safe


@dataclass(frozen=True)
class StudyFolder:
    """Names the files of a study."""

    path: Path

    @property
    def study(self) -> Path:
        """What was asked."""
        return self.path / "study.toml"

    @property
    def status(self) -> Path:
        """How far it is."""
        return self.path / "status.csv"

    @property
    def colours(self) -> Path:
        """Colour statistics that all evaluations share."""
        return self.path / "colours.csv"

    def features(self, encoder: str, cohort: str = "test") -> Path:
        """Stored features of an encoder."""
        return self.path / "features" / (safe(encoder) + ("-external" if cohort == "external" else ""))

    def config(self, run: PlannedRun) -> Path:
        """RUN.toml of a run."""
        return self.path / "configs" / f"{run.name}.toml"

    def run(self, run: PlannedRun) -> Path:
        """Folder of a run."""
        return self.path / "runs" / run.name

    def evaluation(self, run: PlannedRun, cohort: str) -> Path:
        """What a run is worth on a cohort: test or external."""
        return self.path / "evaluations" / run.name / cohort

    def ensemble(self, method: Method, seed: int) -> Path:
        """The folds of a method as one model."""
        return self.path / "ensembles" / method.name / f"seed{seed}"

    def ensemble_evaluation(self, method: Method, seed: int) -> Path:
        """What an ensemble is worth on external slides."""
        return self.path / "evaluations" / method.name / f"ensemble-seed{seed}" / "external"

    def probe(self, run: PlannedRun) -> Path:
        """What an adapted encoder still knows."""
        return self.path / "probes" / f"{run.name}.json"

    def log(self, name: str) -> Path:
        """What a command said."""
        return self.path / "logs" / f"{name}.log"

    def finished(self, run: PlannedRun, allow_failures: int = 0) -> bool:
        """Say whether a run is finished, from its small files alone: its summary is written last."""
        folder = self.run(run)
        if not all((folder / name).is_file() for name in ("summary.md", "predictions-test.csv", "history.jsonl")):
            return False
        try:
            with (folder / "failures.csv").open(newline="", encoding="utf-8") as file:
                failed = sum(row["what"] == "failed" for row in csv.DictReader(file))
        except (OSError, KeyError):
            return False
        return failed <= allow_failures

    def changes(self, run: PlannedRun, config: RunConfig) -> list[str]:
        """Say how a run that was begun differs from what the study asks for now."""
        begun_with = self.run(run) / "config.toml"
        if not begun_with.is_file():
            return []
        return changed_settings(tomllib.loads(begun_with.read_text("utf-8")), config.as_tables())

    def history(self, run: PlannedRun) -> list[dict[str, Any]]:
        """Read what each epoch of a run came to."""
        text = (self.run(run) / "history.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]
