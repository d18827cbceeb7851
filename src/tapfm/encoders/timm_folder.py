"""An encoder as a folder that timm loads: `timm.create_model("local-dir:DIR", pretrained=True)`.

The same two files make a repository on the hub, for `hf-hub:owner/name`. timm reads the architecture's arguments from
config.json, so that only what JSON can hold may stand there; classes cannot.
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

from tapfm.encoders.adapters import adapted_layers
from tapfm.encoders.blocks import at_least_float32
from tapfm.encoders.card import EncoderCard
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, WeightsError, WeightsMismatchError
from tapfm.runtime.files import UNFINISHED, write_atomically
from tapfm.runtime.seeding import rng_for

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_OURS = "tapfm"  # the part of config.json that timm does not read; also marks the weights as written here
_SWIGLU_ARCHITECTURE = "vit_giant_patch14_dinov2"  # has timm's SwiGLU built in; every size of it can be set
_CHECKED_TILES = 3


def write_timm_folder(
    encoder: VitEncoder, card: EncoderCard, folder: Path, *, about: Mapping[str, Any] | None = None
) -> None:
    """Write weights (float32, timm's names) and configuration; `about` is kept in the configuration for readers."""
    if adapted_layers(encoder):
        raise WeightsError(
            "The encoder has LoRA adapters, which timm's architecture has no place for.",
            hint="Fold them into the weights first: merge_adapters(encoder).",
        )
    refuse_foreign(folder)
    config = json.dumps(_timm_config(encoder, card, about or {}), indent=2, allow_nan=False)
    state = {
        name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in encoder.vit.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{WEIGHTS}.{uuid.uuid4().hex[:8]}{UNFINISHED}"
    try:
        save_file(state, unfinished, metadata={"format": "pt", _OURS: card.key})
        unfinished.chmod(0o644)  # safetensors leaves it to its owner alone
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        # Without a configuration nobody loads the folder: whenever this is stopped, old and new are never mixed.
        (folder / CONFIG).unlink(missing_ok=True)
        unfinished.replace(folder / WEIGHTS)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    write_atomically(folder / CONFIG, config.encode())


def refuse_foreign(folder: Path) -> None:
    """Refuse to write over a model that was not written here, or over a file."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder.", hint="Give another folder.")
    if not _written_here(folder):
        raise InputError(f"{folder} holds a model that tapfm did not write.", hint="Give another folder.")


def _written_here(folder: Path) -> bool:
    """Say whether the model in the folder, if any, is one that this module wrote, perhaps not to its end."""
    if (folder / CONFIG).exists():
        return _OURS in _read_config(folder / CONFIG)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return _OURS in (file.metadata() or {})
    except FileNotFoundError:
        return True
    except SafetensorError:
        return False


def _read_config(config: Path) -> dict[str, Any]:
    """Read a config.json; one that is no table of values counts as empty."""
    try:
        facts = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _timm_config(encoder: VitEncoder, card: EncoderCard, about: Mapping[str, Any]) -> dict[str, Any]:
    """What timm needs to build the encoder and to prepare its pixels, and what a reader should know."""
    vit, side = encoder.vit, encoder.tile_px
    arguments = {name: value for name, value in card.arguments.items() if name not in ("mlp", "layer_norm_eps")}
    swiglu = card.arguments.get("mlp") == "swiglu"
    ours = {
        "encoder": card.key,
        "feature": encoder.feature,
        "tile_px": side,
        "mpp": list(card.mpp),
        "layer_norm_eps": card.arguments.get("layer_norm_eps"),  # timm's own where it is null
    }
    return {
        "architecture": _SWIGLU_ARCHITECTURE if swiglu else card.architecture,
        "num_classes": 0,
        "num_features": int(vit.num_features),
        "global_pool": "token",
        "model_args": (arguments | _sizes_of(vit) if swiglu else arguments)
        | {"img_size": side, "global_pool": "token"},
        "pretrained_cfg": {
            "tag": _OURS,
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
        _OURS: ours | dict(about),
    }


def _sizes_of(vit: Any) -> dict[str, Any]:
    """Every size of a ViT with a SwiGLU, so that nothing of the architecture that stands in for it is left."""
    block = vit.blocks[0]
    return {
        "patch_size": int(vit.patch_embed.patch_size[0]),
        "embed_dim": int(vit.embed_dim),
        "depth": len(vit.blocks),
        "num_heads": int(block.attn.num_heads),
        # timm rounds width x ratio down: half a unit more gives the size back whatever the division does
        "mlp_ratio": (block.mlp.fc1.out_features + 0.5) / int(vit.embed_dim),
        "init_values": None if isinstance(block.ls1, nn.Identity) else 1e-5,
        "reg_tokens": int(vit.num_reg_tokens),
        "no_embed_class": bool(vit.no_embed_class),
    }


def timm_arguments(card: EncoderCard) -> str:
    """Python text of the arguments that timm must be given besides the folder, or nothing; for the model card."""
    eps = card.arguments.get("layer_norm_eps")
    return "" if eps is None else f"norm_layer=functools.partial(torch.nn.LayerNorm, eps={eps!r})"


def check_timm_folder(folder: Path, encoder: VitEncoder) -> None:
    """Load the folder with timm and compare what it says of a few random tiles with what the encoder says."""
    eps = _read_config(folder / CONFIG).get(_OURS, {}).get("layer_norm_eps")
    classes = {} if eps is None else {"norm_layer": partial(nn.LayerNorm, eps=eps)}
    try:
        loaded: Any = timm.create_model(f"local-dir:{folder}", pretrained=True, **classes)
    except Exception as error:  # whatever timm says of a folder it cannot load is the finding
        raise WeightsMismatchError(
            f"timm does not load {folder}: {type(error).__name__}: {error}", hint="Write the folder again."
        ) from error
    weight = encoder.vit.patch_embed.proj.weight
    loaded = loaded.to(weight.device, weight.dtype).eval()
    side = encoder.tile_px
    pixels = rng_for("timm folder").integers(0, 256, size=(_CHECKED_TILES, 3, side, side), dtype="uint8")
    tiles = torch.from_numpy(pixels).to(weight.device)
    was_training = encoder.training
    try:
        with torch.no_grad():
            expected = encoder.eval()(tiles).z_KD
            found = _timm_features(loaded, tiles, feature=encoder.feature)
    finally:
        encoder.train(was_training)
    tolerance = 1e-4 if at_least_float32(weight) == weight.dtype else 5e-2
    difference = float((found - expected).norm() / expected.norm()) if found.shape == expected.shape else float("inf")
    if not difference < tolerance:
        raise WeightsMismatchError(
            f"timm loads {folder}, but its features differ from the encoder's by {difference:.2g} of their size.",
            hint="Write the folder again; if it stays so, this timm builds the architecture differently: tapfm doctor.",
        )


def _timm_features(loaded: Any, tiles: Tensor, *, feature: str) -> Tensor:
    """Features as somebody without tapfm computes them: timm's forward pass and the folder's own pixel statistics."""
    facts = timm.data.resolve_model_data_config(loaded)
    mean, std = (torch.tensor(facts[name], device=tiles.device).view(1, 3, 1, 1) for name in ("mean", "std"))
    dtype = loaded.patch_embed.proj.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    tokens = loaded.forward_features(((tiles.to(wide) / 255 - mean) / std).to(dtype))
    features = tokens[:, 0]
    if feature == "cls+mean":
        features = torch.cat([features, tokens[:, loaded.num_prefix_tokens :].mean(1)], dim=1)
    return features.to(wide)
