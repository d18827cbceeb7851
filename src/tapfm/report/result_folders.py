"""Find and read the evaluation and prediction folders of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfm.errors import InputError
from tapfm.prediction.folder import PREDICTION_JSON, PredictionFolder
from tapfm.runs.cross_validation import is_cross_validation, is_unfinished_cross_validation
from tapfm.runs.ensemble import is_run
from tapfm.runtime.messages import format_command
from tapfm.slides.opening import PER_SLIDE

STUDY_TOML = "study.toml"
_EVALUATION_JSON = "evaluation.json"
_MAX_DEPTH = 8  # levels below the searched folder; evaluations of a study are at most eight levels deep
_EVALUATE_COMMAND = "tapfm evaluate runs/NAME --out DIR"
_SKIPPED_FOLDERS = (PER_SLIDE, "checkpoints", "tensorboard")


@dataclass(frozen=True)
class ResultFolder:
    """A folder written by `tapfm evaluate` or `tapfm predict`, with the content of its JSON file."""

    path: Path
    metadata: dict[str, Any]

    def weights_digests(self) -> set[str]:
        """Return the SHA-256 digests of the weights of the model, or of all members of an ensemble."""
        members = self.metadata.get("members") or []
        return {str(each["weights_sha256"]) for each in members if isinstance(each, dict) and "weights_sha256" in each}

    def is_result_of(self, weights_sha256: str | None) -> bool:
        """Return whether the model has exactly these weights; False for an ensemble that contains them."""
        return self.weights_digests() == {weights_sha256}

    @property
    def model(self) -> str:
        """Path or name of the model."""
        return str(self.metadata.get("model", "unknown"))

    def describe_model(self) -> str:
        """Return a description of a model that is not a reported run, such as "the model exported"."""
        members = len(self.weights_digests())
        return f"an ensemble of {members} models ({self.model})" if members > 1 else f"the model {self.model}"


def check_source(path: Path) -> None:
    """Raise InputError if a path is not the folder of a run, a study or a finished cross-validation."""
    if is_run(path) or (path / STUDY_TOML).is_file() or is_cross_validation(path):
        return
    if not path.exists():
        raise InputError(f"{path} does not exist.", hint="Pass a run folder (runs/NAME) or a study folder.")
    if is_unfinished_cross_validation(path):
        raise InputError(
            f"The cross-validation {path} is not finished.",
            hint="To finish it, run the same tapfm train command again with --resume. Or report the folds: "
            + format_command("report", *sorted(filter(is_run, path.glob("fold-*"))), "--out", "report.html"),
        )
    if (path / _EVALUATION_JSON).is_file():
        hint = "It is an evaluation. Pass its run: " + _report_command("--evaluation", path)
    elif (path / PREDICTION_JSON).is_file():
        hint = "It contains predictions. Pass their run: " + _report_command("--predictions", path)
    else:
        hint = "Pass an output folder of `tapfm train` or `tapfm study`, such as runs/NAME."
    raise InputError(f"{path} is neither a run folder nor a study folder.", hint=hint)


def _report_command(option: str, path: Path) -> str:
    return format_command("report", "runs/NAME", option, path, "--out", "report.html")


def read_evaluation_folder(path: Path) -> ResultFolder:
    """Read a folder that the user passed. Raises InputError if it is not a finished evaluation."""
    if not (path / _EVALUATION_JSON).is_file():
        raise InputError(f"{path} is not an evaluation folder.", hint=f"Create one: {_EVALUATE_COMMAND}")
    if not (path / "metrics.json").is_file():
        raise InputError(
            f"The evaluation {path} is not finished.",
            hint="To finish it, run the same tapfm evaluate command again with --resume.",
        )
    return ResultFolder(path, _read_json(path / _EVALUATION_JSON))


def read_prediction_folder(path: Path) -> ResultFolder:
    """Read a folder that the user passed. Raises InputError if it is not a prediction folder."""
    return ResultFolder(path, PredictionFolder(path).read_metadata())


def find_evaluations(run: Path, weights_sha256: str | None) -> list[ResultFolder]:
    """Return finished evaluations with these weights from the folders that `_find_result_folders` searches."""
    return [
        folder
        for folder in _find_result_folders(run, "evaluations", _EVALUATION_JSON)
        if folder.is_result_of(weights_sha256)
        and folder.metadata.get("kind") == "run"
        and (folder.path / "metrics.json").is_file()
    ]


def find_predictions(run: Path, weights_sha256: str | None) -> list[ResultFolder]:
    """Return predictions with these weights from the folders that `_find_result_folders` searches."""
    folders = _find_result_folders(run, "predictions", PREDICTION_JSON)
    return [folder for folder in folders if folder.is_result_of(weights_sha256)]


def find_ensemble_evaluations(ensemble: Path, weights_digests: Set[str]) -> list[ResultFolder]:
    """Return finished evaluations of an ensemble with these weights, except for results in its own folder."""
    return [
        folder
        for folder in _find_result_folders(ensemble, "evaluations", _EVALUATION_JSON)
        if folder.weights_digests() == weights_digests
        and folder.path.resolve() != ensemble.resolve()
        and (folder.path / "metrics.json").is_file()
    ]


def find_ensemble_predictions(ensemble: Path, weights_digests: Set[str]) -> list[ResultFolder]:
    """Return predictions of an ensemble with these weights."""
    folders = _find_result_folders(ensemble, "predictions", PREDICTION_JSON)
    return [folder for folder in folders if folder.weights_digests() == weights_digests]


def _find_result_folders(run: Path, parent_name: str, file_name: str) -> list[ResultFolder]:
    """Return the folders that contain a file of this name.

    The search covers the run folder, the folders next to `runs/`, and all levels of `parent_name` next to `runs/`.
    """
    run = run.resolve()
    paths = list(_find_folders_with_file(run, file_name))
    if (runs := next((parent for parent in run.parents if parent.name == "runs"), None)) is not None:
        paths += sorted(path.parent for path in runs.parent.glob(f"*/{file_name}"))
        paths += _find_folders_with_file(runs.parent / parent_name, file_name)
    folders = []
    for path in dict.fromkeys(paths):
        try:
            folders.append(ResultFolder(path, _read_json(path / file_name)))
        except InputError:
            continue  # damaged, but the user did not ask for it
    return folders


def _find_folders_with_file(root: Path, file_name: str) -> Iterator[Path]:
    """Yield the folders that contain a file of this name, in sorted order. Their subfolders are not searched."""
    root_depth = len(root.parts)
    for parent, subfolders, files in os.walk(root):
        if file_name in files:
            subfolders.clear()
            yield Path(parent)
            continue
        too_deep = len(Path(parent).parts) - root_depth >= _MAX_DEPTH
        subfolders[:] = [] if too_deep else sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        hint = f"If it is damaged, repeat the evaluation in a new folder: {_EVALUATE_COMMAND}"
        raise InputError(f"{path} cannot be read ({error}).", hint=hint) from error


def remove_duplicates(folders: Sequence[ResultFolder]) -> list[ResultFolder]:
    """Return each folder once; folders are compared by their resolved paths."""
    return list({folder.path.resolve(): folder for folder in folders}.values())
