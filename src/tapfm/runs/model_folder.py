"""Open the folder of a run, an export or an ensemble and read its metadata, without loading weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfm.cohort.splits import TRAIN, VALIDATION
from tapfm.config.loading import load_config
from tapfm.config.settings import RunConfig
from tapfm.encoders.timm_folder import WEIGHTS_FILE
from tapfm.errors import RunError
from tapfm.runs.ensemble import EnsembleKind, check_same_targets, find_member_folders, is_export
from tapfm.runs.folder import RunFolder
from tapfm.runs.saved_model import AGGREGATOR_FILE, DESCRIPTION_FILE
from tapfm.runtime.files import file_sha256, fingerprint
from tapfm.runtime.messages import format_command
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import TargetKinds
from tapfm.version import __version__


@dataclass(frozen=True)
class ModelMember:
    """A run or an export; an export has no configuration."""

    folder: Path
    targets: TargetKinds
    encoder: str
    adapted: bool  # False: only the aggregator was trained, on features of the published encoder
    identity: str  # of the run
    digest: str  # of the weights
    config: RunConfig | None = None

    def slides(self) -> list[dict[str, str]]:
        """Return the rows of split.csv; empty for an export."""
        return [] if self.config is None else RunFolder(self.folder).slides()


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a run or export (one member), or of an ensemble (several)."""

    path: Path
    kind: str  # run, export, or ensemble of folds or seeds
    members: tuple[ModelMember, ...]
    ensemble: EnsembleKind | None = None

    @property
    def targets(self) -> TargetKinds:
        return self.members[0].targets

    @property
    def config(self) -> RunConfig | None:
        """The configuration of the first run; None if all members are exports."""
        return next((member.config for member in self.members if member.config is not None), None)

    @property
    def adapted(self) -> bool:
        """Whether any member has an adapted encoder, so that stored features cannot be used."""
        return any(member.adapted for member in self.members)

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model, for the metadata of its predictions."""
        return {
            "tapfm": __version__,
            "model": str(self.path),
            "kind": self.kind,
            "members": [{"run": each.identity, "weights_sha256": each.digest} for each in self.members],
            "targets": list(self.targets),
        }

    def seen_patients(self) -> dict[str, str]:
        """Return the patients used for training or validation of any member, with their split."""
        patients: dict[str, str] = {}
        for member in self.members:
            for row in member.slides():
                if row["split"] == TRAIN or (row["split"] == VALIDATION and row["patient_id"] not in patients):
                    patients[row["patient_id"]] = row["split"]
        return patients


def open_model_folder(path: Path) -> ModelFolder:
    """Open the folder of a run, export or ensemble. Raises RunError if it cannot be used for inference."""
    folders, ensemble = find_member_folders(path)
    members = [_read_export_member(folder) if is_export(folder) else _read_run_member(folder) for folder in folders]
    check_same_targets(path, folders, [tuple(member.targets) for member in members])
    kind = f"ensemble of {ensemble}" if ensemble else "export" if is_export(path) else "run"
    return ModelFolder(path, kind, tuple(members), ensemble)


def _read_run_member(folder: Path) -> ModelMember:
    """Read a run, which must have finished an epoch."""
    run_folder, config = RunFolder(folder), load_config(folder / "config.toml")
    if not run_folder.best.exists():
        raise RunError(
            f"{folder} has not finished an epoch yet.",
            hint=f"Resume the run: {format_command('train', folder / 'config.toml', '--out', folder, '--resume')}",
        )
    if not (folder / "split.csv").exists():
        raise RunError(f"{folder} has no split.csv.", hint="Copy the whole run folder again.")
    return ModelMember(
        folder,
        target_kinds(config.task.targets),
        config.encoder.name,
        config.adaptation.method != "fixed",
        run_folder.identity(),
        file_sha256(run_folder.best),
        config,
    )


def is_finished(member: ModelMember) -> bool:
    """Return whether training has finished; always True for an export."""
    run_folder = RunFolder(member.folder)
    return member.config is None or not run_folder.last.exists() or run_folder.finished()


def _read_export_member(folder: Path) -> ModelMember:
    description = read_export_description(folder)
    try:
        targets, encoder = target_kinds(description["targets"]), description["encoder"]
        files = [AGGREGATOR_FILE, WEIGHTS_FILE] if encoder["adapted"] else [AGGREGATOR_FILE]
        digest = fingerprint([file_sha256(folder / name) for name in files])
        return ModelMember(folder, targets, encoder["name"], encoder["adapted"], str(description.get("run")), digest)
    except (OSError, LookupError, TypeError) as error:
        raise RunError(
            f"{folder} is not an exported model ({error}).", hint="Create one: tapfm export runs/NAME --out DIR"
        ) from error


def read_export_description(folder: Path) -> dict[str, Any]:
    """Read the tapfm.json of an export."""
    try:
        return dict(json.loads((folder / DESCRIPTION_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{folder / DESCRIPTION_FILE} cannot be read ({error}).",
            hint="Export the run again: tapfm export runs/NAME --out DIR",
        ) from error
