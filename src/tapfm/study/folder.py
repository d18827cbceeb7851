"""Layout of a study folder.

study.toml              settings of the study, with absolute paths
study.md                report: runs, tables, figures, failed steps
study.json              the same tables and figures, for `tapfm report`
table_*.md, .csv, .tex  AUCs of all models
*.md, .csv, .png        other tables and figures: costs, ablation, stability, forgetting
status.csv              state of each step, the reason if it failed, and its command
configs/, runs/         RUN.toml and run folder of each run
evaluations/            output of `tapfm evaluate` for each run and each ensemble
ensembles/              ensembles of the folds of each model
features/, probes/      stored features by encoder; probes of adapted encoders
logs/                   output of each command
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from tapfm.config.changes import describe_changed_settings
from tapfm.config.settings import RunConfig
from tapfm.runs.ensemble import is_finished_run
from tapfm.study.runs import PlannedRun, StudyModel, safe_folder_name


class StudyFolder:
    """Paths of the files in a study folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path / "study.toml"
        self.status = path / "status.csv"
        self.colours = path / "colours.csv"  # colour statistics of slides, shared by all evaluations

    def features(self, encoder: str, cohort: str = "test") -> Path:
        """Return the folder with the features of all slides of [cohort] (`test`), or of [external] (`external`)."""
        return self.path / "features" / (safe_folder_name(encoder) + ("-external" if cohort == "external" else ""))

    def config(self, run: PlannedRun) -> Path:
        return self.path / "configs" / f"{run.name}.toml"

    def run(self, run: PlannedRun) -> Path:
        return self.path / "runs" / run.name

    def evaluation(self, run: PlannedRun, cohort: str) -> Path:
        """Return the folder with the evaluation of a run on the cohort `test` or `external`."""
        return self.path / "evaluations" / run.name / cohort

    def ensemble(self, model: StudyModel, seed: int) -> Path:
        """Return the folder of the ensemble of all folds of a model."""
        return self.path / "ensembles" / model.name / f"seed{seed}"

    def ensemble_evaluation(self, model: StudyModel, seed: int) -> Path:
        """Return the folder with the evaluation of an ensemble on external slides."""
        return self.path / "evaluations" / model.name / f"ensemble-seed{seed}" / "external"

    def probe(self, run: PlannedRun) -> Path:
        return self.path / "probes" / f"{run.name}.json"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def is_finished(self, run: PlannedRun, allowed_failures: int = 0) -> bool:
        """Return whether a run is finished, with at most `allowed_failures` failed slides."""
        folder = self.run(run)
        return (folder / "predictions-test.csv").is_file() and is_finished_run(folder, allowed_failures)

    def list_changes(self, run: PlannedRun, config: RunConfig) -> list[str]:
        """Describe each setting of a started run that differs from the given configuration."""
        run_file = self.run(run) / "config.toml"
        if not run_file.is_file():
            return []
        return describe_changed_settings(tomllib.loads(run_file.read_text("utf-8")), config.as_tables())

    def read_history(self, run: PlannedRun) -> list[dict[str, Any]]:
        """Return the metrics of each epoch of a run."""
        text = (self.run(run) / "history.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]
