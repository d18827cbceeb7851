"""A ViT that gives, for each tile, its feature and how much its CLS token attends to patches (eq. 1).

K tiles, N tokens (CLS, registers, patches), H heads, d head size, D feature size.
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
from tapfm.encoders.blocks import Recompute, at_least_float32, last_block, run_block
from tapfm.encoders.card import Feature
from tapfm.errors import SettingError, TileError, UnsupportedEncoderError


class VitEncoder(nn.Module):
    """A timm ViT as a `TileEncoder`.

    `recompute` says, block by block, what backward computes again to save memory (blocks.py).
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
        keep_all: Recompute = "nothing"
        self.recompute: tuple[Recompute, ...] = (keep_all,) * len(self.vit.blocks)
        self._compiled = False
        self.tile_px = int(self.vit.patch_embed.img_size[0])
        self.feature_size = int(self.vit.embed_dim) * (2 if feature == "cls+mean" else 1)
        # They belong to the card, not to the checkpoint. They stand outside `vit` so that its weights can be cast
        # without rounding the pixels.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def forward(self, tiles_K3hw: Tensor) -> EncodedTiles:
        """Encode K uint8 tiles, from any device."""
        self._check(tiles_K3hw)
        # torch would compile anew for a single tile
        run = _compiled if self._compiled and len(tiles_K3hw) > 1 else _run_plain
        tiles_K3hw = tiles_K3hw.to(self.mean.device, non_blocking=True)
        x_KND, rope = run(_embed)(self.vit, tiles_K3hw, self.mean, self.std)
        depth = len(self.vit.blocks)
        ropes = rope if getattr(self.vit, "rope_mixed", False) else [rope] * depth
        for block, block_rope, recompute in zip(self.vit.blocks[:-1], ropes[:-1], self.recompute[:-1], strict=True):
            x_KND = run(run_block)(block, x_KND, block_rope, recompute)
        prefix, cls_only = self.vit.num_prefix_tokens, self.feature == "cls"
        x_KND, r_K = run(last_block)(self.vit.blocks[-1], x_KND, ropes[-1], self.recompute[-1], prefix, cls_only)
        x_KND = self.vit.norm(x_KND)
        z_KD = x_KND[:, 0]
        if self.feature == "cls+mean":
            patches_KND = x_KND[:, self.vit.num_prefix_tokens :]
            z_KD = torch.cat([z_KD, patches_KND.mean(1, dtype=at_least_float32(x_KND))], dim=1)
        return EncodedTiles(z_KD.to(at_least_float32(z_KD)), r_K)

    def compile_blocks(self, enabled: bool = True) -> None:
        """Run blocks as compiled code, whatever the number of tiles; it is the same code for all blocks."""
        self._compiled = enabled
        if enabled:
            _keep_compiled_code()
            _silence_compiler_warnings()
            # precisions, with and without a graph, each way to recompute, members of an ensemble
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)

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


def _keep_compiled_code() -> None:
    """Let torch keep what it compiles where it is found again: its own choice is a folder for temporary files."""
    with suppress(OSError, RuntimeError):  # nobody's home, or one that cannot be written to
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapfm" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _silence_compiler_warnings() -> None:
    """Keep torch from telling users what is known: there is no in-place operation, and TF32 is a setting of ours."""
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for message in ("TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


def _run_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function as it is written."""
    return function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of a module and tiles, once for any number of tiles."""
    run = torch.compile(function)

    def marked(module: nn.Module, x: Tensor, *rest: Any) -> Any:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return run(module, x, *rest)

    return marked


def _embed(vit: Any, tiles_K3hw: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Any]:
    """Patches, CLS and registers with their positions; and the rotary embedding where the ViT has one."""
    pixels_K3hw = ((tiles_K3hw.to(mean.dtype) - mean) / std).to(vit.patch_embed.proj.weight.dtype)
    x = vit._pos_embed(_patches_of(vit.patch_embed, pixels_K3hw))
    if isinstance(x, tuple):  # Eva: patch dropout, if any, has already been applied
        return vit.norm_pre(x[0]), x[1]
    return vit.norm_pre(vit.patch_drop(x)), None


def _patches_of(patch_embed: Any, pixels_K3hw: Tensor) -> Tensor:
    """Patches as the module makes them; compiled, by a product instead of a convolution, which is slower at this."""
    patches_KND: Tensor
    as_usual = type(patch_embed) is PatchEmbed and patch_embed.flatten and not patch_embed.dynamic_img_pad
    if as_usual and torch.compiler.is_compiling():
        (high, wide), proj = patch_embed.patch_size, patch_embed.proj
        rows, columns = pixels_K3hw.shape[2] // high, pixels_K3hw.shape[3] // wide
        cut = pixels_K3hw.unflatten(3, (columns, wide)).unflatten(2, (rows, high)).permute(0, 2, 4, 1, 3, 5)
        patches_KND = patch_embed.norm(F.linear(cut.flatten(3).flatten(1, 2), proj.weight.flatten(1), proj.bias))
    else:
        patches_KND = patch_embed(pixels_K3hw)
    return patches_KND


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
