"""The folder of a study.

study.toml              the study, with absolute paths
study.md                report: runs, tables, figures, failures
study.json              the same tables and figures, for `tapfm report`
table_*.md, .csv, .tex  AUC of all methods; costs.*, ablation.*, stability.*, forgetting.*; figures
status.csv              state of each step of each run, why it failed, and its command
configs/, runs/         RUN.toml and the folder of each run
evaluations/            output of `tapfm evaluate` for each run, on test and on external slides
ensembles/              the folds of a method, as one model
features/, probes/      stored features by encoder; probes of adapted encoders
logs/                   output of each command
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from tapfm.config.changes import changed_settings
from tapfm.config.settings import RunConfig
from tapfm.runtime.csv_files import read_csv
from tapfm.study.runs import PlannedRun, StudyMethod, safe_folder_name


class StudyFolder:
    """Names the files of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path / "study.toml"
        self.status = path / "status.csv"
        self.colours = path / "colours.csv"  # colour statistics that all evaluations share

    def features(self, encoder: str, cohort: str = "test") -> Path:
        """Stored features of an encoder, for the cohort `test` or `external`."""
        return self.path / "features" / (safe_folder_name(encoder) + ("-external" if cohort == "external" else ""))

    def config(self, run: PlannedRun) -> Path:
        """RUN.toml of a run."""
        return self.path / "configs" / f"{run.name}.toml"

    def run(self, run: PlannedRun) -> Path:
        """Folder of a run."""
        return self.path / "runs" / run.name

    def evaluation(self, run: PlannedRun, cohort: str) -> Path:
        """Evaluation of a run on the cohort `test` or `external`."""
        return self.path / "evaluations" / run.name / cohort

    def ensemble(self, method: StudyMethod, seed: int) -> Path:
        """The folds of a method as one model."""
        return self.path / "ensembles" / method.name / f"seed{seed}"

    def ensemble_evaluation(self, method: StudyMethod, seed: int) -> Path:
        """Evaluation of an ensemble on external slides."""
        return self.path / "evaluations" / method.name / f"ensemble-seed{seed}" / "external"

    def probe(self, run: PlannedRun) -> Path:
        """Probe of an adapted encoder."""
        return self.path / "probes" / f"{run.name}.json"

    def log(self, name: str) -> Path:
        """Output of a command."""
        return self.path / "logs" / f"{name}.log"

    def finished(self, run: PlannedRun, allow_failures: int = 0) -> bool:
        """Return whether a run is finished, from its small files: its summary is written last."""
        folder = self.run(run)
        if not all((folder / name).is_file() for name in ("summary.md", "predictions-test.csv", "history.jsonl")):
            return False
        try:
            failed = sum(row["problem"] == "failed" for row in read_csv(folder / "failures.csv"))
        except (OSError, ValueError, KeyError):
            return False
        return failed <= allow_failures

    def changes(self, run: PlannedRun, config: RunConfig) -> list[str]:
        """Return how the settings of a run that was started differ from those of the study."""
        started_with = self.run(run) / "config.toml"
        if not started_with.is_file():
            return []
        return changed_settings(tomllib.loads(started_with.read_text("utf-8")), config.as_tables())

    def history(self, run: PlannedRun) -> list[dict[str, Any]]:
        """Read the epochs of a run."""
        text = (self.run(run) / "history.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]
