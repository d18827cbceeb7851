"""The arithmetic of a ViT's blocks, and what backward computes again instead of keeping it.

    recompute     a block keeps, for each token            backward also does
    "nothing"     all that autograd asks for               -
    "pointwise"   what matrix products and attention give  norms, activations, additions
    "mlp"         the same of its attention, not its MLP   the MLP's first product
    "block"       its input                                the whole block

With "pointwise" and "mlp", what multiplies a whole matrix is folded into it: a LayerScale into the layer before it,
whose output then need not be kept for its sake; and, while there is a graph, the weights of a norm into the layer after
it, whose gradients then come from the matrix's gradient instead of from every token. All is the same to rounding.

K tiles, N tokens (CLS, registers, patches), H heads, d head size, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import GluMlp, Mlp, SwiGLU, apply_rot_embed_cat
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["nothing", "pointwise", "mlp", "block"]

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def run_block(block: Any, x_KND: Tensor, rope: Tensor | None, recompute: Recompute) -> Tensor:
    """One block, keeping for backward what `recompute` says."""
    if recompute in ("nothing", "block"):
        whole = block if rope is None else partial(block, rope=rope)
        return whole(x_KND) if recompute == "nothing" else _again(whole, x_KND)
    x_KND = _again(lambda x: _attention_half(block, x, rope), x_KND, keep_products=True)
    return _again(lambda x: _mlp_half(block, x), x_KND, keep_products=recompute == "pointwise")


def _again(function: Callable[[Tensor], Any], x_KND: Tensor, *, keep_products: bool = False) -> Any:
    """Run a function whose inner values backward computes again, but for its products where those are kept."""
    if not torch.is_grad_enabled():
        return function(x_KND)
    kept: dict[str, Any] = {}
    if keep_products:
        kept["context_fn"] = partial(create_selective_checkpoint_contexts, _products_are_kept)
    # The reentrant form would lose the gradient, without an error, where the first blocks are frozen.
    return checkpoint(function, x_KND, use_reentrant=False, **kept)


def _products_are_kept(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Tell torch what to keep: what costs much to compute."""
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _attention_half(block: Any, x_KND: Tensor, rope: Tensor | None) -> Tensor:
    """The first half of a block."""
    attn = block.attn
    if getattr(attn, "gate", None) is None and _can_fold(block.norm1, x_KND):
        inner_KND = x_KND
        q_KHNd, k_KHNd, v_KHNd = _project(attn, x_KND, rope, partial(_after_norm, block.norm1))
    else:
        inner_KND = block.norm1(x_KND)
        q_KHNd, k_KHNd, v_KHNd = _project(attn, inner_KND, rope)
    return _attended(block, x_KND, inner_KND, q_KHNd, k_KHNd, v_KHNd, fold=True)


def _mlp_half(block: Any, x_KND: Tensor) -> Tensor:
    """The second half of a block."""
    mlp, (_, gamma) = block.mlp, _layer_scales(block)
    if type(mlp) not in (Mlp, GluMlp, SwiGLU):  # a class that is not known here
        out_KND = mlp(block.norm2(x_KND)) if gamma is None else gamma * mlp(block.norm2(x_KND))
    else:
        if _can_fold(block.norm2, x_KND):
            hidden_KNh = _hidden_of(mlp, x_KND, partial(_after_norm, block.norm2))
        else:
            hidden_KNh = _hidden_of(mlp, block.norm2(x_KND))
        out_KND = mlp.drop2(_scaled(mlp.fc2, gamma, hidden_KNh, fold=True))
    return x_KND + block.drop_path2(out_KND)


def last_block(
    block: Any, x_KND: Tensor, rope: Tensor | None, recompute: Recompute, prefix: int, cls_only: bool
) -> tuple[Tensor, Tensor]:
    """The last block and r_K; with `cls_only` it goes on for the CLS token alone, which is all that is used of it."""

    def run(x_KND: Tensor) -> tuple[Tensor, Tensor]:
        inner_KND = block.norm1(x_KND)
        q_KHNd, k_KHNd, v_KHNd = _project(block.attn, inner_KND, rope)
        r_K = _raw_attention(q_KHNd[:, :, :1], k_KHNd, scale=block.attn.scale, prefix=prefix)
        if cls_only:
            q_KHNd, x_KND, inner_KND = q_KHNd[:, :, :1], x_KND[:, :1], inner_KND[:, :1]
        x_KND = _attended(block, x_KND, inner_KND, q_KHNd, k_KHNd, v_KHNd, fold=False)
        out_KND, (_, gamma) = block.mlp(block.norm2(x_KND)), _layer_scales(block)
        return x_KND + block.drop_path2(out_KND if gamma is None else gamma * out_KND), r_K

    both: tuple[Tensor, Tensor] = _again(run, x_KND) if recompute == "block" else run(x_KND)
    return both


def _attended(
    block: Any, x_KND: Tensor, inner_KND: Tensor, q_KHNd: Tensor, k_KHNd: Tensor, v_KHNd: Tensor, *, fold: bool
) -> Tensor:
    """Attention, its output layer, and what it is added to."""
    attn, (gamma, _) = block.attn, _layer_scales(block)
    dropout = attn.attn_drop.p if attn.training else 0.0
    heads_KHNd = F.scaled_dot_product_attention(q_KHNd, k_KHNd, v_KHNd, dropout_p=dropout, scale=attn.scale)
    out_KND = attn.norm(heads_KHNd.transpose(1, 2).flatten(2))
    if (gate := getattr(attn, "gate", None)) is not None:
        out_KND = out_KND * gate(inner_KND).sigmoid()
    return x_KND + block.drop_path1(attn.proj_drop(_scaled(attn.proj, gamma, out_KND, fold=fold)))


