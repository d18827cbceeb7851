"""An encoder, an aggregator and a task that belong together: from the tiles of a slide to its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapfm.contracts import Encoded, Task
from tapfm.encoders.vit import VitEncoder


@dataclass
class SlideModel:
    """What is trained, saved and asked. Without an encoder it starts from stored features."""

    encoder: VitEncoder | None
    aggregator: nn.Module
    task: Task
    compute_dtype: torch.dtype | None = None

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
        assert self.encoder is not None
        return encode(self.encoder, tiles, chunk, self.compute_dtype)

    @torch.no_grad()
    def logits(self, encoded: Encoded) -> Tensor:
        """Give the logits of a slide from all of its tiles at once: weights are never normalised over a part."""
        logits_C: Tensor = self.aggregator(*encoded).logits_C
        return logits_C


@torch.no_grad()
def encode(encoder: VitEncoder, tiles: Tensor, chunk: int, compute_dtype: torch.dtype | None = None) -> Encoded:
    """Encode uint8 tiles without a graph, `chunk` at a time; in `compute_dtype`, or as the weights are."""
    device = encoder.mean.device.type
    with torch.autocast(device, compute_dtype or torch.bfloat16, enabled=compute_dtype is not None):
        parts = [encoder(tiles[start : start + chunk]) for start in range(0, len(tiles), chunk)]
    return joined(parts)


def joined(parts: list[Encoded]) -> Encoded:
    """Put the parts of a bag together."""
    return Encoded(torch.cat([part.z_KD for part in parts]), torch.cat([part.r_K for part in parts]))
