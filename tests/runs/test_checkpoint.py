"""Checkpoints are written atomically, are valid safetensors files, and are checked when they are loaded."""

import errno
import json
import os
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tapfm.errors import CheckpointError, DiskFullError
from tapfm.runs.checkpoint import check_disk_space, load_checkpoint, read_checkpoint_metadata, save_checkpoint

TENSORS = {
    "encoder/blocks.0.weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "double": torch.tensor(1e-300, dtype=torch.float64),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "empty": torch.empty(0, 3),
    "count": torch.tensor([2**40]),
    "mask": torch.tensor([True, False]),
}
METADATA = {"progress": {"epoch": 3, "score": 0.1 + 0.2, "name": "Zürich"}}


def test_loaded_checkpoint_is_bit_identical(tmp_path):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, TENSORS, METADATA)
    tensors, metadata = load_checkpoint(path)
    assert metadata == METADATA
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert read_checkpoint_metadata(path) == METADATA


def test_safetensors_can_read_the_file(tmp_path):
    save_checkpoint(tmp_path / "ours", TENSORS, METADATA)
    found = load_file(tmp_path / "ours")
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert (tmp_path / "ours").stat().st_size % 8 == sum(t.nbytes for t in TENSORS.values()) % 8


def test_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, TENSORS, METADATA)
    before = path.read_bytes()

    def raise_disk_full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    with pytest.raises(DiskFullError, match="previous version of this file is intact"):
        save_checkpoint(path, TENSORS, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_interrupt_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, TENSORS, METADATA)
    before = path.read_bytes()

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, TENSORS, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_disk_space_is_checked_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 2 * 10**9))
    with pytest.raises(DiskFullError, match=r"14\.1 GB needed, but .* has 2\.0 GB free"):
        check_disk_space(tmp_path, 14 * 10**9, "a checkpoint")
    check_disk_space(tmp_path, 10**9, "a checkpoint")


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\x08" + bytes(7) + b"nonsense", None])
def test_invalid_file_is_an_error(tmp_path, content):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    for read in (load_checkpoint, read_checkpoint_metadata):
        with pytest.raises(CheckpointError):
            read(path)


def test_safetensors_file_of_another_tool_is_an_error(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "other", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not a tapfm checkpoint"):
        load_checkpoint(tmp_path / "other")


def test_nan_in_the_description_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path / "x", TENSORS, {"loss": float("nan")})
    assert json.dumps(METADATA)
