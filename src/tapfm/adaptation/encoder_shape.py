"""What memory and time of a step depend on, counted from an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapfm.encoders.adapters import find_lora_layers
from tapfm.encoders.vit import VitEncoder


@dataclass(frozen=True)
class EncoderShape:
    """What memory depends on. Counted from the module, which may be on the meta device, after the scope is applied."""

    depth: int
    width: int
    tokens: int
    heads: int
    mlp_in: int  # outputs of its first layer: both halves of a gated one
    mlp_hidden: int  # inputs of its last layer
    parameters: int
    trainable: int
    block_parameters: int
    block_trainable: int  # of a block that learns
    trainable_blocks: int  # the last ones, which gradients go through
    trainable_layer_scale: bool  # its LayerScale
    has_adapters: bool
    trainable_embedding: bool
    tile_px: int
    feature_size: int
    cls_only: bool  # of the last block only the CLS token is used

    @classmethod
    def of(cls, encoder: VitEncoder) -> EncoderShape:
        """Count."""
        vit = encoder.vit
        blocks = list(vit.blocks)
        last, in_blocks = blocks[-1], {id(p) for block in blocks for p in block.parameters()}
        learning = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        final = {id(p) for p in vit.norm.parameters()}
        before = [p for p in vit.parameters() if id(p) not in in_blocks | final]
        embedding = any(p.requires_grad for p in before)
        first = 0 if embedding else learning.index(True) if any(learning) else len(blocks)
        mlp_in, mlp_hidden = _mlp_sizes(last.mlp)
        return cls(
            depth=len(blocks),
            width=int(vit.embed_dim),
            tokens=int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens),
            heads=int(last.attn.num_heads),
            mlp_in=mlp_in,
            mlp_hidden=mlp_hidden,
            parameters=sum(p.numel() for p in encoder.parameters()),
            trainable=sum(p.numel() for p in encoder.parameters() if p.requires_grad),
            block_parameters=sum(p.numel() for p in last.parameters()),
            block_trainable=sum(p.numel() for p in last.parameters() if p.requires_grad),
            trainable_blocks=len(blocks) - first,
            trainable_layer_scale=any("gamma" in name and p.requires_grad for name, p in last.named_parameters()),
            has_adapters=bool(find_lora_layers(encoder)),
            trainable_embedding=embedding,
            tile_px=encoder.tile_px,
            feature_size=encoder.feature_size,
            cls_only=encoder.feature == "cls",
        )

    @property
    def gated(self) -> bool:
        """Whether one half of the MLP's inner values multiplies the other."""
        return self.mlp_in > self.mlp_hidden

    @property
    def tile_flop(self) -> float:
        """Operations of a forward pass, a multiplication and an addition being two."""
        matrices = 4 * self.width**2 + self.width * (self.mlp_in + self.mlp_hidden)
        return self.depth * self.tokens * (2 * matrices + 4 * self.tokens * self.width)

    @property
    def backward_passes(self) -> float:
        """What backward takes, in forward passes: the gradients of inner values, and of the weights that learn."""
        weights = min(1.0, self.block_trainable / self.block_parameters)
        return self.trainable_blocks / self.depth * (1 + weights)


def _mlp_sizes(mlp: Any) -> tuple[int, int]:
    """Give the outputs of an MLP's first layer, and the inputs of its last, whichever way timm's class names them."""
    first = [mlp.fc1] if hasattr(mlp, "fc1") else [mlp.fc1_g, mlp.fc1_x]
    return sum(int(layer.out_features) for layer in first), int(mlp.fc2.in_features)
