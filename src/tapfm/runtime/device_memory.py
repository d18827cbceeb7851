"""Device memory: one exception for the out-of-memory errors of all libraries, and the release of cached memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tapfm.errors import DeviceMemoryError

# cuBLAS, cuDNN (since version 9) and kernel loading allocate their own memory and report failure differently from torch
_OUT_OF_MEMORY_MESSAGES = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "OutOfMemoryError: CUDA out of memory",  # in torch.compile, which raises BackendCompilerFailed with this text
)


@contextmanager
def unify_memory_errors() -> Iterator[None]:
    """Raise out-of-memory errors of CUDA libraries, such as cuBLAS, as `torch.OutOfMemoryError`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(message in str(error) for message in _OUT_OF_MEMORY_MESSAGES):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


@contextmanager
def explain_memory_error(device: torch.device) -> Iterator[None]:
    """Convert an out-of-memory error during model loading to a `DeviceMemoryError` with a hint."""
    try:
        with unify_memory_errors():
            yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{device} ran out of memory while loading the model.",
            hint="Free memory on this device, or use another device, for example --device cpu.",
        ) from error


def release_cached_memory(device: torch.device) -> None:
    """Collect garbage and release the device memory that torch has cached."""
    gc.collect()  # autograd graphs may be part of reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
