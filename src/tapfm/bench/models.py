"""The model that is measured: as `tapfm train` would build it, but with random weights, which are as fast as any."""

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
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.inference import InferenceEncoder, precision_name, prepare_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.inference.bags import Bag
from tapfm.runs.build import build_run_aggregator
from tapfm.runs.model import SlideModel
from tapfm.runtime.devices import choose_precision
from tapfm.tasks.catalog import build_task
from tapfm.tiles.augment import AugmentedTiles


@dataclass(frozen=True)
class BenchSubject:
    """What is measured, and where."""

    config: RunConfig
    device: torch.device

    @property
    def card(self) -> EncoderCard:
        """The encoder's facts."""
        return encoder_card(self.config.encoder.name)

    @property
    def dtype(self) -> torch.dtype:
        """The precision that is computed in."""
        return choose_precision(self.config.adaptation.precision, self.device) or torch.float32

    @property
    def compiled(self) -> bool:
        """Say whether blocks are compiled."""
        return uses_compile(self.config, self.device)


def settings_for(encoder: str, precision: str) -> RunConfig:
    """Take the recipe's settings, where no RUN.toml says others; slides and targets are not looked at."""
    return resolve_config(
        {
            "cohort": {"table": "cohort.csv"},
            "tiles": {"folder": "tiles"},
            "encoder": {"name": encoder},
            "task": {"targets": ["target"]},
            "adaptation": {"precision": precision},
        },
        "What was given",
    )


def _build_encoder(subject: BenchSubject) -> VitEncoder:
    """Build the architecture, with random weights, on the device."""
    card = subject.card
    torch.manual_seed(subject.config.seed)
    with subject.device:
        vit = build_vit(card)
    return VitEncoder(vit, mean=card.mean, std=card.std, feature=card.feature).to(subject.device)


def check_scopes(subject: BenchSubject, scopes: Sequence[str]) -> None:
    """Refuse what this encoder cannot be adapted by, before anything is measured."""
    card = subject.card
    for scope in scopes:
        with torch.device("meta"):
            encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
        apply_scope(encoder, Scope.parse(scope))


def build_inference_encoder(subject: BenchSubject) -> InferenceEncoder:
    """Build an encoder for inference, as `tapfm predict` does."""
    return prepare_encoder(_build_encoder(subject), precision_name(subject.dtype), compiled=subject.compiled)


def build_learner(subject: BenchSubject, scope: str, chunking: Chunking) -> Learner:
    """Build a model that learns, a bag at a time; one that does not fit is not made to, as it would be in training."""
    config, device, encoder = subject.config, subject.device, _build_encoder(subject)
    apply_scope(encoder, Scope.parse(scope), seed=config.seed)
    if config.adaptation.recompute != "auto":
        encoder.recompute = (config.adaptation.recompute,) * len(encoder.recompute)
    encoder.compile_blocks(subject.compiled)
    targets = config.task.targets
    aggregator = build_run_aggregator(config, encoder.feature_size, len(targets)).to(device)
    weights_dtype, compute_dtype = select_dtypes(config, device)
    model = SlideModel(encoder, aggregator, build_task({name: [0, 1] for name in targets}), compute_dtype)
    optimisation = replace(
        build_optimiser_settings(config, weights_dtype=weights_dtype, compiled=subject.compiled),
        float32_gradients=config.optimiser.slides_per_step > 1 or chunking.tiles is not None,
    )
    learner = Learner(
        model, build_adaptation_settings(config, chunking, compute_dtype), optimisation, on_smaller_chunks=_did_not_fit
    )
    learner.start_epoch(0)
    return learner


def _did_not_fit(_tiles: int) -> None:
    """Keep a step from being taken in smaller chunks than were asked for."""
    raise torch.OutOfMemoryError("the step does not fit")


def learn_once(learner: Learner, pixels: Tensor, subject: BenchSubject) -> None:
    """Take one slide's step with pixels as they were read, augmented as in training."""
    augmentation = build_augmentation(subject.config)
    content = AugmentedTiles(pixels, augmentation, 0, device=subject.device, compiled=subject.compiled)
    bag = Bag(content, np.arange(len(pixels)), coordinates=_grid_coordinates(len(pixels)))
    count = len(learner.model.task.targets)
    targets = Targets(torch.ones(count), torch.ones(count, dtype=torch.bool))
    report = learner.train_step(bag, targets, update=True, slide_id="bench")
    report.loss_agg.item()


def forward_gflop(card: EncoderCard) -> float:
    """Count a tile's forward, 2 for each multiply-add: patches, linear layers of all blocks, attention."""
    with torch.device("meta"):
        vit: Any = build_vit(card)
    patches, width = int(vit.patch_embed.num_patches), int(vit.embed_dim)
    tokens = patches + int(vit.num_prefix_tokens)
    linear = sum(layer.weight.numel() for layer in vit.blocks.modules() if isinstance(layer, nn.Linear))
    attention = 2 * tokens * width * len(vit.blocks)  # for each token: a product with all keys, one with all values
    return 2 * (patches * int(vit.patch_embed.proj.weight.numel()) + tokens * (linear + attention)) / 1e9


def _grid_coordinates(tiles: int) -> Tensor:
    """Return coordinates of tiles in rows, for aggregators that use them."""
    across = max(1, round(tiles**0.5))
    return torch.tensor([(i % across, i // across) for i in range(tiles)], dtype=torch.float32)
