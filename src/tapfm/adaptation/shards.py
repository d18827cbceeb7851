"""Shards: flat tensors that hold the parameters of a model, a large one alone, small ones side by side.

A shard has
    working   what is computed with: every parameter is a view of it
    master    the full-precision values that updates are added to; the working copy itself where that is precise enough
    moments   see moments.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapfm.adaptation.moments import BLOCK

SHARD_ELEMENTS = 2**24
_ALONE_FROM_ELEMENTS = 2**20  # a parameter's gradient is then taken as it lies; others are copied side by side


@dataclass(frozen=True)
class ParameterSlice:
    """Where in a shard a parameter lies."""

    name: str
    parameter: nn.Parameter
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """Give the part of a flat tensor that is this parameter's."""
        return flat.view(-1)[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class Shard:
    """Parameters that are updated together: tensors of shape (blocks, 256)."""

    places: tuple[ParameterSlice, ...]
    decayed: bool
    working: Tensor
    master: Tensor | None  # None where it is `working`
    moments: dict[str, Tensor]

    @property
    def precise(self) -> Tensor:
        """The full-precision values."""
        return self.working if self.master is None else self.master


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Updates are added up in float32 or better."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def shard_places(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[ParameterSlice, ...]]:
    """Fill shards in order, one type in each; a parameter starts at a whole block, and is never cut."""
    large = {name: parameter for name, parameter in parameters.items() if parameter.numel() >= _ALONE_FROM_ELEMENTS}
    for name, parameter in large.items():
        yield (ParameterSlice(name, parameter, 0),)
    small = ((name, parameter) for name, parameter in parameters.items() if name not in large)
    places: list[ParameterSlice] = []
    end = 0
    for name, parameter in sorted(small, key=lambda item: str(item[1].dtype)):
        if places and (end + parameter.numel() > SHARD_ELEMENTS or parameter.dtype != places[0].parameter.dtype):
            yield tuple(places)
            places, end = [], 0
        places.append(ParameterSlice(name, parameter, end))
        end += -(-parameter.numel() // BLOCK) * BLOCK
    if places:
        yield tuple(places)


def layout_of(shards: tuple[Shard, ...]) -> Tensor:
    """Make a fingerprint of what lies where: shards of other parameters may have the same sizes."""
    layout = [[[place.name, place.start, list(place.parameter.shape)] for place in shard.places] for shard in shards]
    return torch.tensor(list(hashlib.sha256(json.dumps(layout).encode()).digest()), dtype=torch.uint8)


def flat_gradient(shard: Shard) -> Tensor:
    """Lay the gradients of a shard side by side, 0 where there is none, and forget them."""
    if len(shard.places) == 1:
        parameter, shape = shard.places[0].parameter, shard.working.shape
        gradient = parameter.grad
        if gradient is not None and gradient.numel() == shape.numel() and gradient.is_contiguous():
            parameter.grad = None
            return gradient.view(shape).data  # compiled code would not take a view for what it was made for
    found = [(place, place.parameter.grad) for place in shard.places if place.parameter.grad is not None]
    dtypes = {gradient.dtype for _, gradient in found}
    filled = sum(gradient.numel() for _, gradient in found) == shard.working.numel()  # no gap between parameters
    make = torch.empty_like if filled else torch.zeros_like
    # gradients of several types are rare: the master's type holds them all
    flat = make(shard.working, dtype=dtypes.pop() if len(dtypes) == 1 else shard.precise.dtype)
    if found:
        torch._foreach_copy_([place.of(flat) for place, _ in found], [gradient for _, gradient in found])
    for place in shard.places:
        place.parameter.grad = None
    return flat
