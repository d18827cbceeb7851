"""The run folder and its files.

config.toml           all settings, including defaults
environment.json      versions, machine, weights
split.csv             slides, splits and labels
history.jsonl         one line per epoch
checkpoints/          last.safetensors (complete state for resuming), best.safetensors (weights of the best epoch)
predictions-val.csv, predictions-test.csv   of the best epoch, on all tiles
failures.csv          failed slides and skipped tiles
curves.png, summary.md, tensorboard/
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tapfm.config.changes import describe_changed_settings
from tapfm.config.loading import PATH_SETTINGS
from tapfm.config.settings import RunConfig
from tapfm.config.text import format_config
from tapfm.errors import CheckpointError, RunError
from tapfm.runs.checkpoint import (
    check_disk_space,
    load_checkpoint,
    read_checkpoint_metadata,
    save_checkpoint,
    total_bytes,
)
from tapfm.runs.data import RunData, describe_changed_slides
from tapfm.runs.run_progress import RunProgress
from tapfm.runtime.csv_files import csv_text, read_csv, write_csv
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.runtime.messages import format_command
from tapfm.tiles.reading import SkippedTiles
from tapfm.version import __version__

FAILURE_COLUMNS = ("slide_id", "problem", "tiles_skipped", "reason")  # of failures.csv
_MAX_LISTED = 10  # differences listed in an error


class RestorableLearner(Protocol):
    """A model with its optimisers, whose state can be saved in checkpoints and restored."""

    @property
    def adamw_moment_format(self) -> str:
        """Storage format of the encoder's AdamW moments: float32, bfloat16 or int8."""

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that training changes."""

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on: weights, state of the optimisers, random states."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors that `state` returned."""

    def restore_weights(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors that `weights` returned."""


class RunFolder:
    """Reads and writes the files of a run."""

    def __init__(self, folder: Path, resume_command: str | None = None) -> None:
        self.folder = folder
        # shown in messages; by default the command that resumes only this run, with the configuration in its folder
        self.resume_command = resume_command or format_command(
            "train", folder / "config.toml", "--out", folder, "--resume"
        )
        self.last_checkpoint = folder / "checkpoints" / "last.safetensors"
        self.best_checkpoint = folder / "checkpoints" / "best.safetensors"
        # weights of a new best epoch; renamed to best.safetensors once last.safetensors of that epoch is saved
        self.pending_best_checkpoint = folder / "checkpoints" / "best.next.safetensors"

    @property
    def has_run(self) -> bool:
        """Whether the folder contains a run."""
        return (self.folder / "config.toml").exists()

    def create(self, config: RunConfig, data: RunData, environment: Mapping[str, Any]) -> None:
        """Write environment.json, split.csv and config.toml of a new run; config.toml last, because it marks a run."""
        (self.folder / "environment.json").unlink(missing_ok=True)  # of an attempt that failed to start
        self.add_environment(environment)
        write_csv(self.folder / "split.csv", data.split_csv_columns, data.format_split_csv_rows())
        write_atomically(self.folder / "config.toml", format_config(config).encode())

    def add_environment(self, environment: Mapping[str, Any]) -> None:
        """Append an environment to environment.json; a resumed run has several."""
        text = json.dumps([*self.read_environments(), environment], indent=2)
        write_atomically(self.folder / "environment.json", text.encode())

    def read_environments(self) -> list[dict[str, Any]]:
        """Return the environments in which the run was started and resumed, in this order."""
        path = self.folder / "environment.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else []

    def compute_run_id(self) -> str:
        """Return an id of the run, computed from its split and its settings without paths, so that files can move."""
        settings = self.read_settings()
        for section, key in PATH_SETTINGS:
            settings.get(section, {}).pop(key, None)
        return fingerprint(settings, (self.folder / "split.csv").read_text("utf-8"))[:16]

    def read_settings(self) -> dict[str, Any]:
        """Return the contents of config.toml, without checking them."""
        return tomllib.loads((self.folder / "config.toml").read_text("utf-8"))

    def read_split_rows(self) -> list[dict[str, str]]:
        """Return the rows of split.csv, one per slide."""
        return read_csv(self.folder / "split.csv")

    def check_settings_and_slides_unchanged(self, config: RunConfig, data: RunData) -> None:
        """Raise RunError if the configuration or the slides differ from those the run was started with."""
        before, now = self.read_settings(), config.as_tables()
        changed_settings = describe_changed_settings(before, now)
        if lines := changed_settings + describe_changed_slides(self.read_split_rows(), data):
            # another path, such as another cohort table, is no changed setting, but it can contain other slides
            other_path = any(before.get(s, {}).get(key) != now.get(s, {}).get(key) for s, key in PATH_SETTINGS)
            shown = lines[:_MAX_LISTED] + (
                [f"... and {len(lines) - _MAX_LISTED:,} more"] if len(lines) > _MAX_LISTED else []
            )
            raise RunError(
                f"{self.folder} was started with different settings or data:\n  " + "\n  ".join(shown),
                hint=(
                    f"Resume with the original settings: {self.resume_command}\n"
                    if changed_settings or other_path
                    else "Restore the original slides, labels and tiles. "
                )
                + "Or start a new run with another --out.",
            )

    def check_same_encoder_weights(self, sha256: str | None) -> None:
        """Raise RunError if `sha256` is not that of the encoder weights that the run was started with."""
        expected = self.read_environments()[0]["weights_sha256"] if self.read_environments() else sha256
        if sha256 != expected:
            raise RunError(
                f"{self.folder} was started with different encoder weights: SHA-256 {expected}, but the weights found "
                f"have {sha256}.",
                hint="Use the original weights (setting encoder.weights), or start a new run with another --out.",
            )

    def load_progress(self, learner: RestorableLearner) -> RunProgress | None:
        """Load the last checkpoint into the learner and return the saved progress, or None without a checkpoint."""
        if not self.last_checkpoint.exists():
            return None
        tensors, metadata = load_checkpoint(self.last_checkpoint)
        if metadata.get("run") != self.compute_run_id():
            raise RunError(
                f"{self.last_checkpoint} does not belong to the config.toml and split.csv in {self.folder}.",
                hint="Restore the original files of the run, or start a new run with another --out.",
            )
        learner.restore(tensors)
        progress = RunProgress.from_json(metadata["progress"])
        self._keep_or_delete_pending_best(progress)
        return progress

    def read_adamw_moment_format(self) -> str:
        """Return the storage format of the AdamW moments in the last checkpoint."""
        return str(read_checkpoint_metadata(self.last_checkpoint).get("moments", "float32"))

    def load_best(self, learner: RestorableLearner) -> dict[str, Any]:
        """Load the weights of the best epoch into the learner; return the metadata of the checkpoint."""
        tensors, metadata = load_checkpoint(self.best_checkpoint)
        learner.restore_weights(tensors)
        return metadata

    def check_disk_space(self, learner: RestorableLearner) -> None:
        """Raise DiskFullError if there is no space for the last and the best checkpoint.

        Each needs twice its size, because the old file is deleted only after the new one is written.
        """
        weights = total_bytes(learner.weights())
        moments = 2 * weights  # AdamW has two moments per weight
        existing = sum(path.stat().st_size for path in (self.last_checkpoint, self.best_checkpoint) if path.exists())
        check_disk_space(
            self.folder, max(0, 2 * (weights + moments) + 2 * weights - existing), "the checkpoints of this run"
        )

    def save_last(self, learner: RestorableLearner, progress: RunProgress) -> None:
        """Save the complete state for resuming, and write history.jsonl and failures.csv."""
        metadata = {
            "tapfm": __version__,
            "kind": "last",
            "run": self.compute_run_id(),
            "moments": learner.adamw_moment_format,
            "config": self.read_settings(),
            "progress": progress.as_json(),
        }
        save_checkpoint(self.last_checkpoint, learner.state(), metadata)
        self._keep_or_delete_pending_best(progress)
        self.write_history_and_failures(progress)

    def write_history_and_failures(self, progress: RunProgress) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in progress.history)
        write_atomically(self.folder / "history.jsonl", lines.encode())
        write_atomically(self.folder / "failures.csv", format_failures(progress.failed, progress.skipped))

    def save_best(self, learner: RestorableLearner, progress: RunProgress) -> None:
        """Save the weights of a new best epoch to best.next.safetensors; `save_last` renames it to best.safetensors."""
        metadata = {
            "tapfm": __version__,
            "kind": "best",
            "epoch": (progress.best_epoch or 0) + 1,
            "score": progress.best_score,
            "row": progress.history[-1],
        }
        save_checkpoint(self.pending_best_checkpoint, learner.weights(), metadata)

    def _keep_or_delete_pending_best(self, progress: RunProgress) -> None:
        """Rename best.next.safetensors to best.safetensors, or delete it if its epoch will be repeated.

        `save_best` is called before `save_last`. If the run is stopped between the two calls, the resumed run repeats
        the epoch of best.next.safetensors. On a GPU, the repeated epoch may have a lower score.

        progress: from the last checkpoint.
        """
        if self.pending_best_checkpoint.exists():
            best_epoch = None if progress.best_epoch is None else progress.best_epoch + 1
            if read_checkpoint_metadata(self.pending_best_checkpoint)["epoch"] == best_epoch:
                self.pending_best_checkpoint.replace(self.best_checkpoint)
            else:
                self.pending_best_checkpoint.unlink()

    def is_training_finished(self) -> bool:
        """Return whether training has finished, according to the last checkpoint."""
        return bool(self._read_saved_progress()["finished"])

    def check_best_checkpoint_exists(self) -> None:
        """Raise RunError if there is no best checkpoint, because no epoch is finished or because it was deleted."""
        if self.best_checkpoint.exists():
            return
        history = self.folder / "history.jsonl"
        if history.exists() and history.stat().st_size:
            raise RunError(
                f"{self.folder} is incomplete: {self.best_checkpoint.relative_to(self.folder)} is missing.",
                hint="Copy the whole run folder again, or start a new run.",
            )
        raise RunError(
            f"{self.folder} has not finished an epoch yet.",
            hint=f"Resume the run: {self.resume_command}",
        )

    def count_epochs(self) -> int:
        """Return the number of finished epochs, according to the last checkpoint."""
        return len(self._read_saved_progress()["history"])

    def _read_saved_progress(self) -> dict[str, Any]:
        try:
            progress = read_checkpoint_metadata(self.last_checkpoint)["progress"]
            return {name: progress[name] for name in ("finished", "history")}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.last_checkpoint} has no training progress.", hint="Start a new run with another --out."
            ) from error


def format_failures(failed: Mapping[str, str], skipped: Mapping[str, SkippedTiles]) -> bytes:
    """Return the contents of failures.csv: failed slides, and slides with skipped tiles."""
    rows: list[list[object]] = [[slide_id, "failed", None, reason] for slide_id, reason in failed.items()]
    rows += [
        [slide_id, "tiles skipped", len(each.tiles), each.reason]
        for slide_id, each in skipped.items()
        if slide_id not in failed
    ]
    return csv_text(FAILURE_COLUMNS, rows).encode()


def collect_environment(
    device: torch.device,
    weights_sha256: str | None,
    weights: Mapping[str, str | None] | None,
    features_source: str | None,
    tiling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return versions, machine, weights and tiling: what results depend on besides the configuration."""
    packages = ("torch", "timm", "numpy", "openslide-python", "tifffile", "imagecodecs", "peft", "torchmil")
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "tapfm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),  # affects rounding
        "device": str(device) if gpu is None else f"{device} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)",
        "cuda": torch.version.cuda if gpu is not None else None,
        "packages": {name: version for name in packages if (version := installed_version(name)) is not None},
        "weights_sha256": weights_sha256,  # of the encoder before adaptation
        "weights": weights,  # their source, repository, revision and file name; None with stored features
        "features_source": features_source,  # tool and encoder of stored features that tapfm did not write
        "tiles": tiling,  # tiling settings of the training slides, so that other slides are tiled in the same way
        "command": shlex.join(["tapfm", *sys.argv[1:]]),
    }


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
