"""`tapfm.load`: load the model of a run or an export in Python."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tapfm.runs.saved_model import SavedModel


def load(folder: str | Path, device: str = "auto") -> SavedModel:
    """Load the model of a run folder or of an export.

    device: auto (the GPU if there is one), cpu, cuda or cuda:1.
    """
    from tapfm.runs.ensemble import EXPORT_METADATA_FILE
    from tapfm.runs.saved_model import load_export, load_run
    from tapfm.runtime.devices import choose_device

    folder = Path(folder)
    return (load_export if (folder / EXPORT_METADATA_FILE).exists() else load_run)(folder, choose_device(device))
