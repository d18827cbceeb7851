"""Write an encoder as a folder that timm can load: `timm.create_model("local-dir:DIR", pretrained=True)`.

The same two files are a model repository for the Hugging Face Hub (`hf-hub:owner/name`). timm reads the arguments of
the architecture from config.json, so they can only be JSON values, not classes.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tapfm.encoders.adapters import find_lora_layers
from tapfm.encoders.blocks import at_least_float32
from tapfm.encoders.card import EncoderCard
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, WeightsError, WeightsMismatchError
from tapfm.runtime.files import UNFINISHED_SUFFIX, write_atomically
from tapfm.runtime.seeding import make_rng

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_TAPFM_KEY = "tapfm"  # key in config.json, which timm ignores, and in the header of the weights
_SWIGLU_ARCHITECTURE = "vit_giant_patch14_dinov2"  # has a SwiGLU by default, and all of its sizes can be set
_CHECKED_TILES = 3


def write_timm_folder(
    encoder: VitEncoder, card: EncoderCard, folder: Path, *, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write weights (float32, timm's names) and config.json; `metadata` is added to its "tapfm" entry."""
    if find_lora_layers(encoder):
        raise WeightsError(
            "The encoder has LoRA adapters, which the timm architecture does not have.",
            hint="Merge them into the weights first: merge_adapters(encoder).",
        )
    check_replaceable_model(folder)
    config = json.dumps(_build_timm_config(encoder, card, metadata or {}), indent=2, allow_nan=False)
    state = {
        name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in encoder.vit.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{WEIGHTS_FILE}.{uuid.uuid4().hex[:8]}{UNFINISHED_SUFFIX}"
    try:
        save_file(state, unfinished, metadata={"format": "pt", _TAPFM_KEY: card.key})
        unfinished.chmod(0o644)  # safetensors makes it readable by its owner only
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        # Without config.json the folder cannot be loaded, so an interruption never mixes old and new files.
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        unfinished.replace(folder / WEIGHTS_FILE)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    write_atomically(folder / CONFIG_FILE, config.encode())


def check_replaceable_model(folder: Path) -> None:
    """Raise InputError if the folder is a file or contains a model that tapfm did not write."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder.", hint="Choose another folder.")
    if not _is_replaceable(folder):
        raise InputError(f"{folder} contains a model that tapfm did not write.", hint="Choose another folder.")


def _is_replaceable(folder: Path) -> bool:
    """Return whether the folder has no model, or one that this module wrote, complete or not."""
    if (folder / CONFIG_FILE).exists():
        return _TAPFM_KEY in _read_config(folder / CONFIG_FILE)
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            return _TAPFM_KEY in (file.metadata() or {})
    except FileNotFoundError:
        return True
    except SafetensorError:
        return False


def _read_config(config: Path) -> dict[str, Any]:
    """Read a config.json; return an empty dict if it cannot be read or is not a JSON object."""
    try:
        content = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _build_timm_config(encoder: VitEncoder, card: EncoderCard, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json: architecture and preprocessing for timm, and metadata for tapfm."""
    vit, side = encoder.vit, encoder.tile_px
    arguments = {name: value for name, value in card.arguments.items() if name not in ("mlp", "layer_norm_eps")}
    swiglu = card.arguments.get("mlp") == "swiglu"
    ours = {
        "encoder": card.key,
        "feature": encoder.feature,
        "tile_px": side,
        "mpp": list(card.mpp),
        "layer_norm_eps": card.arguments.get("layer_norm_eps"),  # null: the default of timm
    }
    return {
        "architecture": _SWIGLU_ARCHITECTURE if swiglu else card.architecture,
        "num_classes": 0,
        "num_features": int(vit.num_features),
        "global_pool": "token",
        "model_args": (arguments | _swiglu_sizes(vit) if swiglu else arguments)
        | {"img_size": side, "global_pool": "token"},
        "pretrained_cfg": {
            "tag": _TAPFM_KEY,
            "custom_load": False,
            "input_size": [3, side, side],
            "fixed_input_size": not getattr(vit, "dynamic_img_size", False),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(card.mean),
            "std": list(card.std),
            "num_classes": 0,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "license": card.licence,
        },
        _TAPFM_KEY: ours | dict(metadata),
    }


def _swiglu_sizes(vit: Any) -> dict[str, Any]:
    """Return all sizes of a ViT with a SwiGLU, to override every default of `_SWIGLU_ARCHITECTURE`."""
    block = vit.blocks[0]
    return {
        "patch_size": int(vit.patch_embed.patch_size[0]),
        "embed_dim": int(vit.embed_dim),
        "depth": len(vit.blocks),
        "num_heads": int(block.attn.num_heads),
        # timm rounds width x ratio down; adding 0.5 here makes it return the exact size
        "mlp_ratio": (block.mlp.fc1.out_features + 0.5) / int(vit.embed_dim),
        "init_values": None if isinstance(block.ls1, nn.Identity) else 1e-5,
        "reg_tokens": int(vit.num_reg_tokens),
        "no_embed_class": bool(vit.no_embed_class),
    }


def extra_timm_arguments(card: EncoderCard) -> str:
    """Return additional arguments for timm.create_model as Python code, or an empty string; for the model card."""
    eps = card.arguments.get("layer_norm_eps")
    return "" if eps is None else f"norm_layer=functools.partial(torch.nn.LayerNorm, eps={eps!r})"


def check_timm_folder(folder: Path, encoder: VitEncoder) -> None:
    """Load the folder with timm and compare the features of random tiles. Raises WeightsMismatchError."""
    eps = _read_config(folder / CONFIG_FILE).get(_TAPFM_KEY, {}).get("layer_norm_eps")
    extra = {} if eps is None else {"norm_layer": partial(nn.LayerNorm, eps=eps)}
    try:
        loaded: Any = timm.create_model(f"local-dir:{folder}", pretrained=True, **extra)
    except Exception as error:  # timm raises many kinds of errors
        raise WeightsMismatchError(
            f"timm cannot load {folder}: {type(error).__name__}: {error}", hint="Export again."
        ) from error
    weight = encoder.vit.patch_embed.proj.weight
    loaded = loaded.to(weight.device, weight.dtype).eval()
    side = encoder.tile_px
    pixels = make_rng("timm folder").integers(0, 256, size=(_CHECKED_TILES, 3, side, side), dtype="uint8")
    tiles = torch.from_numpy(pixels).to(weight.device)
    was_training = encoder.training
    try:
        with torch.no_grad():
            expected = encoder.eval()(tiles).z_KD
            found = _compute_timm_features(loaded, tiles, feature=encoder.feature)
    finally:
        encoder.train(was_training)
    tolerance = 1e-4 if at_least_float32(weight) == weight.dtype else 5e-2
    difference = float((found - expected).norm() / expected.norm()) if found.shape == expected.shape else float("inf")
    if not difference < tolerance:
        raise WeightsMismatchError(
            f"timm loads {folder}, but its features differ from the encoder's (relative error {difference:.2g}).",
            hint="Export again. If the error persists, the installed timm builds the architecture differently: install "
            "another version of timm.",
        )


def _compute_timm_features(loaded: Any, tiles: Tensor, *, feature: str) -> Tensor:
    """Compute features without tapfm: timm's forward pass, and mean and std from the folder."""
    data_config = timm.data.resolve_model_data_config(loaded)
    mean, std = (torch.tensor(data_config[name], device=tiles.device).view(1, 3, 1, 1) for name in ("mean", "std"))
    dtype = loaded.patch_embed.proj.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    tokens = loaded.forward_features(((tiles.to(wide) / 255 - mean) / std).to(dtype))
    features = tokens[:, 0]
    if feature == "cls+mean":
        features = torch.cat([features, tokens[:, loaded.num_prefix_tokens :].mean(1)], dim=1)
    return features.to(wide)
