"""What a model, or several as an ensemble, says of a whole slide and of each of its tiles: one pass for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tapfm.adaptation.trainer import finite_logits
from tapfm.contracts import BagOutput, Encoded
from tapfm.device_memory import free_memory
from tapfm.errors import InputError
from tapfm.evaluation.predictions import logit_of_mean
from tapfm.model import SlideModel
from tapfm.prediction.layers import Kind, Values, column_of


@dataclass(frozen=True)
class WholeSlide:
    """Logits by target, and columns of numbers with a value for each tile."""

    logits: Mapping[str, float]
    constants: Mapping[str, float | None]  # logit = constant + sum of contributions; None where it is no such sum
    columns: Mapping[str, Values]


class Models:
    """One model, or the members of an ensemble, that look at the same tiles: each tile is read once.

    To those who give it tiles it is one encoder, whose features are those of all members side by side.
    """

    def __init__(
        self,
        models: Sequence[SlideModel],
        *,
        batch: int,
        may_shrink: bool = False,
        said: Callable[[int], object] = lambda _: None,
        shrunk: Callable[[int], object] = lambda _: None,
    ) -> None:
        sides = sorted({model.encoder.tile_px for model in models if model.encoder is not None})
        if len(sides) > 1:
            raise InputError(
                f"The members take tiles of different sizes: {', '.join(map(str, sides))} px.",
                hint="Predict with each of them alone, and compare: tapfm compare",
            )
        self.tile_px = sides[0]
        self.device = models[0].device
        self.targets = models[0].task.targets
        self._models, self._batch, self._may_shrink = models, batch, may_shrink
        self._said, self._shrunk = said, shrunk
        for model in models:
            model.train(False)

    def encode(self, tiles: Tensor, chunk: int) -> Encoded:  # noqa: ARG002 - the batch is what the user chose
        """Encode uint8 tiles; where the device's memory does not suffice, with half as many at a time, and so on."""
        while True:
            try:
                parts = [model.encode(tiles, self._batch) for model in self._models]
            except torch.OutOfMemoryError:
                if self._batch == 1 or not self._may_shrink:
                    raise
            else:
                break
            self._batch //= 2
            free_memory(self.device)
            self._shrunk(self._batch)
        self._said(len(tiles))
        if len(parts) == 1:
            return parts[0]
        return Encoded(torch.cat([part.z_KD for part in parts], 1), torch.stack([part.r_K for part in parts], 1))

    @torch.no_grad()
    def ask_each(self, slide_id: str, encoded: Encoded, places: Tensor | None) -> list[WholeSlide]:
        """Say what each member says of a slide."""
        return [
            said_by(slide_id, model, part, places)
            for model, part in zip(self._models, self._parts(encoded), strict=True)
        ]

    def ask(self, slide_id: str, encoded: Encoded, places: Tensor | None) -> WholeSlide:
        """Say what the slide is, from all of its tiles at once, and what each tile has to do with it."""
        said = self.ask_each(slide_id, encoded, places)
        if len(said) == 1:
            return said[0]
        shared = [name for name in said[0].columns if all(name in each.columns for each in said)]
        return WholeSlide(
            {target: logit_of_mean([each.logits[target] for each in said]) for target in self.targets},
            dict.fromkeys(self.targets),  # the mean of probabilities is no sum over tiles
            {name: np.mean([each.columns[name] for each in said], axis=0) for name in shared},
        )

    def _parts(self, encoded: Encoded) -> list[Encoded]:
        """Take the members' features apart again."""
        if len(self._models) == 1:
            return [encoded]
        sizes = [model.encoder.feature_size for model in self._models if model.encoder is not None]
        features, attention = encoded.z_KD.split(sizes, 1), encoded.r_K.unbind(1)
        # in one piece, as when it is asked alone: products are rounded by how their numbers lie in memory
        return [Encoded(z_KD.contiguous(), r_K.contiguous()) for z_KD, r_K in zip(features, attention, strict=True)]


def said_by(slide_id: str, model: SlideModel, encoded: Encoded, places: Tensor | None) -> WholeSlide:
    """Ask one model."""
    output, targets = model.look(encoded, places), model.task.targets
    logits = dict(zip(targets, finite_logits(slide_id, output.logits_C), strict=True))
    columns = {"attention": numbers(encoded.r_K)} | columns_of(output, targets)
    constants: dict[str, float | None] = dict.fromkeys(targets)
    if output.contributions is not None:
        given = output.contributions()
        columns |= by_target("contribution", given.of_tiles_CK, targets)
        constants |= dict(zip(targets, given.constant_C.tolist(), strict=True))
    return WholeSlide(logits, constants, columns)


def columns_of(output: BagOutput, targets: Sequence[str]) -> dict[str, Values]:
    """Name the weights and scores of the tiles; what all targets share is there once."""
    columns: dict[str, Values] = {}
    kinds: tuple[tuple[Kind, Tensor | None], ...] = (("weight", output.tile_weights), ("score", output.tile_scores))
    for kind, values in kinds:
        if values is not None and (values.ndim == 1 or len(targets) == 1):
            columns[column_of(kind)] = numbers(values.reshape(-1))
        elif values is not None:
            columns |= by_target(kind, values, targets)
    return columns


def by_target(kind: Kind, values_CK: Tensor, targets: Sequence[str]) -> dict[str, Values]:
    """Name a row for each target."""
    return {column_of(kind, target): numbers(row) for target, row in zip(targets, values_CK, strict=True)}


def numbers(values: Tensor) -> Values:
    """Take the numbers out of a tensor."""
    return values.double().cpu().numpy()
