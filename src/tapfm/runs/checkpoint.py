"""Checkpoints: safetensors files with metadata as JSON in the header; loading never runs code.

A checkpoint is written tensor by tensor, so that a checkpoint of 14 GB needs no second copy in memory. It is written
to a temporary file that replaces the old checkpoint at the end, so an interruption leaves the old one intact.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tapfm.errors import CheckpointError, DiskFullError
from tapfm.runtime.files import open_atomically

METADATA_KEY = "tapfm"  # key of the metadata in the header
_DTYPE_NAMES = {  # in safetensors files
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SPARE_BYTES = 64 * 2**20  # kept free for smaller files, such as logs


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of a checkpoint file of these tensors, without its header."""
    return sum(tensor.nbytes for tensor in tensors.values())


def check_disk_space(folder: Path, wanted_bytes: int, what: str) -> None:
    """Raise DiskFullError if the disk has less than `wanted_bytes` plus some spare space; `what` names the files."""
    free = shutil.disk_usage(folder).free
    if free < wanted_bytes + _SPARE_BYTES:
        raise DiskFullError(
            f"Not enough disk space for {what}: {_format_bytes(wanted_bytes + _SPARE_BYTES)} needed, but {folder} has "
            f"{_format_bytes(free)} free.",
            hint="Free disk space, or choose a folder on another disk with --out.",
        )


def _format_bytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically: if writing fails, the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(path.parent, total_bytes(tensors), f"the checkpoint {path.name}")
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(metadata, allow_nan=False)}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # safetensors requires tensors at multiples of 8 bytes
    with open_atomically(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load the tensors and the metadata of a checkpoint."""
    with _open_checkpoint(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _parse_metadata(file)  # noqa: SIM118 - not a mapping


def read_checkpoint_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint, without its tensors."""
    with _open_checkpoint(path) as file:
        return _parse_metadata(file)


def _parse_metadata(file: Any) -> dict[str, Any]:
    return dict(json.loads(file.metadata()[METADATA_KEY]))


@contextmanager
def _open_checkpoint(path: Path) -> Iterator[Any]:
    """Open a checkpoint. Raises CheckpointError for any problem with the file."""
    hint = "Copy the folder of the run (or of the export) again, or start a new run."
    if not path.exists():
        raise CheckpointError(f"The checkpoint {path} does not exist.", hint=hint)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a tapfm checkpoint ({error}).", hint=hint) from error
