"""Cards for other ViTs of timm with a CLS token: `timm:<architecture>` or `timm:<architecture>.<weights tag>`."""

from __future__ import annotations

import timm
import torch
from timm.models import get_pretrained_cfg, is_model

from tapfm.encoders.card import TIMM_PREFIX, EncoderCard
from tapfm.encoders.vit import check_supported_vit
from tapfm.errors import UnknownNameError, UnsupportedEncoderError

# patterns of the architectures that are suggested for an unknown name, and of those that tapfm does not support
_VIT_NAMES = ["vit_*", "deit*", "eva*", "beit3*", "flexivit*"]
_UNSUPPORTED_NAMES = ["*relpos*", "*gap*", "*siglip*", "*18x2*", "*_xp_*", "*_rpn_*", "*_map_*"]
_UNSUPPORTED_NAMES += ["*enormous*", "vit_pe_*gigantic*"]


def build_timm_card(name: str) -> EncoderCard:
    """Build a card from the configuration in timm; sizes are taken from the model itself."""
    architecture, _, tag = name.partition(".")
    if not is_model(architecture):
        raise UnknownNameError.with_suggestions(
            "timm architecture",
            TIMM_PREFIX + name,
            [TIMM_PREFIX + each for each in timm.list_models(_VIT_NAMES, exclude_filters=_UNSUPPORTED_NAMES)],
            see="the ViTs with a CLS token of python -c 'import timm; print(timm.list_models(\"vit_*\"))'",
        )
    tags = timm.list_pretrained(f"{architecture}.*")
    if tag and name not in tags:
        known = [TIMM_PREFIX + each for each in tags]
        see = ", ".join([*known, f"{TIMM_PREFIX}{architecture} with your own weights file"])
        raise UnknownNameError.with_suggestions("timm model", TIMM_PREFIX + name, known, see=see)
    config = get_pretrained_cfg(name, allow_unregistered=True)
    try:
        with torch.device("meta"):
            # 'token' applies the final norm to the CLS token
            model = timm.create_model(architecture, pretrained=False, num_classes=0, global_pool="token")
        check_supported_vit(model)
    except (TypeError, AssertionError, RuntimeError, UnsupportedEncoderError) as error:
        reason = error.message if isinstance(error, UnsupportedEncoderError) else str(error)
        raise UnsupportedEncoderError(
            f"timm's {architecture} is not supported: {reason}",
            hint="Choose a ViT with a class token, for example timm:vit_small_patch16_224.",
        ) from error
    side = int(model.patch_embed.img_size[0])
    return EncoderCard(
        key=TIMM_PREFIX + name,
        name=name,
        architecture=architecture,
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
        notes="not in the catalogue: metadata from timm",
    )
