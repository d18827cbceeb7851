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
from tapfm.runs.ensemble import (
    EXPORT_METADATA_FILE,
    EnsembleKind,
    check_members_have_same_targets,
    find_member_folders,
    is_export,
)
from tapfm.runs.folder import RunFolder
from tapfm.runs.saved_model import AGGREGATOR_FILE
from tapfm.runtime.files import file_sha256, fingerprint
from tapfm.tasks.catalog import class_texts, target_kinds
from tapfm.tasks.target import TargetKinds
from tapfm.version import __version__


@dataclass(frozen=True)
class ModelMember:
    """A run or an export, without its weights: a model on its own, or a member of an ensemble."""

    folder: Path
    targets: TargetKinds
    encoder: str  # name in the encoder catalogue
    adapted: bool  # False: only the aggregator was trained, on features of a fixed encoder
    run_id: str  # of the run, or of the run that was exported
    weights_digest: str  # of the best checkpoint, or of the weight files of an export
    config: RunConfig | None = None  # None: an export

    def read_split_rows(self) -> list[dict[str, str]]:
        """Return the rows of split.csv; empty for an export."""
        return [] if self.config is None else RunFolder(self.folder).read_split_rows()


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a run or export (one member), or of an ensemble (several)."""

    path: Path
    kind: str  # for messages: run, export, ensemble of folds, or ensemble of seeds
    members: tuple[ModelMember, ...]
    ensemble: EnsembleKind | None = None  # None: not an ensemble

    @property
    def targets(self) -> TargetKinds:
        return self.members[0].targets

    @property
    def config(self) -> RunConfig | None:
        """The configuration of the first member that is a run; None if all members are exports."""
        return next((member.config for member in self.members if member.config is not None), None)

    @property
    def adapted(self) -> bool:
        """Whether any member has an adapted encoder, so that stored features cannot be used."""
        return any(member.adapted for member in self.members)

    def build_identifying_metadata(self) -> dict[str, Any]:
        """Return what identifies the model, to be saved with predictions and metrics."""
        return {
            "tapfm": __version__,
            "model": str(self.path),
            "kind": self.kind,
            "members": [{"run": each.run_id, "weights_sha256": each.weights_digest} for each in self.members],
            "targets": list(self.targets),
            "labels": class_texts(self.targets),
        }

    def find_seen_slides(self) -> dict[str, str]:
        """Return the split of each slide that is in the training or validation split of any member."""
        rows = [row for member in self.members for row in member.read_split_rows()]
        return {row["slide_id"]: row["split"] for row in rows if row["split"] in (TRAIN, VALIDATION)}

    def find_seen_patients(self) -> dict[str, str]:
        """Return the split of each patient who is in the training or validation split of any member."""
        patients: dict[str, str] = {}
        for member in self.members:
            for row in member.read_split_rows():
                if row["split"] == TRAIN or (row["split"] == VALIDATION and row["patient_id"] not in patients):
                    patients[row["patient_id"]] = row["split"]
        return patients


def open_model_folder(path: Path) -> ModelFolder:
    """Open the folder of a run, export or ensemble. Raises RunError if it cannot be used for inference."""
    folders, ensemble = find_member_folders(path)
    members = [
        _read_export_as_member(folder) if is_export(folder) else _read_run_as_member(folder) for folder in folders
    ]
    check_members_have_same_targets(path, folders, [tuple(member.targets) for member in members])
    kind = f"ensemble of {ensemble}" if ensemble else "export" if is_export(path) else "run"
    return ModelFolder(path, kind, tuple(members), ensemble)


def _read_run_as_member(folder: Path) -> ModelMember:
    """Read a run. Raises RunError if it has not finished an epoch or has no split.csv."""
    run_folder, config = RunFolder(folder), load_config(folder / "config.toml")
    run_folder.check_best_checkpoint_exists()
    if not (folder / "split.csv").exists():
        raise RunError(f"{folder} has no split.csv.", hint="Copy the whole run folder again.")
    return ModelMember(
        folder,
        target_kinds(config.task.targets, config.class_texts),
        config.encoder.name,
        config.adaptation.method != "fixed",
        run_folder.compute_run_id(),
        file_sha256(run_folder.best_checkpoint),
        config,
    )


def is_finished(member: ModelMember) -> bool:
    """Return whether training has finished. Exports, and runs without a last checkpoint, count as finished."""
    run_folder = RunFolder(member.folder)
    return member.config is None or not run_folder.last_checkpoint.exists() or run_folder.is_training_finished()


def _read_export_as_member(folder: Path) -> ModelMember:
    metadata = read_export_metadata(folder)
    try:
        targets, encoder = target_kinds(metadata["targets"], metadata.get("labels")), metadata["encoder"]
        files = [AGGREGATOR_FILE, WEIGHTS_FILE] if encoder["adapted"] else [AGGREGATOR_FILE]
        digest = fingerprint([file_sha256(folder / name) for name in files])
        return ModelMember(folder, targets, encoder["name"], encoder["adapted"], str(metadata.get("run")), digest)
    except (OSError, LookupError, TypeError) as error:
        raise RunError(
            f"{folder} is not an exported model ({error}).", hint="Create one: tapfm export runs/NAME --out DIR"
        ) from error


def read_export_metadata(folder: Path) -> dict[str, Any]:
    """Read the tapfm.json of an export."""
    try:
        return dict(json.loads((folder / EXPORT_METADATA_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{folder / EXPORT_METADATA_FILE} cannot be read ({error}).",
            hint="Export the run again: tapfm export runs/NAME --out DIR",
        ) from error
