"""Choose the precision of inference. torch is imported only when needed, so that help and errors appear quickly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapfm.errors import UnknownNameError
from tapfm.runtime.devices import PRECISIONS, choose_autocast_dtype

if TYPE_CHECKING:
    import torch

    from tapfm.encoders.inference import Precision

_INFERENCE_PRECISIONS = (*PRECISIONS, "float8")


def check_inference_precision(precision: str) -> None:
    if precision not in _INFERENCE_PRECISIONS:
        raise UnknownNameError.with_suggestions(
            "precision", precision, _INFERENCE_PRECISIONS, see=", ".join(_INFERENCE_PRECISIONS)
        )


def choose_inference_precision(precision: str, device: torch.device) -> Precision:
    """Return the precision to use; "auto" is bfloat16 if the GPU supports it, and never float8."""
    check_inference_precision(precision)
    from tapfm.encoders.float8 import check_float8_support
    from tapfm.encoders.inference import precision_name

    if precision == "float8":
        check_float8_support(device)
        return "float8"
    return precision_name(choose_autocast_dtype(precision, device))
