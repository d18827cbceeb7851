"""Cast the weights of an encoder, and check whether torch.compile can be used on a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from tapfm.encoders.vit import VitEncoder


def cast_weights(encoder: VitEncoder, dtype: torch.dtype) -> None:
    """Cast the ViT's weights, in place: it then computes in `dtype`, without autocast.

    The parameters stay the same objects. Pixels are still normalised, and rotary positions computed, in float32.
    """
    with torch.no_grad():
        for parameter in encoder.vit.parameters():
            parameter.data = parameter.data.to(dtype)


def can_compile_on_gpu(device: torch.device) -> bool:
    """Return whether torch.compile works on this GPU; False for a CPU.

    It needs compute capability 7.0, triton, a C compiler and the Python headers.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < (7, 0):
        return False
    return importlib.util.find_spec("triton") is not None and _can_build_extensions()


def _can_build_extensions() -> bool:
    """Return whether a C compiler and the Python headers exist, which triton needs to build its launchers."""
    if sys.platform == "win32":  # triton for Windows contains a compiler
        return True
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and (Path(headers) / "Python.h").exists()
