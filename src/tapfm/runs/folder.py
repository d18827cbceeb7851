"""The folder of a run, which explains itself.

config.toml           every setting, nothing left open
environment.json      versions, machine, weights
split.csv             the slides, their splits and labels
history.jsonl         a line for each epoch
checkpoints/          last.safetensors (all that is needed to go on), best.safetensors (weights)
predictions-val.csv, predictions-test.csv   of the best epoch, on all tiles
failures.csv          slides that failed, and tiles that were skipped
curves.png, summary.md, tensorboard/
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tapfm.config.changes import changed_settings
from tapfm.config.settings import RunConfig
from tapfm.config.text import config_text
from tapfm.errors import CheckpointError, RunError
from tapfm.runs.checkpoint import check_space, load_checkpoint, nbytes, read_description, save_checkpoint
from tapfm.runs.data import RunData, describe_changes
from tapfm.runs.progress import RunProgress
from tapfm.runtime.csv_files import csv_text, read_csv, write_csv
from tapfm.runtime.files import fingerprint, write_atomically
from tapfm.tiles.reading import SkippedTiles
from tapfm.version import __version__

_SHOWN = 10  # differences named


class TrainingState(Protocol):
    """What a checkpoint is made of, and restored into: a model with its optimisers."""

    @property
    def moments(self) -> str:
        """How the optimiser's moments are stored."""

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that training changes."""

    def state(self) -> dict[str, Tensor]:
        """Return the weights and the state of the optimisers."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""

    def restore_weights(self, state: Mapping[str, Tensor]) -> None:
        """Load what `weights` returned."""


