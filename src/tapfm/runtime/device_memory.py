"""A device's memory: one error for its end, whoever notices it, and giving back what is no longer used."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tapfm.errors import DeviceMemoryError

# cuBLAS, cuDNN (since version 9) and what loads kernels take memory of their own, and tell otherwise than torch that
# there is none
_OUT_OF_MEMORY_MESSAGES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
)


@contextmanager
def unify_memory_errors() -> Iterator[None]:
    """Let memory that ends in a library be told as torch tells it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY_MESSAGES):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


@contextmanager
def memory_for_loading(device: torch.device) -> Iterator[None]:
    """Turn running out of memory while a model is loaded into an error with a hint."""
    try:
        with unify_memory_errors():
            yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{device} is out of memory while the model is loaded.",
            hint="Free memory on it, or use another device: --device cpu",
        ) from error


def free_memory(device: torch.device) -> None:
    """Give back what is no longer used."""
    gc.collect()  # a graph may be part of a circle
    if device.type == "cuda":
        torch.cuda.empty_cache()
