"""Build the timm model of an encoder card, without pretrained weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import timm
from timm.layers import GluMlp, SwiGLUPacked
from torch import nn

from tapfm.encoders.card import EncoderCard
from tapfm.errors import TileError, UnsupportedEncoderError


def build_vit(card: EncoderCard, *, tile_px: int | None = None, extra: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the architecture of a card for tiles of `tile_px` (default: the tile size of the card).

    `extra`: arguments for timm that override those of the card, such as dropout rates.
    """
    arguments: dict[str, Any] = {"img_size": tile_px or card.tile_px, "num_classes": 0, "global_pool": "token"}
    arguments |= dict(card.arguments) | dict(extra or {})
    if arguments.pop("mlp", None) == "swiglu":
        # Both are needed: timm's Block passes GELU to any MLP by default, and the weights would load without an error.
        arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    if (eps := arguments.pop("layer_norm_eps", None)) is not None:
        arguments["norm_layer"] = partial(nn.LayerNorm, eps=eps)
    vit = timm.create_model(card.architecture, pretrained=False, **arguments)
    _check_tile_size(arguments["img_size"], int(vit.patch_embed.patch_size[0]), card)
    for module in vit.modules():
        if isinstance(module, GluMlp) and not isinstance(module.act, nn.SiLU):
            raise UnsupportedEncoderError(
                f"Encoder '{card.key}' has a gated MLP with the activation {type(module.act).__name__}; "
                "published encoders with a gated MLP use SiLU.",
                hint='Add `mlp = "swiglu"` to the arguments in its card.',
            )
    return cast(nn.Module, vit)


def _check_tile_size(tile_px: int, patch_px: int, card: EncoderCard) -> None:
    """Raise TileError if the tile size is not a multiple of the patch size."""
    if tile_px <= 0 or tile_px % patch_px:
        below = tile_px // patch_px * patch_px
        multiples = [str(px) for px in (below, below + patch_px) if px > 0] or [str(patch_px)]
        raise TileError(
            f"Tiles of {tile_px} px do not match encoder '{card.key}', which has a patch size of {patch_px} px.",
            hint=f"Use its own tile size, {card.tile_px} px, or a multiple of {patch_px}: {' or '.join(multiples)}.",
        )