class RunFolder:
    """Reads and writes the files of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last = folder / "checkpoints" / "last.safetensors"
        self.best = folder / "checkpoints" / "best.safetensors"
        self.next_best = folder / "checkpoints" / "best.next.safetensors"

    @property
    def begun(self) -> bool:
        """Say whether there is a run in it."""
        return (self.folder / "config.toml").exists()

    def begin(self, config: RunConfig, data: RunData, environment: Mapping[str, Any]) -> None:
        """Write what the run is made from; the configuration last, as it marks a run."""
        (self.folder / "environment.json").unlink(missing_ok=True)  # of a start that came to nothing
        self.note_environment(environment)
        write_csv(self.folder / "split.csv", data.columns, data.rows())
        write_atomically(self.folder / "config.toml", config_text(config).encode())

    def note_environment(self, environment: Mapping[str, Any]) -> None:
        """Add to environment.json: a run that was resumed has seen several."""
        text = json.dumps([*self.environments(), environment], indent=2)
        write_atomically(self.folder / "environment.json", text.encode())

    def environments(self) -> list[dict[str, Any]]:
        """Read where the run was begun, and where it was resumed."""
        path = self.folder / "environment.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else []

    def identity(self) -> str:
        """Tell a run from others: by what it was made from."""
        return fingerprint(self.settings(), (self.folder / "split.csv").read_text("utf-8"))[:16]

    def settings(self) -> dict[str, Any]:
        """Read config.toml as it is."""
        return tomllib.loads((self.folder / "config.toml").read_text("utf-8"))

    def slides(self) -> list[dict[str, str]]:
        """Read split.csv."""
        return read_csv(self.folder / "split.csv")

    def refuse_changes(self, config: RunConfig, data: RunData, go_on: str) -> None:
        """Refuse to go on with another configuration or cohort, saying how it differs."""
        lines = changed_settings(self.settings(), config.as_tables())
        lines += describe_changes(self.slides(), data)
        if lines:
            shown = lines[:_SHOWN] + ([f"... and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else [])
            raise RunError(
                f"{self.folder} was begun with something else:\n  " + "\n  ".join(shown),
                hint=f"Go on with what it was begun with: {go_on}\nOr begin anew with another --out.",
            )

    def refuse_other_weights(self, sha256: str | None) -> None:
        """Refuse to go on from another base model."""
        began_with = self.environments()[0]["weights_sha256"] if self.environments() else sha256
        if sha256 != began_with:
            raise RunError(
                f"{self.folder} was begun with other weights of its encoder: their SHA-256 was {began_with}, "
                f"is {sha256}.",
                hint="Give the file that it began with (encoder.weights), or begin anew with another --out.",
            )

    def load_progress(self, learner: TrainingState) -> RunProgress | None:
        """Put the last checkpoint into the learner; None where there is none yet."""
        if not self.last.exists():
            return None
        tensors, description = load_checkpoint(self.last)
        if description.get("run") != self.identity():
            raise RunError(
                f"{self.last} was not made with the config.toml and split.csv beside it.",
                hint="Put the files of the run back, or begin anew with another --out.",
            )
        learner.restore(tensors)
        progress = RunProgress.from_json(description["progress"])
        self.settle_best(progress)
        return progress

    def saved_moments(self) -> str:
        """Read in which form the last checkpoint has the optimiser's moments."""
        return str(read_description(self.last).get("moments", "float32"))

    def load_best(self, learner: TrainingState) -> dict[str, Any]:
        """Put the best epoch's weights into the learner, and say which they are."""
        tensors, description = load_checkpoint(self.best)
        learner.restore_weights(tensors)
        return description

    def check_space(self, learner: TrainingState) -> None:
        """Refuse a run whose checkpoints would not fit: both of them, each twice while it is replaced."""
        weights = nbytes(learner.weights())
        moments = 2 * weights
        have = sum(path.stat().st_size for path in (self.last, self.best) if path.exists())
        check_space(self.folder, max(0, 2 * (weights + moments) + 2 * weights - have), "The checkpoints of this run")

    def save_last(self, learner: TrainingState, progress: RunProgress) -> None:
        """Save all that is needed to go on, and the tables that go with it."""
        description = {
            "tapfm": __version__,
            "kind": "last",
            "run": self.identity(),  # of configuration and data
            "moments": learner.moments,
            "config": self.settings(),
            "progress": progress.as_json(),
        }
        save_checkpoint(self.last, learner.state(), description)
        self.settle_best(progress)
        self.write_tables(progress)

    def write_tables(self, progress: RunProgress) -> None:
        """Write what people read of a checkpoint."""
        lines = "".join(json.dumps(row) + "\n" for row in progress.history)
        write_atomically(self.folder / "history.jsonl", lines.encode())
        write_atomically(self.folder / "failures.csv", failures_table(progress.failed, progress.skipped))

    def save_best(self, learner: TrainingState, progress: RunProgress) -> None:
        """Save the weights of the best epoch so far."""
        description = {
            "tapfm": __version__,
            "kind": "best",
            "epoch": (progress.best_epoch or 0) + 1,
            "score": progress.best_score,
            "row": progress.history[-1],
        }
        save_checkpoint(self.next_best, learner.weights(), description)

    def settle_best(self, progress: RunProgress) -> None:
        """Let the next best replace the best, now that the last checkpoint names it; or drop it.

        A run that is stopped between the two repeats the epoch, and on a GPU may find it worse.
        """
        if self.next_best.exists():
            if read_description(self.next_best)["epoch"] == (progress.best_epoch or 0) + 1:
                self.next_best.replace(self.best)
            else:
                self.next_best.unlink()

    def finished(self) -> bool:
        """Return whether training is over, by the last checkpoint."""
        return bool(self._saved_progress()["finished"])

    def epochs_done(self) -> int:
        """Return the number of finished epochs, by the last checkpoint."""
        return len(self._saved_progress()["history"])

    def _saved_progress(self) -> dict[str, Any]:
        try:
            progress = read_description(self.last)["progress"]
            return {name: progress[name] for name in ("finished", "history")}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.last} has no training progress.", hint="Start a new run with another --out."
            ) from error


def failures_table(failed: Mapping[str, str], skipped: Mapping[str, SkippedTiles]) -> bytes:
    """List failed slides, and slides with tiles that were skipped."""
    rows: list[list[object]] = [[slide_id, "failed", None, reason] for slide_id, reason in failed.items()]
    rows += [
        [slide_id, "tiles skipped", len(each.tiles), each.reason]
        for slide_id, each in skipped.items()
        if slide_id not in failed
    ]
    return csv_text(["slide_id", "what", "tiles_skipped", "reason"], rows).encode()


def environment_of(
    device: torch.device,
    weights_sha256: str | None,
    made_by: str | None,
    tiles: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Note what a result may depend on besides the configuration."""
    packages = ("torch", "timm", "numpy", "openslide-python", "tifffile", "imagecodecs", "peft", "torchmil")
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "tapfm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),  # sums are rounded by it
        "device": str(device) if gpu is None else f"{device} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)",
        "cuda": torch.version.cuda if gpu is not None else None,
        "packages": {name: version for name in packages if (version := version_of(name)) is not None},
        "weights_sha256": weights_sha256,  # of the encoder, before it was adapted
        "features_made_by": made_by,  # what files of stored features say, where another tool wrote them
        "tiles": tiles,  # how those that were learnt from were laid, so that other slides get the same
        "command": shlex.join(["tapfm", *sys.argv[1:]]),
    }


def version_of(package: str) -> str | None:
    """Find an installed version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
