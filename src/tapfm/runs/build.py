"""Build the encoder and the aggregator of a run from its configuration."""

from __future__ import annotations

import torch
from torch import nn

from tapfm.aggregators.catalog import build_aggregator
from tapfm.config.settings import RunConfig
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import Provenance, load_encoder


def load_trainable_encoder(config: RunConfig, device: torch.device) -> tuple[VitEncoder, Provenance]:
    """Return the encoder, trainable in the adaptation scope and frozen elsewhere, and the origin of its weights."""
    loaded = load_encoder(config.encoder.name, weights=config.encoder.weights)
    apply_scope(loaded.encoder, Scope.parse(config.adaptation.scope), seed=config.seed)
    return loaded.encoder.to(device), loaded.provenance


def build_run_aggregator(config: RunConfig, feature_size: int, targets: int) -> nn.Module:
    """Build the untrained aggregator for this number of targets."""
    return build_aggregator(
        config.aggregator.name,
        feature_size,
        targets,
        tau=config.adaptation.tau,
        layer_norm=config.head.layer_norm,
        options=config.aggregator.options,
    )
