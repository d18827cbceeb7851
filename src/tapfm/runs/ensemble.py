"""Ensembles: ensemble.json lists runs or exports whose probabilities are averaged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tapfm.errors import RunError
from tapfm.runtime.csv_files import read_csv
from tapfm.runtime.files import write_atomically

_ENSEMBLE_FILE = "ensemble.json"
EXPORT_METADATA_FILE = "tapfm.json"  # a folder with this file is an export; a folder with config.toml is a run
EnsembleKind = Literal["folds", "seeds"]
_FORMAT_HINT = (
    'ensemble.json must be {"kind": "folds" or "seeds", "members": [folders of runs or exports]}. '
    "The folders are relative to the folder of ensemble.json."
)


@dataclass(frozen=True)
class _Ensemble:
    """Contents of ensemble.json: the folders of the members, and how the members differ."""

    members: tuple[Path, ...]
    kind: EnsembleKind  # with folds, test slides of one member are training slides of other members


def write_ensemble(folder: Path, members: Sequence[Path], kind: EnsembleKind) -> None:
    """Write ensemble.json with relative paths of the members, so that the folders can be moved together."""
    if not members:
        raise RunError(f"The ensemble {folder} has no members.", hint=_FORMAT_HINT)
    names = [Path(os.path.relpath(member.absolute(), folder.absolute())).as_posix() for member in members]
    text = json.dumps({"kind": kind, "members": names}, indent=2)
    write_atomically(folder / _ENSEMBLE_FILE, f"{text}\n".encode())


def _read_ensemble(folder: Path) -> _Ensemble:
    """Read ensemble.json and check that its members exist."""
    path = folder / _ENSEMBLE_FILE
    try:
        content = json.loads(path.read_text("utf-8"))
        kind, names = content["kind"], content["members"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}).", hint=_FORMAT_HINT) from error
    if kind not in get_args(EnsembleKind):
        raise RunError(f"{path} has an invalid kind: {kind!r}.", hint=_FORMAT_HINT)
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise RunError(f"{path} has invalid members: they must be a list of folder names.", hint=_FORMAT_HINT)
    if not names:
        raise RunError(f"{path} lists no members.", hint=_FORMAT_HINT)
    members = tuple(folder / name for name in names)
    if missing := [str(member) for member in members if not is_run(member) and not is_export(member)]:
        raise RunError(
            f"{path} lists folders that are neither runs nor exports:\n  " + "\n  ".join(missing),
            hint="Paths are relative to the folder of ensemble.json. Move the members together with ensemble.json.",
        )
    return _Ensemble(members, kind)


def find_member_folders(path: Path) -> tuple[tuple[Path, ...], EnsembleKind | None]:
    """Return the folders of the members of an ensemble, and its kind.

    For a run or an export, return its own folder as the only member, and None as the kind.
    """
    if (path / _ENSEMBLE_FILE).is_file():
        ensemble = _read_ensemble(path)
        return ensemble.members, ensemble.kind
    if is_run(path) or is_export(path):
        return (path,), None
    if not path.exists():
        problem = f"The folder {path} does not exist."
    else:
        files = f"config.toml, {EXPORT_METADATA_FILE} or {_ENSEMBLE_FILE}"
        problem = f"{path} is not a run, export or ensemble: it has no {files}."
    raise RunError(problem, hint="Pass the --out folder of a tapfm train or tapfm export command.")


def is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def is_finished_run(path: Path, allowed_failures: int = 0) -> bool:
    """Return whether a folder is that of a finished run, with at most `allowed_failures` failed slides."""
    # summary.md is written last, so that large files need not be checked
    if not all((path / name).is_file() for name in ("summary.md", "history.jsonl")):
        return False
    try:
        failed = sum(row["problem"] == "failed" for row in read_csv(path / "failures.csv"))
    except (OSError, ValueError, KeyError):
        return False
    return failed <= allowed_failures


def is_export(path: Path) -> bool:
    return (path / EXPORT_METADATA_FILE).is_file()


def check_members_have_same_targets(path: Path, members: Sequence[Path], targets: Sequence[tuple[str, ...]]) -> None:
    """Raise RunError if the members of an ensemble do not predict the same targets."""
    if len(set(targets)) > 1:
        lines = [f"{member}: {', '.join(names)}" for member, names in zip(members, targets, strict=True)]
        raise RunError(
            f"The members of {path} predict different targets:\n  " + "\n  ".join(lines),
            hint="Build ensembles from runs with the same task.targets.",
        )
