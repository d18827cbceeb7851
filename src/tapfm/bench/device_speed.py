"""Measure the maximum speed of the device: a large matrix product, and copies from host to GPU memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tapfm.bench.timing import time_repeated

_SIDE = {"cpu": 1024, "cuda": 8192}
_PRODUCTS = {"cpu": 4, "cuda": 16}  # per measurement, so that launching a kernel does not count
_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class MatrixSpeed:
    """Speed of a product of two random square matrices."""

    precision: str
    side: int
    tflops: float


def measure_matrix_product(device: torch.device, dtype: torch.dtype, *, budget_s: float) -> MatrixSpeed:
    """Measure a matrix product. The values are random, because GPUs are faster with zeros."""
    side, products = _SIDE[device.type], _PRODUCTS[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    timing = time_repeated(multiply, device, budget_s=budget_s)
    flop = products * 2 * side**3
    return MatrixSpeed(str(dtype).removeprefix("torch."), side, flop / timing.seconds / 1e12)


def measure_copy_speed(device: torch.device, *, budget_s: float) -> float | None:
    """Return the speed of copies from pinned memory to the GPU in GB/s. None without a GPU."""
    if device.type != "cuda":
        return None
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    timing = time_repeated(lambda: target.copy_(host, non_blocking=True), device, budget_s=budget_s)
    return _COPY_BYTES / timing.seconds / 1e9
