"""Select which encoder parameters are trained: all, the last blocks, or low-rank adapters (LoRA) on linear layers.

`Scope` does not import torch, so a configuration can be checked quickly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from tapfm.errors import InputError, SettingError
from tapfm.runtime.seeding import make_rng

if TYPE_CHECKING:
    from torch import nn

    from tapfm.encoders.vit import VitEncoder

_VALID_SCOPES = (
    'Valid: "full", "last:N" (the last N blocks and the final norm) or "lora:R" (LoRA adapters of rank R), for '
    'example "last:4" or "lora:16".'
)
_ALPHA_PER_RANK = 2  # LoRA scales the output of its adapters by alpha / rank


@dataclass(frozen=True)
class Scope:
    """The trainable part of an encoder; `size` is the number of blocks ("last") or the rank ("lora")."""

    kind: Literal["full", "last", "lora"]
    size: int | None = None

    def __post_init__(self) -> None:
        valid = self.size is None if self.kind == "full" else self.size is not None and self.size >= 1
        if self.kind not in ("full", "last", "lora") or not valid:
            raise SettingError(f"Unknown adaptation scope '{self}'.", hint=_VALID_SCOPES)

    @classmethod
    def parse(cls, text: str) -> Scope:
        """Parse "full", "last:N" or "lora:R"."""
        match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,6}))?", text)
        if match is None:
            raise SettingError(f"Unknown adaptation scope '{text}'.", hint=_VALID_SCOPES)
        kind, size = match.groups()
        return cls(cast(Any, kind), None if size is None else int(size))  # raises SettingError for other kinds

    def __str__(self) -> str:
        return self.kind if self.size is None else f"{self.kind}:{self.size}"


def apply_scope(encoder: VitEncoder, scope: Scope, *, seed: int = 0) -> None:
    """Make exactly the parameters in the scope trainable.

    New LoRA adapters do not change the features until they are trained.
    """
    if find_lora_layers(encoder):
        raise SettingError("The encoder already has LoRA adapters.", hint="Merge them first: merge_adapters(encoder).")
    if scope.kind == "lora" and scope.size is not None:
        _add_adapters(encoder, rank=scope.size, seed=seed)
    elif scope.kind == "last" and scope.size is not None:
        _unfreeze_last_blocks(encoder, scope.size)
    else:
        encoder.requires_grad_(True)


def _unfreeze_last_blocks(encoder: VitEncoder, blocks: int) -> None:
    """Freeze everything except the last blocks and the final norm."""
    depth = len(encoder.vit.blocks)
    if blocks > depth:
        raise SettingError(
            f"The last {blocks} blocks cannot be adapted: this encoder has {depth}.",
            hint=f'Valid: "last:1" to "last:{depth}", or "full".',
        )
    encoder.requires_grad_(False)
    encoder.vit.blocks[-blocks:].requires_grad_(True)
    encoder.vit.norm.requires_grad_(True)


def _add_adapters(encoder: VitEncoder, *, rank: int, seed: int) -> None:
    """Freeze the encoder and add an adapter to every linear layer in the attention and MLP of each block."""
    import torch

    try:
        import peft
    except ImportError as error:
        raise InputError(
            f"LoRA adaptation needs the package peft ({error}).", hint="Install it: pip install peft"
        ) from error
    from tapfm.encoders.blocks import at_least_float32

    encoder.requires_grad_(False)
    for block in encoder.vit.blocks:
        if getattr(block.attn, "q_bias", None) is not None:
            # Otherwise timm uses the base weight directly and does not call the adapted layer.
            block.attn.qkv_bias_separate = True
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=_ALPHA_PER_RANK * rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=_linear_layer_names(encoder),
    )
    with torch.random.fork_rng(devices=[]):  # peft draws initial values that are replaced below
        peft.inject_adapter_in_model(settings, encoder.vit)
    for name, layer in find_lora_layers(encoder).items():
        for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
            # The frozen weights may be in half precision, where small updates would be lost.
            parameter.data = parameter.data.to(at_least_float32(parameter))
        (down,), (up,) = layer.lora_A.parameters(), layer.lora_B.parameters()
        bound = down.shape[1] ** -0.5  # the default initialisation of nn.Linear
        values = make_rng(seed, "lora", name).uniform(-bound, bound, size=tuple(down.shape))
        with torch.no_grad():
            down.copy_(torch.from_numpy(values))
            up.zero_()


def merge_adapters(encoder: VitEncoder) -> None:
    """Merge adapters, if any, into the base weights and restore timm's own modules."""
    layers = find_lora_layers(encoder)
    for name, layer in layers.items():
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(encoder.vit.get_submodule(parent), child, layer.get_base_layer())
    if layers:
        del encoder.vit.peft_config


def find_lora_layers(encoder: VitEncoder) -> dict[str, Any]:
    """Return the layers with LoRA adapters, by their name in the ViT."""
    return {name: module for name, module in encoder.vit.named_modules() if hasattr(module, "lora_A")}


def _linear_layer_names(encoder: VitEncoder) -> list[str]:
    """Return the names of the linear layers in the attention and MLP of every block."""
    from torch import nn

    return [
        f"blocks.{number}.{part}.{name}"
        for number, block in enumerate(encoder.vit.blocks)
        for part in ("attn", "mlp")
        for name, module in getattr(block, part).named_modules()
        if isinstance(module, nn.Linear)
    ]


def trainable_parameters(encoder: VitEncoder) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad}
