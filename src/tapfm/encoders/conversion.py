"""Checkpoint keys of other libraries, rewritten to timm's.

The dialect is told by the keys. Nothing is dropped but the tensors named in `NOT_OF_THE_ENCODER`, and nothing is
resampled here; whatever does not fit afterwards is refused by `weights.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tapfm.errors import WeightsMismatchError

State = dict[str, Tensor]

# Wrappers around the encoder's weights: dictionaries of training scripts, then prefixes of their keys.
_WRAPPERS = ("teacher", "model", "state_dict")
_PREFIXES = ("module.", "backbone.", "vit.", "dinov2.", "dinov2_with_registers.", "encoder.")

# Only pretraining or classification needs these.
_NOT_OF_THE_ENCODER = re.compile(r"(mask_token$|head\.|head_dist\.|dino_head\.|ibot_head\.|pooler\.|classifier\.)")

_TRANSFORMERS = {
    r"^embeddings\.cls_token$": "cls_token",
    r"^embeddings\.mask_token$": "mask_token",
    r"^embeddings\.register_tokens$": "register_tokens",
    r"^embeddings\.position_embeddings$": "pos_embed",
    r"^embeddings\.patch_embeddings\.projection\.": "patch_embed.proj.",
    r"^layernorm\.": "norm.",
    r"^encoder\.layer\.(\d+)\.": r"blocks.\1.",
    r"\.attention\.attention\.(query|key|value)\.": r".attn.\1.",
    r"\.attention\.output\.dense\.": ".attn.proj.",
    r"\.layernorm_before\.": ".norm1.",
    r"\.layernorm_after\.": ".norm2.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"(blocks\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
    r"\.mlp\.weights_in\.": ".mlp.fc1.",
    r"\.mlp\.weights_out\.": ".mlp.fc2.",
    r"\.layer_scale([12])\.lambda1$": r".ls\1.gamma",
}


def to_timm(checkpoint: Mapping[str, Any]) -> State:
    """Rewrite a loaded checkpoint, wrapped or not, in any of the known dialects, to timm's keys."""
    state = _without_prefixes(_unwrapped(checkpoint))
    if "embeddings.cls_token" in state:
        state = _from_transformers(state)
    state = _from_native_dinov2(state)
    return {name: value for name, value in state.items() if not _NOT_OF_THE_ENCODER.match(name)}


def _unwrapped(checkpoint: Mapping[str, Any]) -> State:
    """Take the tensors out of the dictionaries that training scripts put around them."""
    for wrapper in _WRAPPERS:
        inner = checkpoint.get(wrapper)
        if isinstance(inner, Mapping):
            return _unwrapped(inner)
    other = [
        str(name) for name, value in checkpoint.items() if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if other or not checkpoint:
        raise WeightsMismatchError(
            f"The checkpoint is not a plain table of tensors: {other[:3] or 'it is empty'}.",
            hint=f"Known wrappers: {', '.join(_WRAPPERS)}. Save the encoder's state_dict() alone.",
        )
    return dict(checkpoint)


def _without_prefixes(state: State) -> State:
    """Strip what wrappers put before every key ('module.', 'backbone.', ...)."""
    while True:
        inside = [n for n in state if not _NOT_OF_THE_ENCODER.match(n)]
        prefix = next((p for p in _PREFIXES if inside and all(n.startswith(p) for n in inside)), None)
        if prefix is None:
            return state
        state = {n.removeprefix(prefix): v for n, v in state.items()}


def _from_transformers(state: State) -> State:
    """Keys of the transformers library's ViT, Dinov2 and Dinov2WithRegisters, as `save_pretrained` writes them."""
    renamed: State = {}
    for name, value in state.items():
        for pattern, replacement in _TRANSFORMERS.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    for name in [n for n in renamed if ".attn.query." in n]:  # timm keeps the three in one matrix
        parts = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in renamed for part in parts):
            renamed[name.replace(".query.", ".qkv.")] = torch.cat([renamed.pop(part) for part in parts])
    return renamed


def _from_native_dinov2(state: State) -> State:
    """Meta's own DINOv2 keys; timm adds CLS's position to the token itself where there are registers."""
    renamed: State = {}
    for name, value in state.items():
        name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)  # blocks in chunks, numbered through
        name = re.sub(r"\.mlp\.w12\.", ".mlp.fc1.", name)
        name = re.sub(r"\.mlp\.w3\.", ".mlp.fc2.", name)
        renamed[name] = value
    if {"register_tokens", "cls_token", "pos_embed"} <= renamed.keys():
        renamed["reg_token"] = renamed.pop("register_tokens")
        renamed["cls_token"] = renamed["cls_token"] + renamed["pos_embed"][:, :1]
        renamed["pos_embed"] = renamed["pos_embed"][:, 1:]
    return renamed
