"""Time functions that run on a device, with warm-up and synchronisation, and handle out-of-memory errors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from tapfm.errors import TapfmError
from tapfm.runtime.device_memory import release_cached_memory, unify_memory_errors

GIB = 2**30
Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """Median duration of the repeats after the first run."""

    seconds: float
    repeats: int
    first_s: float

    @property
    def warmup_s(self) -> float:
        """How much longer the first run took, for example because of compilation."""
        return max(0.0, self.first_s - self.seconds)


def time_repeated(
    function: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float,
    min_repeats: int = 3,
    max_repeats: int = 50,
    before_repeats: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Run a function once, then repeat it for about `budget_s` seconds.

    before_repeats: called after the first run.
    """

    def time_once() -> float:
        start = clock()
        function()
        _synchronise(device)
        return clock() - start

    _synchronise(device)
    first_s = time_once()
    before_repeats()
    seconds: list[float] = []
    while len(seconds) < min_repeats or (len(seconds) < max_repeats and sum(seconds) < budget_s):
        seconds.append(time_once())
    return Timing(statistics.median(seconds), len(seconds), first_s)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Return the peak memory of tensors since `reset_peak_memory`. None without a GPU."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def catch_out_of_memory(function: Callable[[], Result], device: torch.device) -> Result | None:
    """Return the result of a function, or None if it ran out of memory. Releases cached memory in both cases."""
    try:
        with unify_memory_errors():
            return function()
    except (RuntimeError, MemoryError, TapfmError) as error:
        if not _is_out_of_memory(error):
            raise
    finally:
        release_cached_memory(device)
    release_cached_memory(device)  # again, because the exception referenced the tensors until here
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error or its cause is an out-of-memory error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no exception class for out of memory on a CPU
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    return error.__cause__ is not None and _is_out_of_memory(error.__cause__)
