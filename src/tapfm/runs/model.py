"""The slide model: an encoder, an aggregator and a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tapfm.contracts import Aggregator, BagOutput, Task
from tapfm.encoders.adapters import trainable_parameters
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import CheckpointError, InputError


@dataclass
class SlideModel:
    """A model for slides; without an encoder, its input is stored features.

    compute_dtype: autocast dtype of the encoder in training and validation; None: no autocast.
    """

    encoder: VitEncoder | None
    aggregator: nn.Module
    task: Task
    compute_dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.aggregator.parameters()).device

    def train(self, mode: bool = True) -> None:
        """Switch encoder and aggregator to training mode, or to evaluation mode if `mode` is False."""
        for module in (self.encoder, self.aggregator):
            if module is not None:
                module.train(mode)

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by their names in checkpoints.

        These are all parameters of the aggregator, and the encoder parameters that are not frozen.
        """
        encoder = trainable_parameters(self.encoder) if self.encoder is not None else {}
        return {
            **{f"aggregator/{name}": parameter for name, parameter in self.aggregator.named_parameters()},
            **{f"encoder/{name}": parameter for name, parameter in encoder.items()},
        }

    def aggregator_for(self, coordinates: Tensor | None = None) -> Aggregator:
        """Return the aggregator for one bag.

        coordinates: tile positions, (K, 2), in units of the tile side; required by aggregators with `uses_coordinates`.
        """
        if not getattr(self.aggregator, "uses_coordinates", False):
            return self.aggregator
        if coordinates is None:
            raise InputError(
                "The aggregator uses tile coordinates, but these features have none.",
                hint="Compute features with coordinates (tapfm embed), or use another aggregator, such as abmil.",
            )
        return _AggregatorWithCoordinates(self.aggregator, coordinates)


@dataclass(frozen=True)
class _AggregatorWithCoordinates:
    """An aggregator and the coordinates of the tiles of one bag; called like any other aggregator."""

    aggregator: nn.Module
    coordinates: Tensor  # (K, 2), in units of the tile side

    def __call__(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:
        """Aggregate the tiles of one slide."""
        output: BagOutput = self.aggregator(z_KD, r_K, self.coordinates)
        return output

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the aggregator."""
        return self.aggregator.named_parameters()


def load_parameters(parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint (`state`) into the parameters. Raises CheckpointError if they do not match."""
    check_parameter_shapes(parameters, state)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def check_parameter_shapes(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a parameter is missing in the checkpoint `state` or has a different shape there."""
    for name, tensor in parameters.items():
        if name not in state or state[name].shape != tensor.shape:
            raise CheckpointError(
                f"The checkpoint does not match the model: {name} is missing or has a different shape.",
                hint="Use the encoder, aggregator and adaptation scope that the checkpoint was saved with.",
            )
