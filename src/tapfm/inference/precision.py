"""The precision of inference. torch is imported when needed, so that help and errors come at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapfm.errors import UnknownNameError
from tapfm.runtime.devices import PRECISIONS, choose_precision

if TYPE_CHECKING:
    import torch

    from tapfm.encoders.inference import Precision

_INFERENCE_PRECISIONS = (*PRECISIONS, "float8")


def check_inference_precision(text: str) -> None:
    """Refuse an unknown precision."""
    if text not in _INFERENCE_PRECISIONS:
        raise UnknownNameError.of("precision", text, _INFERENCE_PRECISIONS, see=", ".join(_INFERENCE_PRECISIONS))


def choose_inference_precision(text: str, device: torch.device) -> Precision:
    """Return the precision to compute in; auto is bfloat16 where the GPU has it, and never float8."""
    check_inference_precision(text)
    from tapfm.encoders.float8 import refuse_without_float8
    from tapfm.encoders.inference import precision_name

    if text == "float8":
        refuse_without_float8(device)
        return "float8"
    return precision_name(choose_precision(text, device))
