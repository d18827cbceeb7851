"""Ensembles: a folder with ensemble.json that names runs, or exports, whose probabilities are averaged."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tapfm.errors import RunError
from tapfm.runtime.files import write_atomically

if TYPE_CHECKING:
    import torch

    from tapfm.runs.saved_model import SavedModel

_ENSEMBLE = "ensemble.json"
_EXPORTED = "tapfm.json"  # marks an export, as config.toml marks a run
EnsembleKind = Literal["folds", "seeds"]
_HINT = 'It holds {"kind": "folds" or "seeds", "members": [folders of runs or exports, relative to it]}.'


@dataclass(frozen=True)
class _Ensemble:
    """Folders of the members, and how they differ."""

    members: tuple[Path, ...]
    kind: EnsembleKind  # folds: each member was tested on what others learnt from


def write_ensemble(folder: Path, members: Sequence[Path], kind: EnsembleKind) -> None:
    """Write ensemble.json; members are named relative to it, so that all of it can be moved together."""
    if not members:
        raise RunError(f"{folder} would be an ensemble of nothing.", hint=_HINT)
    names = [Path(os.path.relpath(member.absolute(), folder.absolute())).as_posix() for member in members]
    text = json.dumps({"kind": kind, "members": names}, indent=2)
    write_atomically(folder / _ENSEMBLE, f"{text}\n".encode())


def _ensemble_of(folder: Path) -> _Ensemble:
    """Read ensemble.json, and look whether its members are there."""
    path = folder / _ENSEMBLE
    try:
        written = json.loads(path.read_text("utf-8"))
        kind, names = written["kind"], written["members"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error}).", hint=_HINT) from error
    if (
        kind not in get_args(EnsembleKind)
        or not isinstance(names, list)
        or not all(isinstance(each, str) for each in names)
    ):
        raise RunError(f"{path} is no ensemble: its kind is {kind!r}.", hint=_HINT)
    if not names:
        raise RunError(f"{path} names no members.", hint=_HINT)
    members = tuple(folder / name for name in names)
    if missing := [str(member) for member in members if not is_run(member) and not is_export(member)]:
        raise RunError(
            f"{path} names folders that are neither runs nor exports:\n  " + "\n  ".join(missing),
            hint="Paths in it start at its own folder: move the members along with it.",
        )
    return _Ensemble(members, kind)


def member_folders(path: Path) -> tuple[tuple[Path, ...], EnsembleKind | None]:
    """List the members of an ensemble and its kind; a run, or an export, is one by itself."""
    if (path / _ENSEMBLE).is_file():
        ensemble = _ensemble_of(path)
        return ensemble.members, ensemble.kind
    if is_run(path) or is_export(path):
        return (path,), None
    missing = (
        "there is no such folder" if not path.exists() else f"no config.toml, no {_EXPORTED}, no {_ENSEMBLE} in it"
    )
    raise RunError(
        f"{path} is no run, no export and no ensemble: {missing}.",
        hint="Runs are what tapfm train writes to --out, exports what tapfm export does.",
    )


def is_run(path: Path) -> bool:
    """Say whether a folder holds a run."""
    return (path / "config.toml").is_file()


def is_export(path: Path) -> bool:
    """Say whether a folder holds an exported model."""
    return (path / _EXPORTED).is_file()


def load_member(folder: Path, device: torch.device | None = None) -> SavedModel:
    """Load the model of a run, or of an export."""
    from tapfm.runs.saved_model import load_export, load_run

    return (load_export if is_export(folder) else load_run)(folder, device)


def refuse_other_targets(path: Path, members: Sequence[Path], targets: Sequence[tuple[str, ...]]) -> None:
    """Refuse members that do not predict the same."""
    if len(set(targets)) > 1:
        lines = [f"{member}: {', '.join(of_member)}" for member, of_member in zip(members, targets, strict=True)]
        raise RunError(
            f"The members of {path} predict different targets:\n  " + "\n  ".join(lines),
            hint="Make ensembles of runs with the same task.targets.",
        )
