"""An encoder, an aggregator and a task that belong together: from the tiles of a slide to its logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapfm.contracts import Aggregator, BagOutput, Encoded, Task
from tapfm.encoders.inference import Looking, in_batches, plainly
from tapfm.encoders.inference import joined as joined
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError


@dataclass
class SlideModel:
    """What is trained, saved and asked. Without an encoder it starts from stored features.

    One that is only asked has its encoder made ready for `looking`, which decides how it computes.
    """

    encoder: VitEncoder | None
    aggregator: nn.Module
    task: Task
    compute_dtype: torch.dtype | None = None
    looking: Looking | None = None

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.aggregator.parameters()).device

    def train(self, mode: bool = True) -> None:
        """Switch both modules between training and evaluation."""
        for module in (self.encoder, self.aggregator):
            if module is not None:
                module.train(mode)

    def encode(self, tiles: Tensor, chunk: int) -> Encoded:
        """Encode uint8 tiles without a graph, `chunk` at a time."""
        if self.looking is not None:
            return self.looking.encode(tiles, chunk)
        assert self.encoder is not None
        return encode(self.encoder, tiles, chunk, self.compute_dtype)

    @torch.no_grad()
    def logits(self, encoded: Encoded, places: Tensor | None = None) -> Tensor:
        """Give the logits of a slide."""
        return self.look(encoded, places).logits_C

    @torch.no_grad()
    def look(self, encoded: Encoded, places: Tensor | None = None) -> BagOutput:
        """Look at a slide, all of its tiles at once: weights are never normalised over a part."""
        return self.aggregator_of(places)(*encoded)

    def aggregator_of(self, places: Tensor | None) -> Aggregator:
        """Give the aggregator of a bag: one that uses the places of its tiles is told them."""
        if not getattr(self.aggregator, "uses_places", False):
            return self.aggregator
        if places is None:
            raise InputError(
                "The aggregator has to know where on the slide its tiles are, and of these it is not known.",
                hint="Make features that say it: tapfm embed; or use an aggregator that does not ask, such as abmil.",
            )
        return Placed(self.aggregator, places)


@dataclass(frozen=True)
class Placed:
    """An aggregator together with the places of the tiles at hand; to all others it is like any aggregator."""

    aggregator: nn.Module
    places: Tensor  # (K, 2), in sides of a tile

    def __call__(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:
        """Pool the tiles of one slide."""
        output: BagOutput = self.aggregator(z_KD, r_K, self.places)
        return output

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what the aggregator learns."""
        return self.aggregator.named_parameters()


def encode(encoder: VitEncoder, tiles: Tensor, chunk: int, compute_dtype: torch.dtype | None = None) -> Encoded:
    """Encode uint8 tiles without a graph, `chunk` at a time; in `compute_dtype`, or as the weights are."""
    return in_batches(lambda batch: plainly(encoder, batch, compute_dtype), tiles, chunk, encoder.mean.device)
