"""Two AdamW optimisers and their learning rates: cosine annealing with warm restarts, stepped per epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Schedule:
    """Cosine annealing with warm restarts: the first cycle has `first_cycle` epochs, each next one `factor` times."""

    first_cycle: int = 10
    factor: int = 2

    def rate(self, epoch: int, highest: float, lowest: float = 0.0) -> float:
        """Give the learning rate of an epoch, counted from 0; a function of the epoch, so there is no state to save."""
        length, into = self.first_cycle, epoch
        while into >= length:
            into -= length
            length *= self.factor
        return lowest + (highest - lowest) * (1 + math.cos(math.pi * into / length)) / 2


def make_optimiser(
    parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float, decay_all: bool
) -> torch.optim.AdamW | None:
    """Make AdamW for what is trainable; nothing where nothing is. Biases and norms are vectors: `decay_all` or not."""
    trainable = [parameter for _, parameter in parameters if parameter.requires_grad]
    if not trainable:
        return None
    matrices = [p for p in trainable if p.ndim > 1 or decay_all]
    vectors = [p for p in trainable if not (p.ndim > 1 or decay_all)]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0)


def set_rate(optimiser: torch.optim.AdamW | None, rate: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimiser.param_groups if optimiser is not None else []:
        group["lr"] = rate


def update(optimiser: torch.optim.AdamW | None, *, slides: int, clip_norm: float) -> None:
    """Step with the mean gradient of `slides`, clipped to `clip_norm` (0: not at all), and start over."""
    if optimiser is None:
        return
    parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
    if slides > 1:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= slides
    if clip_norm:
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def optimiser_state(optimiser: torch.optim.AdamW | None, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """Name each moment by its parameter: `blocks.0.norm1.weight/exp_avg`."""
    if optimiser is None:
        return {}
    return {
        f"{name}/{key}": value
        for parameter, name in names.items()
        if parameter in optimiser.state
        for key, value in optimiser.state[parameter].items()
    }


def restore_optimiser(
    optimiser: torch.optim.AdamW | None, names: dict[nn.Parameter, str], state: dict[str, Tensor]
) -> None:
    """Put the moments back where `optimiser_state` took them."""
    if optimiser is None:
        return
    by_name: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        parameter_name, _, key = name.rpartition("/")
        by_name.setdefault(parameter_name, {})[key] = value
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            if (moments := by_name.get(names[parameter])) is not None:
                optimiser.state[parameter] = {
                    # AdamW counts its steps on the host; copies, or the file they came from would stay open
                    key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                    for key, value in moments.items()
                }
