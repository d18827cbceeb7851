"""Linear layers in float8 (e4m3), for inference only: GPUs multiply float8 faster than bfloat16.

float8 e4m3 has three mantissa bits and a maximum of 448. Each row of a weight matrix, and each input token of a layer,
is scaled so that its largest value is that maximum. The output has the dtype of the input. The last block is not
converted, because the raw attention is computed from its queries and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError

_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_FLOAT8).max
_SIZE_MULTIPLE = 16  # float8 matrix products need sizes that are multiples of this
_MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


class _Float8Linear(nn.Module):
    """An `nn.Linear` with weights in float8; inputs are converted token by token."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, scale = _quantise_rows(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        values, scale = _quantise_rows(x.flatten(0, -2))
        if x.is_cuda:
            out = torch._scaled_mm(
                values, self.weight.t(), scale, self.scale.t(), self.bias, out_dtype=x.dtype, use_fast_accum=True
            )
        else:  # slow emulation with the same rounding, for tests
            out = ((values.float() * scale) @ (self.weight.float() * self.scale).t()).to(x.dtype)
            out = out if self.bias is None else out + self.bias
        return out.unflatten(0, x.shape[:-1])


def _quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to float8; return the values and the scales (rows, 1) to multiply them by."""
    wide = rows.float()
    # a row of zeros must not get a scale of 0
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / _FLOAT8_MAX
    # values that round beyond the maximum would become NaN
    return (wide / scale).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(_FLOAT8), scale


def convert_to_float8(encoder: VitEncoder) -> int:
    """Replace the linear layers of all blocks except the last by float8 layers; return their number.

    The encoder must be in bfloat16 before; all other layers stay in bfloat16.
    """
    found = [
        (module, name, layer)
        for block in encoder.vit.blocks[:-1]
        for half in (block.attn, block.mlp)
        for module in half.modules()
        for name, layer in module.named_children()
        if type(layer) is nn.Linear
        and layer.in_features % _SIZE_MULTIPLE == 0
        and layer.out_features % _SIZE_MULTIPLE == 0
    ]
    for module, name, layer in found:
        setattr(module, name, _Float8Linear(layer))
    return len(found)


def check_float8_support(device: torch.device) -> None:
    """Raise InputError if the device has no float8 matrix products."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "A CPU"
    least = ".".join(map(str, _MIN_CAPABILITY))
    raise InputError(
        f"{name} does not support float8.",
        hint=f"float8 needs a GPU of compute capability {least} or later (Ada, Hopper). Omit --precision, or use "
        "--precision bfloat16.",
    )
