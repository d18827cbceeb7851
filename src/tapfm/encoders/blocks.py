"""The forward pass of ViT blocks, with activation checkpointing at four levels.

    recompute     saved for backward, per token                 recomputed in backward
    "nothing"     everything that autograd needs                -
    "pointwise"   outputs of matrix products and attention      norms, activations, additions
    "mlp"         the same for the attention, not for the MLP   also the first product of the MLP
    "block"       the input of the block                        the whole block

With "pointwise" and "mlp", and without autocast, element-wise factors are folded into the weights of linear layers. A
LayerScale is folded into the layer before it, so that the output of that layer need not be saved. While gradients are
recorded, the weights of a norm are folded into the layer after it: their gradients then come from the gradient of the
matrix instead of from every token. The results are equal up to rounding.

K tiles, N tokens (CLS, registers, patches), H heads, d head size, D width, M hidden size of the MLP.
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
_SAVED_OPERATIONS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def run_block(block: Any, x_KND: Tensor, rope: Tensor | None, recompute: Recompute) -> Tensor:
    """Run one block; `recompute` selects what is saved for backward."""
    if recompute in ("nothing", "block"):
        whole = block if rope is None else partial(block, rope=rope)
        return whole(x_KND) if recompute == "nothing" else _run_checkpointed(whole, x_KND)
    x_KND = _run_checkpointed(lambda x: _run_attention_half(block, x, rope), x_KND, save_products=True)
    return _run_checkpointed(lambda x: _run_mlp_half(block, x), x_KND, save_products=recompute == "pointwise")


def _run_checkpointed(function: Callable[[Tensor], Any], x_KND: Tensor, *, save_products: bool = False) -> Any:
    """Run a function under activation checkpointing; `save_products` saves the outputs of its matrix products."""
    if not torch.is_grad_enabled():
        return function(x_KND)
    options: dict[str, Any] = {}
    if save_products:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _select_saved_operations)
    # Reentrant checkpointing would silently lose gradients if the first blocks are frozen.
    return checkpoint(function, x_KND, use_reentrant=False, **options)


def _select_saved_operations(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Save the outputs of expensive operations and recompute the rest."""
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def _run_attention_half(block: Any, x_KND: Tensor, rope: Tensor | None) -> Tensor:
    """Run the attention half of a block, with its residual connection."""
    attn = block.attn
    if getattr(attn, "gate", None) is None and _can_fold_norm(block.norm1, x_KND):
        inner_KND = x_KND
        q_KHNd, k_KHNd, v_KHNd = _project_qkv(attn, x_KND, rope, partial(_apply_norm_and_linear, block.norm1))
    else:
        inner_KND = block.norm1(x_KND)
        q_KHNd, k_KHNd, v_KHNd = _project_qkv(attn, inner_KND, rope)
    return _apply_attention(block, x_KND, inner_KND, q_KHNd, k_KHNd, v_KHNd, fold=True)


def _run_mlp_half(block: Any, x_KND: Tensor) -> Tensor:
    """Run the MLP half of a block, with its residual connection."""
    mlp, (_, gamma) = block.mlp, _layer_scales(block)
    if type(mlp) not in (Mlp, GluMlp, SwiGLU):  # an MLP class without special handling
        out_KND = mlp(block.norm2(x_KND)) if gamma is None else gamma * mlp(block.norm2(x_KND))
    else:
        if _can_fold_norm(block.norm2, x_KND):
            hidden_KNM = _compute_mlp_hidden(mlp, x_KND, partial(_apply_norm_and_linear, block.norm2))
        else:
            hidden_KNM = _compute_mlp_hidden(mlp, block.norm2(x_KND))
        out_KND = mlp.drop2(_apply_layer_scale(mlp.fc2, gamma, hidden_KNM, fold=True))
    return x_KND + block.drop_path2(out_KND)


def run_last_block(
    block: Any, x_KND: Tensor, rope: Tensor | None, recompute: Recompute, prefix: int, cls_only: bool
) -> tuple[Tensor, Tensor]:
    """Run the last block and return its output and the raw attention r_K.

    With `cls_only`, everything after queries, keys and values is computed for the CLS token only. Of the levels of
    `recompute`, only "block" recomputes anything in this block.
    """

    def run(x_KND: Tensor) -> tuple[Tensor, Tensor]:
        inner_KND = block.norm1(x_KND)
        q_KHNd, k_KHNd, v_KHNd = _project_qkv(block.attn, inner_KND, rope)
        r_K = _compute_raw_attention(q_KHNd[:, :, :1], k_KHNd, scale=block.attn.scale, prefix=prefix)
        if cls_only:
            q_KHNd, x_KND, inner_KND = q_KHNd[:, :, :1], x_KND[:, :1], inner_KND[:, :1]
        x_KND = _apply_attention(block, x_KND, inner_KND, q_KHNd, k_KHNd, v_KHNd, fold=False)
        out_KND, (_, gamma) = block.mlp(block.norm2(x_KND)), _layer_scales(block)
        return x_KND + block.drop_path2(out_KND if gamma is None else gamma * out_KND), r_K

    result: tuple[Tensor, Tensor] = _run_checkpointed(run, x_KND) if recompute == "block" else run(x_KND)
    return result


def _apply_attention(
    block: Any, x_KND: Tensor, inner_KND: Tensor, q_KHNd: Tensor, k_KHNd: Tensor, v_KHNd: Tensor, *, fold: bool
) -> Tensor:
    """Apply attention and its output layer, and add the residual."""
    attn, (gamma, _) = block.attn, _layer_scales(block)
    dropout = attn.attn_drop.p if attn.training else 0.0
    heads_KHNd = F.scaled_dot_product_attention(q_KHNd, k_KHNd, v_KHNd, dropout_p=dropout, scale=attn.scale)
    out_KND = attn.norm(heads_KHNd.transpose(1, 2).flatten(2))
    if (gate := getattr(attn, "gate", None)) is not None:
        out_KND = out_KND * gate(inner_KND).sigmoid()
    return x_KND + block.drop_path1(attn.proj_drop(_apply_layer_scale(attn.proj, gamma, out_KND, fold=fold)))


