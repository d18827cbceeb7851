"""Linear layers computed in float8 (e4m3), for inference only: a GPU multiplies them faster than bfloat16.

A float8 number has three bits behind its first one, and a range of a few hundred: each row of weights, and each token
on its way into a layer, is scaled so that its largest value is the largest there is. Products come out in the type of
what went in. The last block stays as it is: the raw attention is made of its queries and keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
_MULTIPLE = 16  # sizes that a GPU's float8 products take
_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


class _Float8Linear(nn.Module):
    """An `nn.Linear` whose weights were rounded to float8 once, and whose input is rounded token by token."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, scale = _rounded(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last dimension, as `nn.Linear` does."""
        values, scale = _rounded(x.flatten(0, -2))
        if x.is_cuda:
            out = torch._scaled_mm(
                values, self.weight.t(), scale, self.scale.t(), self.bias, out_dtype=x.dtype, use_fast_accum=True
            )
        else:  # the same numbers, slowly: for tests
            out = ((values.float() * scale) @ (self.weight.float() * self.scale).t()).to(x.dtype)
            out = out if self.bias is None else out + self.bias
        return out.unflatten(0, x.shape[:-1])


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to float8; gives the rounded values, and the scales (rows, 1) to multiply them by."""
    wide = rows.float()
    # a row of zeros has no largest value; nor may its scale be too small to divide by
    scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-12) / _LARGEST
    # clamped, as what rounds beyond the largest value would be no number
    return (wide / scale).clamp(-_LARGEST, _LARGEST).to(_FLOAT8), scale


def use_float8(encoder: VitEncoder) -> int:
    """Put float8 layers in place of the linear layers of all blocks but the last; says how many.

    The encoder is lowered to bfloat16 before, which everything else of it stays in.
    """
    found = [
        (module, name, layer)
        for block in encoder.vit.blocks[:-1]
        for half in (block.attn, block.mlp)
        for module in half.modules()
        for name, layer in module.named_children()
        if type(layer) is nn.Linear and layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0
    ]
    for module, name, layer in found:
        setattr(module, name, _Float8Linear(layer))
    return len(found)


def refuse_without_float8(device: torch.device) -> None:
    """Refuse a device that does not multiply float8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "A CPU"
    least = ".".join(map(str, _CAPABILITY))
    raise InputError(
        f"{name} does not compute in float8.",
        hint=f"That takes a GPU of compute capability {least} or later (Ada, Hopper). Leave --precision out, or give "
        "bfloat16.",
    )
