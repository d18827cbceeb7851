"""Convert checkpoints of other libraries to the keys and tensors of timm.

The format is recognised by the keys. Query, key and value are joined. In DINOv2 with registers, the position embedding
of the CLS token is added to that token. Only tensors whose keys match `_NON_ENCODER_KEYS` are dropped, and nothing is
resampled. `weights.py` raises an error if the result does not match the encoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tapfm.errors import WeightsMismatchError

StateDict = dict[str, Tensor]

# Wrappers around the weights of the encoder: dictionaries of training scripts, then prefixes of their keys.
_WRAPPERS = ("teacher", "model", "state_dict")
_PREFIXES = ("module.", "backbone.", "vit.", "dinov2.", "dinov2_with_registers.", "encoder.")

# Tensors that only pretraining or classification needs.
_NON_ENCODER_KEYS = re.compile(r"(mask_token$|head\.|head_dist\.|dino_head\.|ibot_head\.|pooler\.|classifier\.)")

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


def convert_to_timm(checkpoint: Mapping[str, Any]) -> StateDict:
    """Convert a loaded checkpoint, wrapped or not, in any of the known formats, to timm's keys."""
    state = _strip_prefixes(_unwrap(checkpoint))
    if "embeddings.cls_token" in state:
        state = _convert_transformers_keys(state)
    state = _convert_dinov2_keys(state)
    return {name: value for name, value in state.items() if not _NON_ENCODER_KEYS.match(name)}


def _unwrap(checkpoint: Mapping[str, Any]) -> StateDict:
    """Return the tensors inside the dictionaries of training scripts."""
    for wrapper in _WRAPPERS:
        inner = checkpoint.get(wrapper)
        if isinstance(inner, Mapping):
            return _unwrap(inner)
    other = [
        str(name) for name, value in checkpoint.items() if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if other or not checkpoint:
        problem = f"has other entries: {', '.join(other[:3])}" if other else "is empty"
        raise WeightsMismatchError(
            f"The checkpoint is not a dictionary of tensors: it {problem}.",
            hint=f"Save the state_dict() of the encoder, alone or under one of the keys {', '.join(_WRAPPERS)}.",
        )
    return dict(checkpoint)


def _strip_prefixes(state: StateDict) -> StateDict:
    """Strip prefixes that all keys of the encoder share ('module.', 'backbone.', ...). Keys of heads may lack them."""
    while True:
        inside = [n for n in state if not _NON_ENCODER_KEYS.match(n)]
        prefix = next((p for p in _PREFIXES if inside and all(n.startswith(p) for n in inside)), None)
        if prefix is None:
            return state
        state = {n.removeprefix(prefix): v for n, v in state.items()}


def _convert_transformers_keys(state: StateDict) -> StateDict:
    """Convert the keys of ViT, Dinov2 and Dinov2WithRegisters from the transformers library (`save_pretrained`)."""
    renamed: StateDict = {}
    for name, value in state.items():
        for pattern, replacement in _TRANSFORMERS.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    for name in [n for n in renamed if ".attn.query." in n]:  # timm has one matrix for all three
        parts = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        if all(part in renamed for part in parts):
            renamed[name.replace(".query.", ".qkv.")] = torch.cat([renamed.pop(part) for part in parts])
    return renamed


def _convert_dinov2_keys(state: StateDict) -> StateDict:
    """Convert the keys of Meta's DINOv2 code.

    For models with registers, timm's CLS token includes its position embedding.
    """
    renamed: StateDict = {}
    for name, value in state.items():
        name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)  # blocks in chunks, numbered consecutively
        name = re.sub(r"\.mlp\.w12\.", ".mlp.fc1.", name)
        name = re.sub(r"\.mlp\.w3\.", ".mlp.fc2.", name)
        renamed[name] = value
    if {"register_tokens", "cls_token", "pos_embed"} <= renamed.keys():
        renamed["reg_token"] = renamed.pop("register_tokens")
        renamed["cls_token"] = renamed["cls_token"] + renamed["pos_embed"][:, :1]
        renamed["pos_embed"] = renamed["pos_embed"][:, 1:]
    return renamed
