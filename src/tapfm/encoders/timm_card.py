"""A card for any ViT that timm knows: `timm:<architecture>` or `timm:<architecture>.<weights tag>`."""

from __future__ import annotations

import timm
import torch
from timm.models import get_pretrained_cfg, is_model

from tapfm.encoders.catalog import TIMM_PREFIX, EncoderCard
from tapfm.errors import UnknownNameError, UnsupportedEncoderError


def card_for_timm(name: str) -> EncoderCard:
    """Build the card from timm's own configuration; counts come from the architecture itself."""
    architecture, _, _ = name.partition(".")
    if not is_model(architecture):
        raise UnknownNameError(
            "timm architecture",
            name,
            timm.list_models("*vit*"),
            see="python -c 'import timm; print(timm.list_models())'",
        )
    config = get_pretrained_cfg(name, allow_unregistered=True)
    with torch.device("meta"):
        model = timm.create_model(architecture, pretrained=False, num_classes=0)
    if getattr(model, "blocks", None) is None or getattr(model, "cls_token", None) is None:
        raise UnsupportedEncoderError(
            f"timm's {architecture} ({type(model).__name__}) has no CLS token in front of a stack of blocks, "
            "so there is no CLS attention to weigh tiles with.",
            hint="Choose a ViT with a class token, for example timm:vit_small_patch16_224.",
        )
    side = int(model.patch_embed.img_size[0])
    return EncoderCard(
        key=TIMM_PREFIX + name,
        name=name,
        architecture=architecture,
        # 'token' keeps the final norm where the CLS feature is taken
        arguments={"global_pool": "token"},
        parameters=sum(p.numel() for p in model.parameters()),
        prefix_tokens=int(model.num_prefix_tokens),
        feature="cls",
        feature_size=int(model.embed_dim),
        mean=tuple(config.mean),
        std=tuple(config.std),
        tile_px=side,
        position_px=side,
        mpp=(),
        gflops=None,
        precision="fp32",
        licence=str(config.license or "see its hub page"),
        gate="none",
        repository=str(config.hf_hub_id or ""),
        file="model.safetensors",
        notes="not from the catalogue: facts as timm states them",
    )
