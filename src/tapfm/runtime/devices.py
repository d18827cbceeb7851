"""Where to compute, and how precisely. torch is imported when asked, so that help and errors come at once."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tapfm.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    import torch

PRECISIONS = ("auto", "float32", "bfloat16", "float16")


def choose_device(text: str) -> torch.device:
    """Take the device that is named, if it is there; auto is the GPU where there is one."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise InputError(f"'{text}' is not a device.", hint="Devices are auto, cpu, cuda, cuda:0, cuda:1, ...")
    # chunks of many sizes leave gaps in memory otherwise; it counts for those who have not begun with the GPU yet
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda" if gpus else "cpu")
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= gpus:
        there = ", ".join(["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(gpus))])
        raise InputError(
            f"There is no device {text} that torch can use.",
            hint=f"There are: {there}. Why a GPU may be missing: tapfm doctor",
        )
    return device


def choose_precision(text: str, device: torch.device) -> torch.dtype | None:
    """Give the type to compute in, None for float32; auto is bfloat16 where the GPU has it, else float16."""
    check_precision(text)
    import torch

    if text == "float32" or (text == "auto" and device.type == "cpu"):
        return None
    if text == "float16":
        if device.type == "cpu":
            raise InputError("float16 is for GPUs.", hint="On a CPU, use float32 or bfloat16, or auto.")
        return torch.float16
    if device.type == "cuda":
        with torch.cuda.device(device):
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if not has_bfloat16 and text == "auto":
            return torch.float16
        if not has_bfloat16:
            raise InputError(
                f"{torch.cuda.get_device_name(device)} does not compute in bfloat16.",
                hint="Use float16 or float32, or auto.",
            )
    return torch.bfloat16


def set_float32_precision(*, tf32: bool) -> None:
    """Say how a GPU multiplies float32 matrices: exactly, or in TensorFloat-32, which keeps three digits."""
    import torch

    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32  # of the patch embedding, which is a convolution


def check_precision(text: str) -> None:
    """Refuse a precision that does not exist."""
    if text not in PRECISIONS:
        raise UnknownNameError.of("precision", text, PRECISIONS, see=", ".join(PRECISIONS))
