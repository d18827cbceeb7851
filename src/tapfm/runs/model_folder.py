"""What is evaluated: a run, an export, or several of them as an ensemble; looked at before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfm.cohort.splits import TRAIN, VALIDATION
from tapfm.config.loading import load_config
from tapfm.config.settings import RunConfig
from tapfm.encoders.timm_folder import WEIGHTS
from tapfm.errors import RunError
from tapfm.runs.ensemble import EnsembleKind, is_export, member_folders, refuse_other_targets
from tapfm.runs.folder import RunFolder
from tapfm.runs.saved_model import AGGREGATOR, DESCRIPTION
from tapfm.runtime.files import fingerprint, sha256_of
from tapfm.runtime.messages import command
from tapfm.tasks.catalog import target_kinds
from tapfm.tasks.target import TargetKinds
from tapfm.version import __version__


@dataclass(frozen=True)
class ModelMember:
    """A run, or an export, which has no configuration."""

    folder: Path
    targets: TargetKinds
    encoder: str
    adapted: bool  # or the encoder is as it was published, and only the aggregator has learnt
    identity: str  # of the run
    digest: str  # of the weights
    config: RunConfig | None = None

    def slides(self) -> list[dict[str, str]]:
        """Read the slides of the run; an export does not name them."""
        return [] if self.config is None else RunFolder(self.folder).slides()


@dataclass(frozen=True)
class ModelFolder:
    """One member, or those of an ensemble."""

    path: Path
    kind: str  # run, export, or ensemble of folds or seeds
    members: tuple[ModelMember, ...]
    ensemble: EnsembleKind | None = None

    @property
    def targets(self) -> TargetKinds:
        """What it predicts."""
        return self.members[0].targets

    @property
    def config(self) -> RunConfig | None:
        """The configuration of the first run; None where all are exports."""
        return next((member.config for member in self.members if member.config is not None), None)

    @property
    def adapted(self) -> bool:
        """Say whether any member has an encoder of its own, for which stored features are none."""
        return any(member.adapted for member in self.members)

    def described(self) -> dict[str, Any]:
        """Say which model it is, for what is written beside its predictions; the same model gives the same text."""
        return {
            "tapfm": __version__,
            "model": str(self.path),
            "kind": self.kind,
            "members": [{"run": each.identity, "weights_sha256": each.digest} for each in self.members],
            "targets": list(self.targets),
        }

    def learnt_from(self) -> dict[str, str]:
        """Name the patients that any member learnt from, or was chosen by, and their split."""
        patients: dict[str, str] = {}
        for member in self.members:
            for row in member.slides():
                if row["split"] == TRAIN or (row["split"] == VALIDATION and row["patient_id"] not in patients):
                    patients[row["patient_id"]] = row["split"]
        return patients


def open_model_folder(path: Path) -> ModelFolder:
    """Say what a folder holds; what cannot be evaluated is refused."""
    folders, ensemble = member_folders(path)
    members = [_look_at_export(folder) if is_export(folder) else _look_at_run(folder) for folder in folders]
    refuse_other_targets(path, folders, [tuple(member.targets) for member in members])
    kind = f"ensemble of {ensemble}" if ensemble else "export" if is_export(path) else "run"
    return ModelFolder(path, kind, tuple(members), ensemble)


def _look_at_run(folder: Path) -> ModelMember:
    """Look at a run, which must have a best epoch."""
    run_folder, config = RunFolder(folder), load_config(folder / "config.toml")
    if not run_folder.best.exists():
        raise RunError(
            f"{folder} has not finished an epoch yet.",
            hint=f"Go on with it: {command('train', folder / 'config.toml', '--out', folder, '--resume')}",
        )
    if not (folder / "split.csv").exists():
        raise RunError(f"{folder} has no split.csv.", hint="Copy the whole folder of the run again.")
    return ModelMember(
        folder,
        target_kinds(config.task.targets),
        config.encoder.name,
        config.adaptation.method != "fixed",
        run_folder.identity(),
        sha256_of(run_folder.best),
        config,
    )


def is_finished(member: ModelMember) -> bool:
    """Say whether training is over; exports do not say."""
    run_folder = RunFolder(member.folder)
    return member.config is None or not run_folder.last.exists() or run_folder.finished()


def _look_at_export(folder: Path) -> ModelMember:
    """Look at an exported folder."""
    description = description_of(folder)
    try:
        targets, encoder = target_kinds(description["targets"]), description["encoder"]
        files = [AGGREGATOR, WEIGHTS] if encoder["adapted"] else [AGGREGATOR]
        digest = fingerprint([sha256_of(folder / name) for name in files])
        return ModelMember(folder, targets, encoder["name"], encoder["adapted"], str(description.get("run")), digest)
    except (OSError, LookupError, TypeError) as error:
        raise RunError(
            f"{folder} is no exported model ({error}).", hint="Make one: tapfm export runs/NAME --out DIR"
        ) from error


def description_of(folder: Path) -> dict[str, Any]:
    """Read tapfm.json."""
    try:
        return dict(json.loads((folder / DESCRIPTION).read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{folder / DESCRIPTION} cannot be read ({error}).", hint="Make it again: tapfm export runs/NAME --out DIR"
        ) from error
