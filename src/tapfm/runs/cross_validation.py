"""Layout of a cross-validation folder, which `tapfm train --folds` writes.

cross-validation.json   number of folds; marks the folder
run.toml                settings of all folds
folds.csv               cohort table with the folds, if the table of the configuration has none
fold-0/, fold-1/, ...   run folder of each fold; evaluation/ in it has the metrics on its test slides
ensemble.json           the models of all folds as one model, for other cohorts
predictions.csv         out-of-fold predictions: of each slide, by the model of the fold that tests it
metrics.md, ...         their metrics and figures, as `tapfm evaluate` writes them
colours.csv             colour statistics of slides, shared by all evaluations
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tapfm.config.changes import describe_changed_settings
from tapfm.config.loading import read_toml
from tapfm.config.settings import RunConfig
from tapfm.config.text import format_config
from tapfm.errors import RunError
from tapfm.runs.ensemble import find_member_folders, is_finished_run
from tapfm.runtime.files import write_atomically
from tapfm.runtime.messages import format_command
from tapfm.runtime.output_folder import check_no_other_files

EVALUATION_FOLDER = "evaluation"  # in the run folder of a fold
_DESCRIPTION = "cross-validation.json"  # written when the folds are known and valid
_NEW_FOLDER_HINT = "Or start a new cross-validation with another --out."


class CrossValidationFolder:
    """Paths of the files in a cross-validation folder, and checks of its state."""

    def __init__(self, path: Path, folds: int) -> None:
        self.path, self.folds = path, folds
        self.run_file = path / "run.toml"
        self.table = path / "folds.csv"
        self.colours = path / "colours.csv"

    def run(self, fold: int) -> Path:
        """Return the run folder of a fold."""
        return self.path / f"fold-{fold}"

    @property
    def is_started(self) -> bool:
        return (self.path / _DESCRIPTION).is_file()

    @property
    def resume_command(self) -> str:
        """The command that resumes the cross-validation with the configuration in its folder."""
        folds = str(self._read_started_folds() if self.is_started else self.folds)
        return format_command("train", self.run_file, "--folds", folds, "--out", self.path, "--resume")

    def is_finished(self, fold: int, allowed_failures: int) -> bool:
        """Return whether the training of a fold is finished, with at most `allowed_failures` failed slides."""
        return is_finished_run(self.run(fold), allowed_failures)

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Raise RunError if the folder has other files, other settings, or any cross-validation without `resume`."""
        if not self.is_started:
            check_no_other_files(
                self.path,
                allowed=(self.table.name, self.run_file.name),  # left by a command that stopped before the first fold
                hint="Pass a new folder, for example --out runs/cross-validation.",
            )
            return
        if not resume:
            state = "a finished cross-validation" if is_cross_validation(self.path) else "a cross-validation"
            raise RunError(
                f"{self.path} already contains {state}.",
                hint=f"To resume it: {self.resume_command}\n{_NEW_FOLDER_HINT}",
            )
        before = read_toml(self.run_file, create_command=self.resume_command)
        lines = describe_changed_settings(before, config.as_tables())
        if self.folds != self._read_started_folds():
            lines.insert(0, f"--folds was {self._read_started_folds()} and is now {self.folds}")
        if lines:
            raise RunError(
                f"{self.path} was started with different settings:\n  " + "\n  ".join(lines),
                hint=f"Resume with the original settings: {self.resume_command}\n{_NEW_FOLDER_HINT}",
            )

    def start(self, config: RunConfig) -> None:
        """Write run.toml and cross-validation.json, unless they exist."""
        if not self.is_started:
            write_atomically(self.run_file, format_config(config).encode())
            write_atomically(self.path / _DESCRIPTION, (json.dumps({"folds": self.folds}, indent=2) + "\n").encode())

    def _read_started_folds(self) -> int:
        """Return the number of folds that the cross-validation was started with."""
        path = self.path / _DESCRIPTION
        try:
            return int(json.loads(path.read_text("utf-8"))["folds"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{path} cannot be read ({error}).", hint="Copy the whole folder again, or choose a new --out."
            ) from error


def is_cross_validation(path: Path) -> bool:
    """Return whether a folder is that of a cross-validation with out-of-fold results."""
    return all((path / name).is_file() for name in (_DESCRIPTION, "ensemble.json", "metrics.json"))


def is_unfinished_cross_validation(path: Path) -> bool:
    """Return whether a folder is that of a cross-validation without out-of-fold results."""
    return (path / _DESCRIPTION).is_file() and not is_cross_validation(path)


def find_fold_runs(path: Path) -> Sequence[Path]:
    """Return the run folders of the folds of a finished cross-validation."""
    return find_member_folders(path)[0]
