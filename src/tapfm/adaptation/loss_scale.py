"""Dynamic loss scale for float16, like `torch.amp.GradScaler` but without device synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 200  # consecutive finite steps until the scale is doubled
_MIN_SCALE = 2.0**-8  # if gradients overflow even with this scale, the scale is not the cause


class LossScale:
    """A loss scale that doubles after `_GROWTH_INTERVAL` consecutive finite steps and halves after one that is not."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _INITIAL_SCALE, device=device)
        self._finite_steps = torch.zeros((), device=device)

    def advance(self, finite: Tensor) -> None:
        """Update the scale after a step; `finite`: whether its gradients were finite."""
        self._finite_steps = torch.where(finite, self._finite_steps + 1, torch.zeros_like(self._finite_steps))
        grows = self._finite_steps >= _GROWTH_INTERVAL
        factor = torch.where(finite, 1.0 + grows.float(), torch.full_like(self.value, 0.5))
        changed = self.value * factor
        self.value = torch.where(changed.isfinite(), changed, self.value)  # an infinite scale could not shrink again
        self._finite_steps = torch.where(grows, torch.zeros_like(self._finite_steps), self._finite_steps)

    def can_decrease(self) -> Tensor:
        """Return whether a smaller scale may still prevent overflow."""
        return self.value >= _MIN_SCALE

    def state(self) -> dict[str, Tensor]:
        return {"value": self.value, "finite_steps": self._finite_steps}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load a state. A checkpoint of another precision has no state of the scale, which then stays unchanged."""
        if "value" in state:
            self.value, self._finite_steps = (state[key].to(self.value.device) for key in ("value", "finite_steps"))
