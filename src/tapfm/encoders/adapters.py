"""What of an encoder is adapted: all of it, its last blocks, or low-rank adapters (LoRA) beside its linear layers.

A `Scope` is read and checked without torch, so that a settings file can be refused before anything heavy is imported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from tapfm.errors import InputError, SettingError
from tapfm.runtime.seeding import rng_for

if TYPE_CHECKING:
    from torch import nn

    from tapfm.encoders.vit import VitEncoder

_VALID = 'Valid: "full", "last:4" (the last 4 blocks and the final norm), "lora:16" (adapters of rank 16).'
_ALPHA_PER_RANK = 2  # the adapters' sum is scaled by alpha / rank


@dataclass(frozen=True)
class Scope:
    """Which parameters learn; `size` is the number of blocks ("last") or the rank ("lora")."""

    kind: Literal["full", "last", "lora"]
    size: int | None = None

    def __post_init__(self) -> None:
        valid = self.size is None if self.kind == "full" else self.size is not None and self.size >= 1
        if self.kind not in ("full", "last", "lora") or not valid:
            raise SettingError(f"There is no scope of adaptation '{self}'.", hint=_VALID)

    @classmethod
    def parse(cls, text: str) -> Scope:
        """Read "full", "last:n" or "lora:r"."""
        match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,6}))?", text)
        if match is None:
            raise SettingError(f"There is no scope of adaptation '{text}'.", hint=_VALID)
        kind, size = match.groups()
        return cls(cast(Any, kind), None if size is None else int(size))  # refuses other kinds itself

    def __str__(self) -> str:
        return self.kind if self.size is None else f"{self.kind}:{self.size}"


def apply_scope(encoder: VitEncoder, scope: Scope, *, seed: int = 0) -> None:
    """Let exactly the scope's parameters learn; adapters are put in so that the features start as they are."""
    if adapted_layers(encoder):
        raise SettingError("The encoder has LoRA adapters already.", hint="Merge them first: merge_adapters(encoder).")
    if scope.kind == "lora" and scope.size is not None:
        _add_adapters(encoder, rank=scope.size, seed=seed)
    elif scope.kind == "last" and scope.size is not None:
        _open_last_blocks(encoder, scope.size)
    else:
        encoder.requires_grad_(True)


def _open_last_blocks(encoder: VitEncoder, blocks: int) -> None:
    """Freeze all but the last blocks and the final norm."""
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
    """Freeze the encoder and put an adapter on every linear layer of its blocks' attention and MLP."""
    import torch

    try:
        import peft
    except ImportError as error:
        raise InputError(
            f"Adaptation by LoRA needs the package peft ({error}).", hint="pip install 'tapfm[lora]'"
        ) from error
    from tapfm.encoders.blocks import at_least_float32

    encoder.requires_grad_(False)
    for block in encoder.vit.blocks:
        if getattr(block.attn, "q_bias", None) is not None:
            # timm would otherwise take the projection's weight, which is the base's, without calling the layer.
            block.attn.qkv_bias_separate = True
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=_ALPHA_PER_RANK * rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=_linear_layers(encoder),
    )
    with torch.random.fork_rng(devices=[]):  # peft draws values of its own, which are not used
        peft.inject_adapter_in_model(settings, encoder.vit)
    for name, layer in adapted_layers(encoder).items():
        for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
            # Small updates would be lost in half precision, which the frozen weights may well have.
            parameter.data = parameter.data.to(at_least_float32(parameter))
        (down,), (up,) = layer.lora_A.parameters(), layer.lora_B.parameters()
        bound = down.shape[1] ** -0.5  # the usual start of a linear layer
        values = rng_for(seed, "lora", name).uniform(-bound, bound, size=tuple(down.shape))
        with torch.no_grad():
            down.copy_(torch.from_numpy(values))
            up.zero_()


def merge_adapters(encoder: VitEncoder) -> None:
    """Fold adapters, if any, into the weights they adapt and take them out: the modules are timm's own again."""
    layers = adapted_layers(encoder)
    for name, layer in layers.items():
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(encoder.vit.get_submodule(parent), child, layer.get_base_layer())
    if layers:
        del encoder.vit.peft_config


def adapted_layers(encoder: VitEncoder) -> dict[str, Any]:
    """Find the layers that carry adapters, by their name in the ViT."""
    return {name: module for name, module in encoder.vit.named_modules() if hasattr(module, "lora_A")}


def _linear_layers(encoder: VitEncoder) -> list[str]:
    """Name the linear layers inside the attention and the MLP of every block."""
    from torch import nn

    return [
        f"blocks.{number}.{part}.{name}"
        for number, block in enumerate(encoder.vit.blocks)
        for part in ("attn", "mlp")
        for name, module in getattr(block, part).named_modules()
        if isinstance(module, nn.Linear)
    ]


def trained_parameters(encoder: VitEncoder) -> dict[str, nn.Parameter]:
    """Name the parameters that learn."""
    return {name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad}
