"""A ViT that gives, for each tile, its feature and how much its CLS token attends to patches (eq. 1).

K tiles, N tokens (CLS, registers, patches), H heads, d head size, D feature size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tapfm.contracts import Encoded
from tapfm.encoders.catalog import Feature
from tapfm.errors import SettingError, TileError, UnsupportedEncoderError


class VitEncoder(nn.Module):
    """A timm ViT as a `TileEncoder`.

    Set `checkpoint_blocks` to trade a second forward for memory: each block then keeps only its input.
    """

    vit: Any
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        vit: nn.Module,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        feature: Feature = "cls",
    ) -> None:
        super().__init__()
        refuse_unreadable(vit)
        if feature not in get_args(Feature):
            raise SettingError(f"feature must be one of {', '.join(get_args(Feature))}; got {feature!r}.")
        self.vit = vit
        self.feature = feature
        self.checkpoint_blocks = False
        self.tile_px = int(self.vit.patch_embed.img_size[0])
        self.feature_size = int(self.vit.embed_dim) * (2 if feature == "cls+mean" else 1)
        # They belong to the card, not to the checkpoint. They stand outside `vit` so that its weights can be cast
        # without rounding the pixels.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def forward(self, tiles_K3hw: Tensor) -> Encoded:
        """Encode K uint8 tiles, from any device."""
        self._check(tiles_K3hw)
        x_KND, rope = embed(self.vit, self._normalised(tiles_K3hw))
        *blocks, last = self.vit.blocks
        *ropes, last_rope = rope if getattr(self.vit, "rope_mixed", False) else [rope] * (len(blocks) + 1)
        for block, block_rope in zip(blocks, ropes, strict=True):
            x_KND = self._run(block, x_KND, **({} if block_rope is None else {"rope": block_rope}))
        x_KND, r_K = self._run(
            last_block,
            last,
            x_KND,
            last_rope,
            prefix=self.vit.num_prefix_tokens,
            cls_only=self.feature == "cls",
        )
        x_KND = self.vit.norm(x_KND)
        z_KD = x_KND[:, 0]
        if self.feature == "cls+mean":
            z_KD = torch.cat([z_KD, x_KND[:, self.vit.num_prefix_tokens :].mean(1)], dim=1)
        return Encoded(z_KD.to(at_least_float32(z_KD)), r_K)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (self.checkpoint_blocks and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        # The reentrant form would lose the gradient, without an error, where the first blocks are frozen.
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def _normalised(self, tiles_K3hw: Tensor) -> Tensor:
        pixels = tiles_K3hw.to(self.mean.device, non_blocking=True).to(self.mean.dtype)
        return ((pixels - self.mean) / self.std).to(self.vit.patch_embed.proj.weight.dtype)

    def _check(self, tiles_K3hw: Tensor) -> None:
        if not isinstance(tiles_K3hw, Tensor) or tiles_K3hw.dtype != torch.uint8:
            got = tiles_K3hw.dtype if isinstance(tiles_K3hw, Tensor) else type(tiles_K3hw).__name__
            raise TileError(
                f"Tiles must be a torch tensor of uint8 pixels (0-255); got {got}.",
                hint="Hand over the pixels as they were read: the encoder normalises them itself.",
            )
        shape, side = tuple(tiles_K3hw.shape), self.tile_px
        if len(shape) != 4 or shape[1] != 3 or shape[0] == 0:
            raise TileError(
                f"Tiles must be a stack K x 3 x {side} x {side} with K > 0; got {' x '.join(map(str, shape))}.",
                hint="Colour channels come second: tensor.permute(0, 3, 1, 2) for K x height x width x 3.",
            )
        if shape[2:] != (side, side):
            raise TileError(
                f"Tiles of {shape[3]} x {shape[2]} px do not fit this encoder, which takes {side} x {side} px.",
                hint=f"Read the tiles at {side} px, or load the encoder for another size with tile_px=...",
            )


def embed(vit: Any, pixels_K3hw: Tensor) -> tuple[Tensor, Any]:
    """Patches, CLS and registers with their positions; and the rotary embedding where the ViT has one."""
    x = vit._pos_embed(vit.patch_embed(pixels_K3hw))
    if isinstance(x, tuple):  # Eva: patch dropout, if any, has already been applied
        return vit.norm_pre(x[0]), x[1]
    return vit.norm_pre(vit.patch_drop(x)), None


def last_block(block: Any, x_KND: Tensor, rope: Tensor | None, *, prefix: int, cls_only: bool) -> tuple[Tensor, Tensor]:
    """The last block and r_K; with `cls_only` it goes on for the CLS token alone, which is all that is used of it."""
    attn = block.attn
    inner_KND = block.norm1(x_KND)
    q_KHNd, k_KHNd, v_KHNd = project(attn, inner_KND, rope)
    r_K = raw_attention(q_KHNd[:, :, :1], k_KHNd, scale=attn.scale, prefix=prefix)
    if cls_only:
        q_KHNd, x_KND, inner_KND = q_KHNd[:, :, :1], x_KND[:, :1], inner_KND[:, :1]

    dropout = attn.attn_drop.p if attn.training else 0.0
    heads_KHNd = F.scaled_dot_product_attention(q_KHNd, k_KHNd, v_KHNd, dropout_p=dropout, scale=attn.scale)
    out_KND = attn.norm(heads_KHNd.transpose(1, 2).flatten(2))
    if (gate := getattr(attn, "gate", None)) is not None:
        out_KND = out_KND * gate(inner_KND).sigmoid()
    out_KND = attn.proj_drop(attn.proj(out_KND))

    scale_1, scale_2 = layer_scales(block)
    x_KND = x_KND + block.drop_path1(scale_1(out_KND))
    return x_KND + block.drop_path2(scale_2(block.mlp(block.norm2(x_KND)))), r_K


def raw_attention(q_KH1d: Tensor, k_KHNd: Tensor, *, scale: float, prefix: int) -> Tensor:
    """Eq. 1: the CLS row of the softmax attention, averaged over heads and over patch tokens.

    The softmax runs over all tokens, the mean over patches only: over all tokens it would be the constant 1/N. In
    float32 at least: the spread between tiles is a few percent of r, and bfloat16 would leave a handful of values.
    """
    wide = at_least_float32(q_KH1d)
    with torch.autocast(q_KH1d.device.type, enabled=False):
        logits_KH1N = (q_KH1d.to(wide) * scale) @ k_KHNd.to(wide).transpose(-2, -1)
        return logits_KH1N.softmax(-1)[..., prefix:].mean((1, 2, 3))


def project(attn: Any, x_KND: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the attention module itself makes them, adapters on its layers included."""
    if attn.qkv is not None:
        qkv = attn.qkv(x_KND)
        if getattr(attn, "q_bias", None) is not None:
            qkv = qkv + torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
        q, k, v = qkv.unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        q, k, v = (
            layer(x_KND).unflatten(2, (-1, attn.head_dim)).transpose(1, 2)
            for layer in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        half = getattr(attn, "rotate_half", False)
        still = attn.num_prefix_tokens  # CLS and registers have no place in the tile, so they are not turned
        q, k = (
            torch.cat((x[:, :, :still], apply_rot_embed_cat(x[:, :, still:], rope, half=half)), dim=2).to(v.dtype)
            for x in (q, k)
        )
    if k.shape[1] != q.shape[1]:  # grouped queries: several heads share a key
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return q, k, v


def layer_scales(block: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The two LayerScales of a block, whichever way timm's class stores them."""
    if isinstance(block, Block):
        return block.ls1, block.ls2

    def scaled_by(gamma: Tensor | None) -> Callable[[Tensor], Tensor]:
        return (lambda x: x) if gamma is None else (lambda x: gamma * x)

    return scaled_by(block.gamma_1), scaled_by(block.gamma_2)


def refuse_unreadable(vit: Any) -> None:
    """Only classes whose arithmetic `last_block` repeats exactly are read; all others are refused by name."""
    hint = "Supported: timm's Attention, EvaAttention and AttentionRope inside Block or EvaBlock."
    if getattr(vit, "cls_token", None) is None or getattr(vit, "blocks", None) is None:
        raise UnsupportedEncoderError(
            f"{type(vit).__name__} has no CLS token in front of a stack of blocks.", hint=hint
        )
    block = vit.blocks[-1]
    attn = getattr(block, "attn", None)
    if type(block) not in (Block, EvaBlock) or type(attn) not in (Attention, EvaAttention, AttentionRope):
        raise UnsupportedEncoderError(
            f"The CLS attention of {type(block).__name__} with {type(attn).__name__} cannot be read.",
            hint=hint,
        )
    if not isinstance(getattr(vit, "fc_norm", nn.Identity()), nn.Identity):
        raise UnsupportedEncoderError(
            f"{type(vit).__name__} was built to average its tokens: its final norm is not applied to the CLS token.",
            hint="Build it with global_pool='token'.",
        )


def at_least_float32(x: Tensor) -> torch.dtype:
    """Half precisions widen to float32; float64 stays."""
    return torch.promote_types(x.dtype, torch.float32)
