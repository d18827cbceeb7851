"""Checkpoints: one safetensors file each, with a JSON description in its header; loading never runs code.

Written tensor by tensor, so that a state of 14 GB needs no second copy in memory, beside the old file and then put in
its place: whatever happens, there is a whole one.
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
from tapfm.runtime.files import open_replacement

DESCRIPTION = "tapfm"  # key of the JSON text in the header
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SPARE_BYTES = 64 * 2**20  # left for tables and logs


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Say how large the file will be, but for its header."""
    return sum(tensor.nbytes for tensor in tensors.values())


def check_space(folder: Path, wanted_bytes: int, what: str) -> None:
    """Refuse to begin what the disk has no room for."""
    free = shutil.disk_usage(folder).free
    if free < wanted_bytes + _SPARE_BYTES:
        raise DiskFullError(
            f"{what} and some room for tables: that is {_gigabytes(wanted_bytes + _SPARE_BYTES)}, and {folder} has "
            f"{_gigabytes(free)} left.",
            hint="Free some space, or give a folder on another disk with --out.",
        )


def _gigabytes(count: float) -> str:
    """Write a number of bytes for people."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write a checkpoint in place of the one that is there; on failure that one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_space(path.parent, nbytes(tensors), f"A checkpoint ({path.name})")
    header: dict[str, Any] = {"__metadata__": {DESCRIPTION: json.dumps(description, allow_nan=False)}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors aligned
    with open_replacement(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint of ours: its tensors and its description."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _description_of(file)  # noqa: SIM118 - no mapping


def read_description(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself, without its tensors."""
    with _opened(path) as file:
        return _description_of(file)


def _description_of(file: Any) -> dict[str, Any]:
    """Read the JSON text of the header."""
    return dict(json.loads(file.metadata()[DESCRIPTION]))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a checkpoint; whatever is wrong with it is told as one thing."""
    hint = "Copy the folder of the run again, or train anew."
    if not path.exists():
        raise CheckpointError(f"There is no checkpoint {path}.", hint=hint)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of tapfm ({error}).", hint=hint) from error
