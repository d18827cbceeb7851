"""Choose the device and the precision. torch is imported lazily, so that --help and input errors are fast."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tapfm.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    import torch

PRECISIONS = ("auto", "float32", "bfloat16", "float16")


def choose_device(text: str) -> torch.device:
    """Return the device with this name: "auto", "cpu", "cuda" or, for example, "cuda:1".

    "auto" is a GPU if torch can use one, else the CPU. Raises InputError if the device is not available.
    """
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise InputError(f"'{text}' is not a device.", hint="Use auto, cpu, cuda, cuda:0, cuda:1, ...")
    # Reduces fragmentation from chunks of different sizes. Has no effect once CUDA is initialised.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda" if gpus else "cpu")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        available = ", ".join(["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(gpus))])
        raise InputError(
            f"torch cannot use the device {text}.",
            hint=f"Available devices: {available}. To see why a GPU is missing: tapfm doctor",
        )
    return device


def choose_autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype for autocast, or None for float32.

    "auto" is bfloat16 on a GPU that supports it, float16 on other GPUs, and float32 on a CPU.
    Raises InputError if the device does not support the precision.
    """
    check_precision(precision)
    import torch

    if precision == "float32" or (precision == "auto" and device.type == "cpu"):
        return None
    if precision == "float16":
        if device.type == "cpu":
            raise InputError("Precision 'float16' needs a GPU.", hint="Use precision float32, bfloat16 or auto.")
        return torch.float16
    if device.type == "cuda":
        with torch.cuda.device(device):
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if not has_bfloat16 and precision == "auto":
            return torch.float16
        if not has_bfloat16:
            raise InputError(
                f"{torch.cuda.get_device_name(device)} does not support bfloat16.",
                hint="Use precision float16, float32 or auto.",
            )
    return torch.bfloat16


def set_float32_precision(*, tf32: bool) -> None:
    """Set whether float32 matrix products and convolutions use TensorFloat-32.

    TensorFloat-32 is faster, but has only about three significant digits.
    """
    import torch

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32  # for the patch embedding, which is a convolution


def check_precision(precision: str) -> None:
    """Raise UnknownNameError if the precision is unknown."""
    if precision not in PRECISIONS:
        raise UnknownNameError.with_suggestions("precision", precision, PRECISIONS, see=", ".join(PRECISIONS))
