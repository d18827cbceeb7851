"""Evaluations and predictions that belong to a run: those that were named, and those that lie where one looks first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfm.errors import InputError
from tapfm.prediction.folder import PREDICTION_JSON as PREDICTED
from tapfm.prediction.folder import PredictionFolder
from tapfm.runs.ensemble import is_run
from tapfm.runtime.messages import format_command
from tapfm.slides.opening import PER_SLIDE

_EVALUATED = "evaluation.json"
STUDY = "study.toml"
_DEEPEST = 8  # folders below `evaluations`: a study has six
_NOT_LOOKED_INTO = (PER_SLIDE, "checkpoints", "tensorboard")


@dataclass(frozen=True)
class ResultFolder:
    """A folder with what its JSON file says."""

    path: Path
    about: dict[str, Any]

    def digests(self) -> set[str]:
        """Name the weights that made it."""
        members = self.about.get("members") or []
        return {str(each["weights_sha256"]) for each in members if isinstance(each, dict) and "weights_sha256" in each}

    def made_by(self, digest: str | None) -> bool:
        """Say whether these weights made it, alone: what an ensemble says is not what one of its members says."""
        return self.digests() == {digest}

    @property
    def model(self) -> str:
        """Name the model, as people gave it."""
        return str(self.about.get("model", "not named"))

    @property
    def maker(self) -> str:
        """Say which model made it, where that is no run of the page."""
        members = len(self.digests())
        return (f"an ensemble of {members} models" if members > 1 else "another model") + f" ({self.model})"


def refuse_what_is_no_source(path: Path) -> None:
    """Refuse what is neither a run nor a study, and say what to do with what it is."""
    if is_run(path) or (path / STUDY).is_file():
        return
    if not path.exists():
        raise InputError(f"There is no {path}.", hint="Give the folder of a run (runs/NAME) or of a study.")
    if (path / _EVALUATED).is_file():
        hint = "It is an evaluation. Give its run: " + _asked("--evaluation", path)
    elif (path / PREDICTED).is_file():
        hint = "It holds predictions. Give their run: " + _asked("--predictions", path)
    else:
        hint = "Give a folder that `tapfm train` or `tapfm study` wrote, such as runs/NAME."
    raise InputError(f"{path} is neither a run nor a study.", hint=hint)


def _asked(option: str, path: Path) -> str:
    """Write the command that takes a folder along."""
    return format_command("report", "runs/NAME", option, path, "--out", "report.html")


def named_evaluation(path: Path) -> ResultFolder:
    """Read an evaluation that was asked for; it has to be finished."""
    make = format_command("evaluate", "runs/NAME", "--out", path)
    if not (path / _EVALUATED).is_file():
        raise InputError(f"{path} is no folder of an evaluation.", hint=f"Make one: {make}")
    if not (path / "metrics.json").is_file():
        raise InputError(f"The evaluation {path} is not finished.", hint=f"Go on with it: {make} --resume")
    return ResultFolder(path, _read_json(path / _EVALUATED))


def named_predictions(path: Path) -> ResultFolder:
    """Read a folder of predictions that was asked for."""
    return ResultFolder(path, PredictionFolder(path).read_metadata())


def evaluations_of(run: Path, digest: str | None) -> list[ResultFolder]:
    """Find finished evaluations of these weights: inside the run, and in `evaluations` beside `runs`."""
    return [
        found
        for found in _beside(run, "evaluations", _EVALUATED)
        if found.made_by(digest) and found.about.get("kind") == "run" and (found.path / "metrics.json").is_file()
    ]


def predictions_of(run: Path, digest: str | None) -> list[ResultFolder]:
    """Find predictions by these weights: inside the run, and in `predictions` beside `runs`."""
    return [found for found in _beside(run, "predictions", PREDICTED) if found.made_by(digest)]


def _beside(run: Path, name: str, mark: str) -> list[ResultFolder]:
    """Look for marked folders inside a run, beside the folder `runs` it lies in, and in the one of this name there."""
    place = run.resolve()
    paths = list(_marked(place, mark))
    if (runs := next((parent for parent in place.parents if parent.name == "runs"), None)) is not None:
        paths += sorted(path.parent for path in runs.parent.glob(f"*/{mark}"))
        paths += _marked(runs.parent / name, mark)
    found = []
    for path in dict.fromkeys(paths):
        try:
            found.append(ResultFolder(path, _read_json(path / mark)))
        except InputError:
            continue  # not asked for: a damaged one is as if it were not there
    return found


def _marked(folder: Path, mark: str) -> Iterator[Path]:
    """Walk through folders down to those that hold a file of this name, in order."""
    depth = len(folder.parts)
    for parent, folders, files in os.walk(folder):
        if mark in files:
            folders.clear()
            yield Path(parent)
            continue
        deep = len(Path(parent).parts) - depth >= _DEEPEST
        folders[:] = [] if deep else sorted(each for each in folders if each not in _NOT_LOOKED_INTO)


def _read_json(path: Path) -> dict[str, Any]:
    """Read a file of ours."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}).", hint="Make it again.") from error


def once(found: Sequence[ResultFolder]) -> list[ResultFolder]:
    """Leave out what was found twice."""
    return list({each.path.resolve(): each for each in found}.values())
