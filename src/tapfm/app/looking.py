"""In which precision a model looks at slides. torch is imported when asked, so that help and errors come at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapfm.app.devices import PRECISIONS, choose_precision
from tapfm.errors import UnknownNameError

if TYPE_CHECKING:
    import torch

    from tapfm.encoders.inference import Precision

LOOKING_PRECISIONS = (*PRECISIONS, "float8")


def check_looking_precision(text: str) -> None:
    """Refuse a precision that does not exist."""
    if text not in LOOKING_PRECISIONS:
        raise UnknownNameError.of("precision", text, LOOKING_PRECISIONS, see=", ".join(LOOKING_PRECISIONS))


def looking_precision(text: str, device: torch.device) -> Precision:
    """Choose what to compute in; auto is bfloat16 where the GPU has it, and never float8."""
    check_looking_precision(text)
    from tapfm.encoders.float8 import refuse_without_float8
    from tapfm.encoders.inference import name_of

    if text == "float8":
        refuse_without_float8(device)
        return "float8"
    return name_of(choose_precision(text, device))
