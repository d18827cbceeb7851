"""The scale of a float16 loss: as large as gradients allow, so that small ones do not vanish."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST = 2.0**16
_PATIENCE = 200  # finite steps after which a scale twice as large is tried
_SMALLEST = 2.0**-8  # below it, it is not the scale that makes gradients infinite


class LossScale:
    """Doubles after `_PATIENCE` finite steps and halves after one that is not, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _FIRST, device=device)
        self._finite_steps = torch.zeros((), device=device)

    def advance(self, finite: Tensor) -> None:
        """Learn whether the gradients of a step were finite."""
        self._finite_steps = torch.where(finite, self._finite_steps + 1, torch.zeros_like(self._finite_steps))
        grows = self._finite_steps >= _PATIENCE
        factor = torch.where(finite, 1.0 + grows.float(), torch.full_like(self.value, 0.5))
        changed = self.value * factor
        self.value = torch.where(changed.isfinite(), changed, self.value)  # from infinity there is no way back
        self._finite_steps = torch.where(grows, torch.zeros_like(self._finite_steps), self._finite_steps)

    def usable(self) -> Tensor:
        """Say whether a smaller scale can still help."""
        return self.value >= _SMALLEST

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on."""
        return {"value": self.value, "finite_steps": self._finite_steps}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Put it back; a checkpoint of another precision has none."""
        if "value" in state:
            self.value, self._finite_steps = (state[key].to(self.value.device) for key in ("value", "finite_steps"))