def _raw_attention(q_KH1d: Tensor, k_KHNd: Tensor, *, scale: float, prefix: int) -> Tensor:
    """Eq. 1: the CLS row of the softmax attention, averaged over heads and over patch tokens.

    The softmax runs over all tokens, the mean over patches only: over all tokens it would be the constant 1/N. In
    float32 at least: the spread between tiles is a few percent of r, and bfloat16 would leave a handful of values.
    """
    wide = at_least_float32(q_KH1d)
    with torch.autocast(q_KH1d.device.type, enabled=False):
        logits_KH1N = (q_KH1d.to(wide) * scale) @ k_KHNd.to(wide).transpose(-2, -1)
        return logits_KH1N.softmax(-1)[..., prefix:].mean((1, 2, 3))


def _applied(layer: Any, x_KND: Tensor) -> Any:
    """A layer as it is."""
    return layer(x_KND)


def _project(
    attn: Any, x_KND: Tensor, rope: Tensor | None, apply: Callable[[Any, Tensor], Any] = _applied
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the attention module itself makes them, adapters on its layers included."""
    if attn.qkv is not None:
        qkv = apply(attn.qkv, x_KND)
        if getattr(attn, "q_bias", None) is not None:
            qkv = qkv + torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
        q, k, v = qkv.unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        q, k, v = (
            apply(layer, x_KND).unflatten(2, (-1, attn.head_dim)).transpose(1, 2)
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


def _hidden_of(mlp: Any, x_KND: Tensor, apply: Callable[[Any, Tensor], Any] = _applied) -> Tensor:
    """What comes before the last layer of one of timm's three MLPs."""
    if type(mlp) is GluMlp:
        first, second = _halves_of(mlp.fc1, x_KND, apply)
        hidden_KNh = first * mlp.act(second) if mlp.gate_last else mlp.act(first) * second
    elif type(mlp) is SwiGLU:
        hidden_KNh = mlp.act(apply(mlp.fc1_g, x_KND)) * apply(mlp.fc1_x, x_KND)
    else:
        hidden_KNh = mlp.act(apply(mlp.fc1, x_KND))
    normed_KNh: Tensor = mlp.norm(mlp.drop1(hidden_KNh))
    return normed_KNh


def _halves_of(layer: Any, x_KND: Tensor, apply: Callable[[Any, Tensor], Any]) -> tuple[Tensor, Tensor]:
    """The two halves of a packed layer's output, by two products: joining their gradients would cost a pass."""
    if type(layer) is not nn.Linear:
        first, second = apply(layer, x_KND).chunk(2, dim=-1)
        return first, second
    half = layer.out_features // 2
    biases = (None, None) if layer.bias is None else (layer.bias[:half], layer.bias[half:])
    first, second = (
        apply(_Affine(weight, bias), x_KND)
        for weight, bias in zip((layer.weight[:half], layer.weight[half:]), biases, strict=True)
    )
    return first, second


class _Affine(NamedTuple):
    """A linear layer made of tensors."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_KND: Tensor) -> Tensor:
        """Apply it."""
        return F.linear(x_KND, self.weight, self.bias)


def _can_fold(norm: Any, x_KND: Tensor) -> bool:
    """Whether a norm's weights may go into the next layer: not under autocast, which casts both by itself."""
    return (
        torch.is_grad_enabled()
        and isinstance(norm, nn.LayerNorm)
        and norm.weight is not None
        and not torch.is_autocast_enabled(x_KND.device.type)
    )


def _after_norm(norm: Any, layer: Any, x_KND: Tensor) -> Tensor:
    """A layer of a norm's output, with the norm's weights folded into the layer's."""
    if type(layer) not in (nn.Linear, _Affine):
        return layer(norm(x_KND))
    inner_KND = F.layer_norm(x_KND, norm.normalized_shape, None, None, norm.eps)
    bias = layer.bias
    if norm.bias is not None:
        shift = layer.weight @ norm.bias
        bias = shift if bias is None else bias + shift
    return F.linear(inner_KND, layer.weight * norm.weight, bias)


def _scaled(layer: Any, gamma_D: Tensor | None, x_KND: Tensor, *, fold: bool) -> Tensor:
    """A layer and its LayerScale; folded into the layer's weights, so that its output is not kept for gamma's sake.

    Not under autocast: float16 has no numbers as small as some gammas times a weight.
    """
    if gamma_D is None:
        return layer(x_KND)
    if fold and type(layer) is nn.Linear and not torch.is_autocast_enabled(x_KND.device.type):
        bias_D = None if layer.bias is None else gamma_D * layer.bias
        return F.linear(x_KND, gamma_D[:, None] * layer.weight, bias_D)
    return layer(x_KND) * gamma_D


def _layer_scales(block: Any) -> tuple[Tensor | None, Tensor | None]:
    """The two LayerScales of a block, whichever way timm's class stores them."""
    if isinstance(block, Block):
        return getattr(block.ls1, "gamma", None), getattr(block.ls2, "gamma", None)
    return block.gamma_1, block.gamma_2


def at_least_float32(x: Tensor) -> torch.dtype:
    """Half precisions widen to float32; float64 stays."""
    return torch.promote_types(x.dtype, torch.float32)
