"""Checkpoints: whole or not at all, read by anybody, and nothing in them runs."""

import errno
import json
import os
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tapfm.errors import CheckpointError, DiskFullError
from tapfm.runs.checkpoint import check_disk_space, load_checkpoint, read_description, save_checkpoint

TENSORS = {
    "encoder/blocks.0.weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "double": torch.tensor(1e-300, dtype=torch.float64),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "none": torch.empty(0, 3),
    "count": torch.tensor([2**40]),
    "mask": torch.tensor([True, False]),
}
DESCRIPTION = {"progress": {"epoch": 3, "score": 0.1 + 0.2, "name": "Zürich"}}


def test_what_is_saved_comes_back_bit_by_bit(tmp_path):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, TENSORS, DESCRIPTION)
    tensors, description = load_checkpoint(path)
    assert description == DESCRIPTION
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert read_description(path) == DESCRIPTION


def test_the_file_is_one_that_safetensors_reads_and_would_write(tmp_path):
    save_checkpoint(tmp_path / "ours", TENSORS, DESCRIPTION)
    found = load_file(tmp_path / "ours")
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert (tmp_path / "ours").stat().st_size % 8 == sum(t.nbytes for t in TENSORS.values()) % 8


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, TENSORS, DESCRIPTION)
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="the one before is whole"):
        save_checkpoint(path, TENSORS, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_stop_in_the_middle_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, TENSORS, DESCRIPTION)
    before = path.read_bytes()

    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, TENSORS, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_space_is_looked_at_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 2 * 10**9))
    with pytest.raises(DiskFullError, match=r"that is 14\.1 GB, and .* has 2\.0 GB left"):
        check_disk_space(tmp_path, 14 * 10**9, "A checkpoint")
    check_disk_space(tmp_path, 10**9, "A checkpoint")


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\x08" + bytes(7) + b"nonsense", None])
def test_what_is_no_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    for read in (load_checkpoint, read_description):
        with pytest.raises(CheckpointError):
            read(path)


def test_weights_of_others_are_no_checkpoint(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "theirs", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not a checkpoint of tapfm"):
        load_checkpoint(tmp_path / "theirs")


def test_numbers_that_json_does_not_have_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path / "x", TENSORS, {"loss": float("nan")})
    assert json.dumps(DESCRIPTION)
