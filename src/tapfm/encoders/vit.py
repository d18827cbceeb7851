"""A ViT that returns the feature of each tile and its raw attention: how much CLS attends to patches (eq. 1).

K tiles, N tokens (CLS, registers, patches), D width; in z_KD, D is the feature size.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, PatchEmbed
from timm.models.eva import EvaAttention, EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from tapfm.contracts import EncodedTiles
from tapfm.encoders.blocks import Recompute, at_least_float32, run_block, run_last_block
from tapfm.encoders.card import Feature
from tapfm.errors import SettingError, TileError, UnsupportedEncoderError


class VitEncoder(nn.Module):
    """A timm ViT as a `TileEncoder`.

    `recompute` is the activation checkpointing level of each block (see blocks.py).
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
        check_supported_vit(vit)
        if feature not in get_args(Feature):
            raise SettingError(f"feature must be one of {', '.join(get_args(Feature))}; got {feature!r}.")
        self.vit = vit
        self.feature = feature
        no_checkpointing: Recompute = "nothing"
        self.recompute: tuple[Recompute, ...] = (no_checkpointing,) * len(self.vit.blocks)
        self._compiled = False
        self.tile_px = int(self.vit.patch_embed.img_size[0])
        self.feature_size = int(self.vit.embed_dim) * (2 if feature == "cls+mean" else 1)
        # Defined by the card, so not saved in checkpoints. Not part of `vit`, so that casting does not round them.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def forward(self, tiles_K3hw: Tensor) -> EncodedTiles:
        """Encode K uint8 tiles, which may be on any device."""
        self._check(tiles_K3hw)
        # torch would recompile for a single tile
        run = _compile if self._compiled and len(tiles_K3hw) > 1 else _run_eagerly
        tiles_K3hw = tiles_K3hw.to(self.mean.device, non_blocking=True)
        x_KND, rope = run(_embed_tiles)(self.vit, tiles_K3hw, self.mean, self.std)
        depth = len(self.vit.blocks)
        ropes = rope if getattr(self.vit, "rope_mixed", False) else [rope] * depth
        for block, block_rope, recompute in zip(self.vit.blocks[:-1], ropes[:-1], self.recompute[:-1], strict=True):
            x_KND = run(run_block)(block, x_KND, block_rope, recompute)
        prefix, cls_only = self.vit.num_prefix_tokens, self.feature == "cls"
        x_KND, r_K = run(run_last_block)(self.vit.blocks[-1], x_KND, ropes[-1], self.recompute[-1], prefix, cls_only)
        x_KND = self.vit.norm(x_KND)
        z_KD = x_KND[:, 0]
        if self.feature == "cls+mean":
            patches_KND = x_KND[:, self.vit.num_prefix_tokens :]
            z_KD = torch.cat([z_KD, patches_KND.mean(1, dtype=at_least_float32(x_KND))], dim=1)
        return EncodedTiles(z_KD.to(at_least_float32(z_KD)), r_K)

    def compile_blocks(self, enabled: bool = True) -> None:
        """Compile the blocks, for any number of tiles. All except the last share code if they recompute the same."""
        self._compiled = enabled
        if enabled:
            _set_compile_cache()
            _silence_compiler_warnings()
            # several precisions, with and without gradients, levels of recompute, members of an ensemble
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)

    def _check(self, tiles_K3hw: Tensor) -> None:
        if not isinstance(tiles_K3hw, Tensor) or tiles_K3hw.dtype != torch.uint8:
            got = tiles_K3hw.dtype if isinstance(tiles_K3hw, Tensor) else type(tiles_K3hw).__name__
            raise TileError(
                f"Tiles must be a torch tensor of uint8 pixels (0-255); got {got}.",
                hint="Pass the pixels without normalisation: the encoder normalises them.",
            )
        shape, side = tuple(tiles_K3hw.shape), self.tile_px
        if len(shape) != 4 or shape[1] != 3 or shape[0] == 0:
            raise TileError(
                f"Tiles must have the shape K x 3 x {side} x {side} with K > 0; got {' x '.join(map(str, shape))}.",
                hint="Colour channels are the second dimension. Convert K x height x width x 3 with "
                "tensor.permute(0, 3, 1, 2).",
            )
        if shape[2:] != (side, side):
            raise TileError(
                f"Tiles of {shape[3]} x {shape[2]} px do not match this encoder, which takes {side} x {side} px.",
                hint=f"Read the tiles at {side} px, or load the encoder for another tile size: "
                "load_encoder(..., tile_px=...).",
            )


