"""From a card to a timm model, without weights."""

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
    """Make the card's architecture for tiles of `tile_px` (default: the card's).

    `extra` goes to timm after the card's own arguments: dropout rates, or the sizes of a small model in tests.
    """
    arguments: dict[str, Any] = {"img_size": tile_px or card.tile_px, "num_classes": 0, "global_pool": "token"}
    arguments |= dict(card.arguments) | dict(extra or {})
    if arguments.pop("mlp", None) == "swiglu":
        # Both are needed: timm's Block hands its own default, GELU, to any MLP, and the weights would load just so.
        arguments |= {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU}
    if (eps := arguments.pop("layer_norm_eps", None)) is not None:
        arguments["norm_layer"] = partial(nn.LayerNorm, eps=eps)
    vit = timm.create_model(card.architecture, pretrained=False, **arguments)
    _check_tile_side(arguments["img_size"], int(vit.patch_embed.patch_size[0]), card)
    for module in vit.modules():
        if isinstance(module, GluMlp) and not isinstance(module.act, nn.SiLU):
            raise UnsupportedEncoderError(
                f"Encoder '{card.key}' came out with a gated MLP activated by {type(module.act).__name__}; "
                "every published one uses SiLU.",
                hint='Give its card `mlp = "swiglu"`.',
            )
    return cast(nn.Module, vit)


def _check_tile_side(tile_px: int, patch_px: int, card: EncoderCard) -> None:
    """Refuse a tile side that is not a whole number of patches."""
    if tile_px <= 0 or tile_px % patch_px:
        below, above = tile_px // patch_px * patch_px, (tile_px // patch_px + 1) * patch_px
        raise TileError(
            f"Tiles of {tile_px} px do not fit encoder '{card.key}', whose patches have {patch_px} px.",
            hint=f"Use its own tile size, {card.tile_px} px, or a multiple of {patch_px}: {below or above} or {above}.",
        )
