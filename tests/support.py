"""Small encoders of every architecture family, built from real cards, and other test helpers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tapfm.adaptation.two_graph import AdaptationSettings, StepReport, skip_unless_finite, two_graph_step
from tapfm.aggregators.cls_attention import ClsAttention
from tapfm.contracts import BagOutput, Targets
from tapfm.encoders.build import build_vit
from tapfm.encoders.card import EncoderCard, Feature
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.vit import VitEncoder
from tapfm.tasks.binary import BinaryTask
from tapfm.tasks.cross_entropy import encode_labels

# family -> encoder name, and the smallest size that keeps the features of the family
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain ViT": ("kaiko-s16", {"embed_dim": 32, "img_size": 48}),
    "LayerScale": ("uni", {"embed_dim": 32, "img_size": 48}),
    "registers": ("h-optimus-0", {"embed_dim": 32, "img_size": 42}),
    "SwiGLU": ("uni2-h", {"embed_dim": 32, "img_size": 42}),
    "head size 80, registers with positions, CLS + mean": ("virchow2", {"embed_dim": 160, "img_size": 42}),
    "CLS + mean": ("midnight-12k", {"embed_dim": 32, "img_size": 42}),
    "RoPE": ("dinov3-s16", {"embed_dim": 64, "img_size": 48}),
}

TASK = BinaryTask.from_training_labels("FGFR3", [1, 0, 0, 0, 0])
POSITIVE = encode_labels([1])


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Add noise to every parameter, because the initial LayerScale suppresses the blocks and initial biases are 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
        spread = 0.5 if parameter.ndim == 1 or "token" in name else 0.1
        with torch.no_grad():
            parameter.add_(spread * noise)


def small_encoder(
    family: str = "registers",
    *,
    dtype: torch.dtype = torch.float64,
    feature: Feature | None = None,
    seed: int = 0,
    depth: int = 2,
    **extra: Any,
) -> VitEncoder:
    key, size = FAMILIES[family]
    card = find_encoder_card(key)
    torch.manual_seed(seed)
    vit = build_vit(card, extra={"depth": depth, "num_heads": 2} | size | extra)
    randomise(vit, seed)
    return VitEncoder(vit, mean=card.mean, std=card.std, feature=feature or card.feature).to(dtype)


def small_card(key: str, *, width: int = 48, **changes: Any) -> EncoderCard:
    """Return an encoder card with a small architecture: two blocks, three heads, tiles of 4 x 4 patches."""
    card = find_encoder_card(key)
    patch = 14 if "patch14" in card.architecture else 16
    arguments = dict(card.arguments) | {"depth": 2, "embed_dim": width, "num_heads": 3}
    if key in ("midnight-12k", "hibou-b"):
        arguments["mlp_ratio"] = 5.34  # timm counts both halves of a SwiGLU of 128
    side = 4 * patch
    defaults = {"arguments": arguments, "tile_px": side, "position_px": side, "sha256": None, "revision": None}
    return dataclasses.replace(card, **(defaults | changes))


def random_tiles(encoder: VitEncoder, count: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, encoder.tile_px, encoder.tile_px)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def cls_attention(encoder: VitEncoder, *, seed: int = 0, **settings: Any) -> ClsAttention:
    torch.manual_seed(seed)
    aggregator = ClsAttention(encoder.feature_size, **settings).to(next(encoder.parameters()).dtype)
    randomise(aggregator, seed)
    return aggregator


def full_attention(encoder: VitEncoder, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the full N x N softmax attention of the last block and the final tokens, from the unfused code of timm."""
    vit, seen = encoder.vit, dict[str, Tensor]()
    attn = vit.blocks[-1].attn
    attn.fused_attn = False
    handle = attn.attn_drop.register_forward_hook(lambda _, args, __: seen.update(attention=args[0]))
    pixels = (tiles.to(encoder.mean.dtype) - encoder.mean) / encoder.std
    tokens = vit.forward_features(pixels)
    handle.remove()
    attn.fused_attn = True
    return seen["attention"], tokens


class MeanPool(nn.Module):
    """An aggregator without tile weights that ignores the attention."""

    def __init__(self, feature_size: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(feature_size, 1)

    def forward(self, z_KD: Tensor, r_K: Tensor) -> BagOutput:  # noqa: ARG002
        return BagOutput(self.classifier(z_KD.mean(0).tanh()), None)


def get_gradient(encoder: nn.Module) -> Tensor:
    """Return the gradient of all parameters as one vector, with 0 for parameters without a gradient."""
    return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in encoder.parameters()])


def take_step(
    encoder: VitEncoder,
    aggregator: nn.Module,
    tiles: Tensor,
    *,
    targets: Targets = POSITIVE,
    task: Any = TASK,
    slide: str = "?",
    step: int = 0,
    **keywords: Any,
) -> StepReport:
    """Run one training step, by default on a positive slide. Update functions are `step` methods of optimisers."""
    for name in {"update_aggregator", "update_encoder"} & set(keywords):
        keywords[name] = skip_unless_finite(keywords[name])
    report = two_graph_step(encoder, aggregator, task, tiles, targets, slide=slide, **keywords)
    report.checks.raise_if_not_finite(slide, step)
    return report


def step_gradient(
    encoder: VitEncoder,
    aggregator: nn.Module,
    tiles: Tensor,
    *,
    targets: Targets = POSITIVE,
    task: Any = TASK,
    **settings: Any,
) -> Tensor:
    """Return the gradient of the encoder after one two-graph step without updates."""
    encoder.zero_grad()
    aggregator.zero_grad()
    take_step(encoder, aggregator, tiles, targets=targets, task=task, adaptation=AdaptationSettings(**settings))
    return get_gradient(encoder).clone()


def total_loss(output: BagOutput, task: Any, targets: Targets) -> Tensor:
    """Return the loss of the task plus the extra loss of the aggregator."""
    loss = task.loss(output.logits_C, targets)
    return loss if output.extra_loss is None else loss + output.extra_loss(task, targets)


def end_to_end_gradient(
    encoder: VitEncoder,
    aggregator: nn.Module,
    tiles: Tensor,
    *,
    hold_attention: bool = False,
    targets: Targets = POSITIVE,
    task: Any = TASK,
) -> Tensor:
    """Return the gradient of the encoder from ordinary backpropagation through encoder and aggregator."""
    encoder.zero_grad()
    z_KD, r_K = encoder(tiles)
    output = aggregator(z_KD, r_K.detach() if hold_attention else r_K)
    torch.autograd.backward(total_loss(output, task, targets))
    return get_gradient(encoder).clone()


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