def _set_compile_cache() -> None:
    """Cache compiled code in the user's cache folder; by default torch uses a folder for temporary files."""
    with suppress(OSError, RuntimeError):  # no home folder, or not writable
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapfm" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _silence_compiler_warnings() -> None:
    """Silence warnings about in-place operations (not used), TF32 (set by tapfm) and the algorithm of softmax."""
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for message in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def _run_eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged; the counterpart of `_compile`."""
    return function


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of a module and tiles; one compilation serves any number of tiles."""
    run = torch.compile(function)

    def run_dynamic(module: nn.Module, x: Tensor, *rest: Any) -> Any:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return run(module, x, *rest)

    return run_dynamic


def _embed_tiles(vit: Any, tiles_K3hw: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Any]:
    """Return the input tokens (CLS, registers, patches) with positions, and the rotary embedding or None."""
    pixels_K3hw = ((tiles_K3hw.to(mean.dtype) - mean) / std).to(vit.patch_embed.proj.weight.dtype)
    x = vit._pos_embed(_embed_patches(vit.patch_embed, pixels_K3hw))
    if isinstance(x, tuple):  # Eva: patch dropout, if any, has already been applied
        return vit.norm_pre(x[0]), x[1]
    return vit.norm_pre(vit.patch_drop(x)), None


def _embed_patches(patch_embed: Any, pixels_K3hw: Tensor) -> Tensor:
    """Embed patches; in compiled code by a matrix product, which is faster than the convolution."""
    patches_KND: Tensor
    is_standard = type(patch_embed) is PatchEmbed and patch_embed.flatten and not patch_embed.dynamic_img_pad
    if is_standard and torch.compiler.is_compiling():
        (height, width), proj = patch_embed.patch_size, patch_embed.proj
        rows, columns = pixels_K3hw.shape[2] // height, pixels_K3hw.shape[3] // width
        grid = pixels_K3hw.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
        patches_KND = patch_embed.norm(F.linear(grid.flatten(3).flatten(1, 2), proj.weight.flatten(1), proj.bias))
    else:
        patches_KND = patch_embed(pixels_K3hw)
    return patches_KND


def check_supported_vit(vit: Any) -> None:
    """Raise UnsupportedEncoderError unless `run_last_block` computes exactly what the last block of this ViT does."""
    hint = "Supported: timm's Attention, EvaAttention and AttentionRope inside Block or EvaBlock."
    if getattr(vit, "cls_token", None) is None or getattr(vit, "blocks", None) is None:
        raise UnsupportedEncoderError(f"{type(vit).__name__} has no CLS token or no transformer blocks.", hint=hint)
    block = vit.blocks[-1]
    attn = getattr(block, "attn", None)
    if type(block) not in (Block, EvaBlock) or type(attn) not in (Attention, EvaAttention, AttentionRope):
        raise UnsupportedEncoderError(
            f"The CLS attention of {type(block).__name__} with {type(attn).__name__} is not supported.",
            hint=hint,
        )
    if not isinstance(getattr(vit, "fc_norm", nn.Identity()), nn.Identity):
        raise UnsupportedEncoderError(
            f"{type(vit).__name__} averages its tokens: its final norm is not applied to the CLS token.",
            hint="Build it with global_pool='token'.",
        )
