"""Build the models to measure, as `tapfm train` does, but with random weights. Speed does not depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.from_config import (
    build_adaptation_settings,
    build_augmentation,
    build_optimiser_settings,
    select_dtypes,
    uses_compile,
)
from tapfm.adaptation.learner import Learner
from tapfm.config.loading import resolve_config
from tapfm.config.settings import RunConfig
from tapfm.contracts import Targets
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.build import build_vit
from tapfm.encoders.card import EncoderCard
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.inference import InferenceEncoder, precision_name, prepare_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.inference.bags import Bag
from tapfm.runs.build import build_run_aggregator
from tapfm.runs.model import SlideModel
from tapfm.runtime.devices import choose_autocast_dtype
from tapfm.tasks.catalog import build_task
from tapfm.tiles.augment import AugmentedTiles


@dataclass(frozen=True)
class BenchSetup:
    """Configuration and device to measure."""

    config: RunConfig
    device: torch.device

    @property
    def card(self) -> EncoderCard:
        return find_encoder_card(self.config.encoder.name)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the computation."""
        return choose_autocast_dtype(self.config.adaptation.precision, self.device) or torch.float32

    @property
    def compiled(self) -> bool:
        """Whether the encoder's blocks are compiled."""
        return uses_compile(self.config, self.device)


def make_default_config(encoder: str, precision: str) -> RunConfig:
    """Return the settings of the default recipe, for measurements without a RUN.toml. Its paths are placeholders."""
    return resolve_config(
        {
            "cohort": {"table": "cohort.csv"},
            "tiles": {"folder": "tiles"},
            "encoder": {"name": encoder},
            "task": {"targets": ["target"]},
            "adaptation": {"precision": precision},
        },
        "The options",
    )


def _build_encoder(setup: BenchSetup) -> VitEncoder:
    """Build the encoder with random weights on the device."""
    card = setup.card
    torch.manual_seed(setup.config.seed)
    with setup.device:
        vit = build_vit(card)
    return VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).to(setup.device)


def check_scopes(setup: BenchSetup, scopes: Sequence[str]) -> None:
    """Raise an error if a scope is not valid for this encoder, before anything is measured."""
    card = setup.card
    for scope in scopes:
        with torch.device("meta"):
            encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
        apply_scope(encoder, Scope.parse(scope))


def build_inference_encoder(setup: BenchSetup) -> InferenceEncoder:
    """Build an encoder for inference, as `tapfm predict` does."""
    return prepare_encoder(_build_encoder(setup), precision_name(setup.dtype), compiled=setup.compiled)


def build_learner(setup: BenchSetup, scope: str, chunking: Chunking) -> Learner:
    """Build a learner. Unlike in training, a step that runs out of memory is not retried with smaller chunks."""
    config, device, encoder = setup.config, setup.device, _build_encoder(setup)
    apply_scope(encoder, Scope.parse(scope), seed=config.seed)
    if config.adaptation.recompute != "auto":
        encoder.recompute = (config.adaptation.recompute,) * len(encoder.recompute)
    encoder.compile_blocks(setup.compiled)
    targets = config.task.targets
    aggregator = build_run_aggregator(config, encoder.feature_size, len(targets)).to(device)
    weights_dtype, compute_dtype = select_dtypes(config, device)
    model = SlideModel(encoder, aggregator, build_task({name: [0, 1] for name in targets}), compute_dtype)
    optimiser_settings = replace(
        build_optimiser_settings(config, weights_dtype=weights_dtype, compiled=setup.compiled),
        float32_gradients=config.optimiser.slides_per_step > 1 or chunking.tiles is not None,
    )
    learner = Learner(
        model,
        build_adaptation_settings(config, chunking, compute_dtype),
        optimiser_settings,
        on_smaller_chunks=_raise_out_of_memory,
    )
    learner.start_epoch(0)
    return learner


def _raise_out_of_memory(_tiles: int) -> None:
    raise torch.OutOfMemoryError("the step does not fit")


def run_train_step(learner: Learner, pixels: Tensor, setup: BenchSetup) -> None:
    """Run one training step on the pixels of a slide, with augmentation, and wait until it is finished."""
    augmentation = build_augmentation(setup.config)
    content = AugmentedTiles(pixels, augmentation, 0, device=setup.device, compiled=setup.compiled)
    bag = Bag(content, np.arange(len(pixels)), coordinates=_grid_coordinates(len(pixels)))
    count = len(learner.model.task.target_kinds)
    targets = Targets(torch.ones(count), torch.ones(count, dtype=torch.bool))
    report = learner.train_step(bag, targets, update=True, slide_id="bench")
    report.loss_agg.item()


def count_forward_gflop(card: EncoderCard) -> float:
    """Return the GFLOP of the forward pass of one tile. A multiply-add counts as 2."""
    with torch.device("meta"):
        vit: Any = build_vit(card)
    patches, width = int(vit.patch_embed.num_patches), int(vit.embed_dim)
    tokens = patches + int(vit.num_prefix_tokens)
    linear = sum(layer.weight.numel() for layer in vit.blocks.modules() if isinstance(layer, nn.Linear))
    attention = 2 * tokens * width * len(vit.blocks)  # per token: products with all keys and all values
    return 2 * (patches * int(vit.patch_embed.proj.weight.numel()) + tokens * (linear + attention)) / 1e9


def _grid_coordinates(tiles: int) -> Tensor:
    """Return tile coordinates in a square grid, for aggregators that use them."""
    columns = max(1, round(tiles**0.5))
    return torch.tensor([(i % columns, i // columns) for i in range(tiles)], dtype=torch.float32)
