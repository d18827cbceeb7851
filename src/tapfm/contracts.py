"""The interfaces between the parts of tapfm. Read this module first.

    tiles ──> TileEncoder ──> EncodedTiles ──> Aggregator ──> BagOutput ──> Task ──> loss

Names of tensors with a fixed shape end in it, with the same letters in all modules:

    K  tiles of one slide (the bag)       3hw  colour channels, tile height, tile width
    D  size of a tile feature             N    tokens of a tile (CLS, registers, patches)
    C  targets (1 for a binary task)      H    attention heads; d is the size of a head

So `z_KD` is the matrix of tile features and `r_K` the vector of raw attentions. A "patch" is a token of the ViT;
a piece of a slide is a "tile" (only the file layouts of TRIDENT and CLAM call tiles patches).

The protocols are structural: a class implements one by having its methods, without inheriting from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class EncodedTiles(NamedTuple):
    """Features and raw attention of K tiles, in at least float32 whatever precision the encoder computes in."""

    z_KD: Tensor  # tile features
    r_K: Tensor  # raw attention (eq. 1): mean attention of CLS to the patch tokens, not yet normalised over the bag


class Contributions(NamedTuple):
    """Exact decomposition of the logits into a sum over tiles: logits_C = constant_C + per_tile_CK.sum(1)."""

    per_tile_CK: Tensor
    constant_C: Tensor


class BagOutput(NamedTuple):
    """Output of an aggregator for one slide.

    `tile_weights` and `tile_scores` have shape (K,) if all targets share them, else (C, K).
    """

    logits_C: Tensor
    tile_weights: Tensor | None  # weights of the sum over tiles; None if the aggregator has none
    tile_scores: Tensor | None = (
        None  # values for the heatmap of an aggregator without tile weights, such as the logit of each tile
    )
    extra_loss: Callable[[Task, Targets], Tensor] | None = None  # the aggregator's own term, added to the task's loss
    contributions: Callable[[], Contributions] | None = None  # only if every logit is a sum over tiles

    @property
    def heatmap_scores(self) -> Tensor:
        """Tile values to draw as a heatmap: the scores if there are any, else the weights."""
        scores = self.tile_scores if self.tile_scores is not None else self.tile_weights
        assert scores is not None
        return scores


@dataclass(frozen=True)
class Targets:
    """Labels of one slide. If `known_C` is false, the label is missing and `labels_C` is 0."""

    labels_C: Tensor
    known_C: Tensor

    def to(self, device: torch.device) -> Targets:
        """Copy the labels to a device, asynchronously if possible."""
        return Targets(self.labels_C.to(device, non_blocking=True), self.known_C.to(device, non_blocking=True))


class Tiles(Protocol):
    """Sliceable uint8 tiles of one slide: a tensor, or an object that creates them on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | Tensor, /) -> Tensor:
        """Return some tiles. The same rows always have the same pixels. `rows` is a slice or a CPU index tensor."""
        ...


class TileEncoder(Protocol):
    """A pathology foundation model (PFM): takes uint8 tiles, returns features and raw CLS attention."""

    tile_px: int
    feature_size: int

    def __call__(self, tiles_K3hw: Tensor) -> EncodedTiles:
        """Move K tiles to the encoder's device, normalise their pixels and encode them.

        This is the only place where pixels are normalised.
        """
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Aggregator(Protocol):
    """Pools the tile features of one slide into slide logits. Most aggregators ignore the raw attention."""

    def __call__(self, z_KD: Tensor, r_K: Tensor) -> BagOutput: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Task(Protocol):
    """Defines the targets and the loss. There is one logit per target.

    Everything else that depends on the type of a target is in its `TargetKind` (package `tasks`).
    """

    @property
    def target_kinds(self) -> Mapping[str, Any]:
        """Kind of each target (`tasks.target.TargetKind`) by name, in the order of the logits."""
        ...

    def encode(self, labels: Sequence[Hashable]) -> Targets:
        """Convert the labels of one slide, one per target, to tensors. None is a missing label."""
        ...

    def loss(self, logits_C: Tensor, targets: Targets) -> Tensor:
        """Compute L_agg (eq. 4) of one slide. Missing labels are masked out."""
        ...
