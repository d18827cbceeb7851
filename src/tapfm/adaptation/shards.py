"""Shards: flat tensors that hold the parameters of a model. Large parameters have their own shard, small ones share.

Each shard has
    working   the weights to compute with; every parameter is a view of it
    master    full-precision weights that updates are added to; None if `working` is precise enough
    moments   AdamW's moments, see moments.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapfm.adaptation.moments import BLOCK_SIZE

MAX_SHARD_ELEMENTS = 2**24  # of a shard that small parameters share
# A parameter of at least this size has its own shard and its gradient is used in place; smaller ones are copied.
_OWN_SHARD_ELEMENTS = 2**20


@dataclass(frozen=True)
class ParameterSlice:
    """Position of a parameter in a shard."""

    name: str
    parameter: nn.Parameter
    start: int

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the part of a flat tensor that belongs to this parameter, in the parameter's shape."""
        return flat.view(-1)[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class Shard:
    """Parameters that are updated together. The tensors have shape (blocks, 256)."""

    slices: tuple[ParameterSlice, ...]
    has_weight_decay: bool
    working: Tensor
    master: Tensor | None
    moments: dict[str, Tensor]

    @property
    def full_precision(self) -> Tensor:
        """The master weights, or the working weights if there are none."""
        return self.working if self.master is None else self.master


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the master weights: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def group_parameters(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[ParameterSlice, ...]]:
    """Yield the parameters of each shard.

    All parameters of a shard have the same dtype. Each starts at a block boundary and is in one shard only.
    """
    large = {name: parameter for name, parameter in parameters.items() if parameter.numel() >= _OWN_SHARD_ELEMENTS}
    for name, parameter in large.items():
        yield (ParameterSlice(name, parameter, 0),)
    small = ((name, parameter) for name, parameter in parameters.items() if name not in large)
    slices: list[ParameterSlice] = []
    end = 0
    for name, parameter in sorted(small, key=lambda item: str(item[1].dtype)):
        if slices and (end + parameter.numel() > MAX_SHARD_ELEMENTS or parameter.dtype != slices[0].parameter.dtype):
            yield tuple(slices)
            slices, end = [], 0
        slices.append(ParameterSlice(name, parameter, end))
        end += -(-parameter.numel() // BLOCK_SIZE) * BLOCK_SIZE
    if slices:
        yield tuple(slices)


def layout_fingerprint(shards: tuple[Shard, ...]) -> Tensor:
    """Return a SHA-256 of the parameters' names, positions and shapes.

    It differs between shards of the same size that contain different parameters.
    """
    layout = [[[part.name, part.start, list(part.parameter.shape)] for part in shard.slices] for shard in shards]
    return torch.tensor(list(hashlib.sha256(json.dumps(layout).encode()).digest()), dtype=torch.uint8)


def take_flat_gradient(shard: Shard) -> Tensor:
    """Return the gradients of a shard as one flat tensor, with 0 for missing gradients. Set every .grad to None."""
    if len(shard.slices) == 1:
        parameter, shape = shard.slices[0].parameter, shard.working.shape
        gradient = parameter.grad
        if gradient is not None and gradient.numel() == shape.numel() and gradient.is_contiguous():
            parameter.grad = None
            return gradient.view(shape).data  # .data, because compiled code would recompile for a view
    found = [(part, part.parameter.grad) for part in shard.slices if part.parameter.grad is not None]
    dtypes = {gradient.dtype for _, gradient in found}
    has_gaps = sum(gradient.numel() for _, gradient in found) != shard.working.numel()
    allocate = torch.zeros_like if has_gaps else torch.empty_like
    # gradients of several dtypes are rare; the master's dtype can hold them all
    flat = allocate(shard.working, dtype=dtypes.pop() if len(dtypes) == 1 else shard.full_precision.dtype)
    if found:
        torch._foreach_copy_([part.view_in(flat) for part, _ in found], [gradient for _, gradient in found])
    for part in shard.slices:
        part.parameter.grad = None
    return flat
