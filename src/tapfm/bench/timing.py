"""Time taken by work on a device: warmed up, waited for, repeated; and the memory that it took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from tapfm.errors import TapfmError
from tapfm.runtime.device_memory import convert_memory_errors, free_memory

GIB = 2**30
Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """The median of some repeats, after a first time that may compile and allocate."""

    seconds: float
    repeats: int
    first_s: float

    @property
    def began_s(self) -> float:
        """How much longer the first time took."""
        return max(0.0, self.first_s - self.seconds)


def time_repeated(
    work: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float,
    least: int = 3,
    most: int = 50,
    before_repeats: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Do it once, then again and again for about `budget_s`."""

    def once() -> float:
        start = clock()
        work()
        _wait_for(device)
        return clock() - start

    _wait_for(device)
    first_s = once()
    before_repeats()
    taken: list[float] = []
    while len(taken) < least or (len(taken) < most and sum(taken) < budget_s):
        taken.append(once())
    return Timing(statistics.median(taken), len(taken), first_s)


def _wait_for(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Measure the peak of memory from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Give the most memory that tensors have had; only a GPU tells it."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def within_memory(work: Callable[[], Result], device: torch.device) -> Result | None:
    """Do it, and clean up; None where memory did not suffice."""
    try:
        with convert_memory_errors():
            return work()
    except (RuntimeError, MemoryError, TapfmError) as error:
        if not _is_out_of_memory(error):
            raise
    finally:
        free_memory(device)
    free_memory(device)  # once more: until here, the error held on to what had been allocated
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell memory that did not suffice, also as the cause of an error, from other failures."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # on a CPU it has no class of its own
        return True
    return error.__cause__ is not None and _is_out_of_memory(error.__cause__)
