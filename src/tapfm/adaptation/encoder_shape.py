"""Dimensions and parameter counts of an encoder, from which the planner predicts memory and time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapfm.encoders.adapters import find_lora_layers
from tapfm.encoders.vit import VitEncoder


@dataclass(frozen=True)
class EncoderShape:
    """Dimensions and parameter counts of a ViT, after the adaptation scope is applied."""

    depth: int
    width: int
    tokens: int
    heads: int
    mlp_in: int  # outputs of the first MLP layer; both halves if it is gated
    mlp_hidden: int  # inputs of the last MLP layer
    parameters: int
    trainable_parameters: int
    block_parameters: int
    block_trainable_parameters: int  # of one trainable block
    trainable_blocks: int  # the last blocks, which need a backward pass
    trainable_layer_scale: bool
    has_adapters: bool
    trainable_embedding: bool
    tile_px: int
    feature_size: int
    cls_only: bool  # only the CLS token of the last block is used

    @classmethod
    def from_encoder(cls, encoder: VitEncoder) -> EncoderShape:
        """Count the parameters of an encoder, which may be on the meta device."""
        vit = encoder.vit
        blocks = list(vit.blocks)
        last, in_blocks = blocks[-1], {id(p) for block in blocks for p in block.parameters()}
        trainable = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        final = {id(p) for p in vit.norm.parameters()}
        embedding_parameters = [p for p in vit.parameters() if id(p) not in in_blocks | final]
        trainable_embedding = any(p.requires_grad for p in embedding_parameters)
        first_trainable = 0 if trainable_embedding else trainable.index(True) if any(trainable) else len(blocks)
        mlp_in, mlp_hidden = _mlp_sizes(last.mlp)
        return cls(
            depth=len(blocks),
            width=int(vit.embed_dim),
            tokens=int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens),
            heads=int(last.attn.num_heads),
            mlp_in=mlp_in,
            mlp_hidden=mlp_hidden,
            parameters=sum(p.numel() for p in encoder.parameters()),
            trainable_parameters=sum(p.numel() for p in encoder.parameters() if p.requires_grad),
            block_parameters=sum(p.numel() for p in last.parameters()),
            block_trainable_parameters=sum(p.numel() for p in last.parameters() if p.requires_grad),
            trainable_blocks=len(blocks) - first_trainable,
            trainable_layer_scale=any("gamma" in name and p.requires_grad for name, p in last.named_parameters()),
            has_adapters=bool(find_lora_layers(encoder)),
            trainable_embedding=trainable_embedding,
            tile_px=encoder.tile_px,
            feature_size=encoder.feature_size,
            cls_only=encoder.feature == "cls",
        )

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated: one half of its hidden values multiplies the other half."""
        return self.mlp_in > self.mlp_hidden

    @property
    def tile_flop(self) -> float:
        """Floating point operations of the forward pass of one tile. A multiply-add counts as two."""
        matrices = 4 * self.width**2 + self.width * (self.mlp_in + self.mlp_hidden)
        return self.depth * self.tokens * (2 * matrices + 4 * self.tokens * self.width)

    @property
    def backward_passes(self) -> float:
        """Cost of the backward pass in forward passes: gradients of the activations and of the trainable weights."""
        weights = min(1.0, self.block_trainable_parameters / self.block_parameters)
        return self.trainable_blocks / self.depth * (1 + weights)


def _mlp_sizes(mlp: Any) -> tuple[int, int]:
    """Return the output size of the first layer (SwiGLU: of both first layers) and the input size of the last."""
    first = [mlp.fc1] if hasattr(mlp, "fc1") else [mlp.fc1_g, mlp.fc1_x]
    return sum(int(layer.out_features) for layer in first), int(mlp.fc2.in_features)
