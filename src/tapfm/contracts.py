"""The page to read first: what the parts promise each other.

    tiles ──> TileEncoder ──> EncodedTiles ──> Aggregator ──> BagOutput ──> Task ──> loss

Shape suffixes, here and in `two_graph.py`, `chunked.py`, `cls_attention.py`, `vit.py`:

    K  tiles of one slide (the bag)       H  attention heads        3hw  colour channels, tile height, width
    D  size of a tile's feature vector    N  tokens of a tile       C    targets (1 for a binary task)

A "patch" is a token of the ViT; a piece of a slide is always a "tile". Nothing inherits from these protocols:
a class fits by having the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class EncodedTiles(NamedTuple):
    """What an encoder says of K tiles, in float32 or better whatever it computed in."""

    z_KD: Tensor  # tile features
    r_K: Tensor  # raw attention, eq. 1: how much CLS attends to patch tokens, before any normalisation over tiles


class Contributions(NamedTuple):
    """Logits as sums over tiles, without a rest: logits_C = constant_C + of_tiles_CK.sum(1)."""

    of_tiles_CK: Tensor
    constant_C: Tensor


class BagOutput(NamedTuple):
    """What an aggregator says of a slide. Of its tiles: one row of K numbers, or a row for each target, (C, K)."""

    logits_C: Tensor
    tile_weights: Tensor | None  # the weights the tiles were summed with; None where there are none
    tile_scores: Tensor | None = None  # for a heatmap, where something else than the weights says more
    extra_loss: Callable[[Task, Targets], Tensor] | None = None  # of its own, added to the task's while it learns
    contributions: Callable[[], Contributions] | None = None  # where a logit is a sum over tiles: what each gives

    @property
    def heat(self) -> Tensor:
        """What a heatmap shows: every aggregator has scores, or weights."""
        heat = self.tile_scores if self.tile_scores is not None else self.tile_weights
        assert heat is not None
        return heat


@dataclass(frozen=True)
class Targets:
    """The labels of one slide. Where `known_C` is false the label is missing and `labels_C` holds 0."""

    labels_C: Tensor
    known_C: Tensor

    def to(self, device: torch.device) -> Targets:
        """Move them, without waiting."""
        return Targets(self.labels_C.to(device, non_blocking=True), self.known_C.to(device, non_blocking=True))


class Tiles(Protocol):
    """A slide's uint8 tiles, some at a time: a tensor, or what makes them when they are asked for."""

    def __len__(self) -> int:
        """Count them."""
        ...

    def __getitem__(self, rows: slice | Tensor, /) -> Tensor:
        """Give some of them, the same ones whenever they are asked for; `rows` are a slice, or indices on the CPU."""
        ...


class TileEncoder(Protocol):
    """A foundation model: uint8 tiles in, features and raw CLS attention out."""

    tile_px: int
    feature_size: int

    def __call__(self, tiles_K3hw: Tensor) -> EncodedTiles:
        """Encode K tiles, moving them to the encoder's device; pixels are normalised here and nowhere else."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what adaptation may change."""
        ...


class Aggregator(Protocol):
    """Tile features to slide logits. One that has no use for the raw attention ignores it."""

    def __call__(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:
        """Pool the tiles of one slide."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what the aggregator learns."""
        ...


class Task(Protocol):
    """What is learnt: one logit per target, and the loss. What else depends on a target is in its kind (tasks/)."""

    @property
    def targets(self) -> Mapping[str, Any]:
        """The targets by name, in the order of the logits, each with its kind (`tasks.target.TargetKind`)."""
        ...

    def encode(self, labels: Sequence[Hashable]) -> Targets:
        """Turn the labels of a slide, one per target, into tensors; None is a missing label."""
        ...

    def loss(self, logits_C: Tensor, targets: Targets) -> Tensor:
        """Compute L_agg (eq. 4) of one slide; missing labels take no part."""
        ...
