"""Weights in low precision, and whether torch can compile for a device."""

from __future__ import annotations

import importlib.util

import torch

from tapfm.encoders.vit import VitEncoder


def lower(encoder: VitEncoder, dtype: torch.dtype) -> None:
    """Cast the ViT's weights, in place: it then computes in `dtype`, without autocast.

    The parameters stay the same objects. Pixels are still normalised, and rotary positions computed, in float32.
    """
    with torch.no_grad():
        for parameter in encoder.vit.parameters():
            parameter.data = parameter.data.to(dtype)


def can_compile(device: torch.device) -> bool:
    """Say whether compiled blocks are faster there: on a GPU, where torch has found its compiler."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