def _compute_raw_attention(q_KH1d: Tensor, k_KHNd: Tensor, *, scale: float, prefix: int) -> Tensor:
    """Compute eq. 1: the CLS row of the softmax attention, averaged over heads and patch tokens.

    The softmax is over all tokens, the mean over patch tokens only; a mean over all tokens would be the constant 1/N.
    Computed in float32 or wider: r differs by only a few percent between tiles, which bfloat16 can hardly resolve.
    """
    wide = at_least_float32(q_KH1d)
    with torch.autocast(q_KH1d.device.type, enabled=False):
        logits_KH1N = (q_KH1d.to(wide) * scale) @ k_KHNd.to(wide).transpose(-2, -1)
        return logits_KH1N.softmax(-1)[..., prefix:].mean((1, 2, 3))


def _apply_layer(layer: Any, x_KND: Tensor) -> Any:
    return layer(x_KND)


def _project_qkv(
    attn: Any, x_KND: Tensor, rope: Tensor | None, apply: Callable[[Any, Tensor], Any] = _apply_layer
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and values as the attention module does, including adapters on its layers."""
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
        prefix = attn.num_prefix_tokens  # CLS and registers have no position in the tile and are not rotated
        q, k = (
            torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2).to(v.dtype)
            for x in (q, k)
        )
    if k.shape[1] != q.shape[1]:  # grouped-query attention: several heads share a key
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return q, k, v


def _compute_mlp_hidden(mlp: Any, x_KND: Tensor, apply: Callable[[Any, Tensor], Any] = _apply_layer) -> Tensor:
    """Compute the input of the last layer of timm's Mlp, GluMlp or SwiGLU."""
    if type(mlp) is GluMlp:
        first, second = _split_packed_output(mlp.fc1, x_KND, apply)
        hidden_KNM = first * mlp.act(second) if mlp.gate_last else mlp.act(first) * second
    elif type(mlp) is SwiGLU:
        hidden_KNM = mlp.act(apply(mlp.fc1_g, x_KND)) * apply(mlp.fc1_x, x_KND)
    else:
        hidden_KNM = mlp.act(apply(mlp.fc1, x_KND))
    normed_KNM: Tensor = mlp.norm(mlp.drop1(hidden_KNM))
    return normed_KNM


def _split_packed_output(layer: Any, x_KND: Tensor, apply: Callable[[Any, Tensor], Any]) -> tuple[Tensor, Tensor]:
    """Compute the two halves of a packed layer's output, for `nn.Linear` by two products.

    Splitting the output of one product would need an extra pass over memory to join the gradients.
    """
    if type(layer) is not nn.Linear:
        first, second = apply(layer, x_KND).chunk(2, dim=-1)
        return first, second
    half = layer.out_features // 2
    biases = (None, None) if layer.bias is None else (layer.bias[:half], layer.bias[half:])
    first, second = (
        apply(_LinearSlice(weight, bias), x_KND)
        for weight, bias in zip((layer.weight[:half], layer.weight[half:]), biases, strict=True)
    )
    return first, second


class _LinearSlice(NamedTuple):
    """A slice of a linear layer, given by its weight and bias."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_KND: Tensor) -> Tensor:
        return F.linear(x_KND, self.weight, self.bias)


def _can_fold_norm(norm: Any, x_KND: Tensor) -> bool:
    """Return whether to fold a norm's weights into the next layer: only with gradients, and not under autocast."""
    return (
        torch.is_grad_enabled()
        and isinstance(norm, nn.LayerNorm)
        and norm.weight is not None
        and not torch.is_autocast_enabled(x_KND.device.type)
    )


def _apply_norm_and_linear(norm: Any, layer: Any, x_KND: Tensor) -> Tensor:
    """Apply a norm and then a layer, with the weights of the norm folded into those of the layer."""
    if type(layer) not in (nn.Linear, _LinearSlice):
        return layer(norm(x_KND))
    inner_KND = F.layer_norm(x_KND, norm.normalized_shape, None, None, norm.eps)
    bias = layer.bias
    if norm.bias is not None:
        shift = layer.weight @ norm.bias
        bias = shift if bias is None else bias + shift
    return F.linear(inner_KND, layer.weight * norm.weight, bias)


def _apply_layer_scale(layer: Any, gamma_D: Tensor | None, x_KND: Tensor, *, fold: bool) -> Tensor:
    """Apply a layer and its LayerScale; `fold` multiplies gamma into the weights, so that the output is not saved.

    Not folded under autocast: some products of gamma and a weight underflow in float16.
    """
    if gamma_D is None:
        return layer(x_KND)
    if fold and type(layer) is nn.Linear and not torch.is_autocast_enabled(x_KND.device.type):
        bias_D = None if layer.bias is None else gamma_D * layer.bias
        return F.linear(x_KND, gamma_D[:, None] * layer.weight, bias_D)
    return layer(x_KND) * gamma_D


def _layer_scales(block: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the two LayerScale vectors of a block; timm's block classes store them differently."""
    if isinstance(block, Block):
        return getattr(block.ls1, "gamma", None), getattr(block.ls2, "gamma", None)
    return block.gamma_1, block.gamma_2


def at_least_float32(x: Tensor) -> torch.dtype:
    """Return float32 for half precision, and the dtype of `x` otherwise."""
    return torch.promote_types(x.dtype, torch.float32)
