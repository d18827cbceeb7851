"""Models that were saved: the best epoch of a run, or an exported folder, ready to be asked."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tapfm.aggregators.catalog import build_aggregator
from tapfm.cohort.splits import TRAIN
from tapfm.config.loading import load_config
from tapfm.config.settings import RunConfig
from tapfm.encoders.adapters import merge_adapters
from tapfm.encoders.card import EncoderCard
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.timm_folder import WEIGHTS
from tapfm.encoders.weights import load_encoder
from tapfm.errors import CheckpointError, RunError, SettingError, WeightsDigestError
from tapfm.runs.build import load_trainable_encoder
from tapfm.runs.checkpoint import load_checkpoint
from tapfm.runs.folder import RunFolder
from tapfm.runs.model import SlideModel, load_parameters
from tapfm.runtime.messages import command
from tapfm.tasks.catalog import build_task, target_kinds
from tapfm.tasks.target import Label

DESCRIPTION = "tapfm.json"  # of an exported folder
AGGREGATOR = "aggregator.safetensors"


@dataclass(frozen=True)
class SavedModel:
    """A model and what it was made from."""

    model: SlideModel
    card: EncoderCard
    description: dict[str, Any]  # what tapfm.json holds


def load_run(folder: Path, device: torch.device | None = None) -> SavedModel:
    """Load the best epoch of a run; adapters are folded into the encoder."""
    run_folder, device = RunFolder(folder), device or torch.device("cpu")
    if not run_folder.begun:
        raise RunError(f"{folder} is no run: it has no config.toml.", hint="Runs are what tapfm train writes to --out.")
    if not run_folder.best.exists():
        raise RunError(
            f"{folder} has not finished an epoch yet.",
            hint=f"Go on with it: {command('train', folder / 'config.toml', '--out', folder, '--resume')}",
        )
    if missing := [name for name in ("split.csv", "environment.json") if not (folder / name).exists()]:
        raise RunError(f"{folder} has no {' and no '.join(missing)}.", hint="Copy the whole folder of the run again.")
    config = load_config(folder / "config.toml")
    tensors, checkpoint = load_checkpoint(run_folder.best)
    labels = _training_labels(run_folder, config)
    description = {
        "targets": config.task.targets,
        "encoder": {
            "name": config.encoder.name,
            "adapted": config.adaptation.method != "fixed",
            "began_with_sha256": run_folder.environments()[0]["weights_sha256"],
            "features_made_by": run_folder.environments()[0].get("features_made_by"),
        },
        "aggregator": {
            "name": config.aggregator.name,
            "options": config.aggregator.options,
            "tau": config.adaptation.tau,
            "layer_norm": config.head.layer_norm,
            "feature_size": _feature_size_of(tensors, config),
        },
        "training_labels": {
            target: kind.summarise_training(labels[target])
            for target, kind in target_kinds(config.task.targets).items()
        },
        "tiles": run_folder.environments()[0].get("tiles"),
        "run": run_folder.identity(),
        "epoch": checkpoint["epoch"],
        "method": config.adaptation.method,
        "scope": config.adaptation.scope,
        "recipe": config.recipe,
        "seed": config.seed,
    }
    encoder = None
    if config.adaptation.method != "fixed":
        encoder, provenance = load_trainable_encoder(config, device)
        _refuse_other_base(run_folder, provenance.sha256, config)
    model = SlideModel(encoder, _build(description, device), build_task(labels))
    load_parameters(model.trained_parameters(), tensors)
    if encoder is not None:
        merge_adapters(encoder)
    model.train(False)
    return SavedModel(model, encoder_card(config.encoder.name), description)


def load_export(folder: Path, device: torch.device | None = None) -> SavedModel:
    """Load what `tapfm export` wrote; of a run with a fixed encoder, the base model's weights are loaded beside."""
    device = device or torch.device("cpu")
    try:
        description = json.loads((folder / DESCRIPTION).read_text("utf-8"))
        name, adapted = description["encoder"]["name"], description["encoder"]["adapted"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{folder} is no exported model ({error}).", hint="Make one: tapfm export runs/NAME --out DIR"
        ) from error
    card, feature_size = encoder_card(name), description["aggregator"]["feature_size"]
    if feature_size != card.feature_size:
        raise RunError(
            f"{folder} was trained on features of size {feature_size}, and {card.name} makes some of size "
            f"{card.feature_size}.",
            hint="Train again, naming the encoder that made the features: --set encoder.name=NAME",
        )
    encoder, _, provenance = load_encoder(card, weights=folder / WEIGHTS if adapted else None)
    if not adapted and (made_by := description["encoder"]["began_with_sha256"]) not in (None, provenance.sha256):
        raise WeightsDigestError(
            f"{folder} was trained on features of other weights of {card.name}: SHA-256 {made_by}, here is "
            f"{provenance.sha256}.",
            hint="Train again on features of the published weights: tapfm embed",
        )
    encoder.to(device)
    summaries = description["training_labels"]
    labels = {target: kind.restore_training(summaries[target]) for target, kind in target_kinds(summaries).items()}
    model = SlideModel(encoder, load_aggregator(folder, description, device), build_task(labels))
    model.train(False)
    return SavedModel(model, card, description)


def load_aggregator(folder: Path, description: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """Load the aggregator of an exported folder."""
    aggregator = _build(description, device)
    tensors, _ = load_checkpoint(folder / AGGREGATOR)
    load_parameters({f"aggregator/{name}": each for name, each in aggregator.named_parameters()}, tensors)
    return aggregator


def _build(description: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """Build the aggregator that a description names."""
    facts = description["aggregator"]
    return build_aggregator(
        facts["name"],
        facts["feature_size"],
        len(description["targets"]),
        tau=facts["tau"],
        layer_norm=facts["layer_norm"],
        options=facts["options"],
    ).to(device)


def _feature_size_of(tensors: dict[str, Tensor], config: RunConfig) -> int:
    """Find the size of the features that the aggregator takes: the card's, or that of the stored ones."""
    if config.adaptation.method != "fixed":
        return encoder_card(config.encoder.name).feature_size
    # of the sizes that its tensors have, the one with which the aggregator has just these tensors
    shapes = {name: each.shape for name, each in tensors.items() if name.startswith("aggregator/")}
    for size in sorted({size for shape in shapes.values() for size in shape}, reverse=True):
        with torch.device("meta"), contextlib.suppress(SettingError):
            aggregator = build_aggregator(
                config.aggregator.name,
                size,
                len(config.task.targets),
                layer_norm=config.head.layer_norm,
                options=config.aggregator.options,
            )
            if shapes == {f"aggregator/{name}": each.shape for name, each in aggregator.named_parameters()}:
                return size
    raise CheckpointError(
        f"The checkpoint holds no aggregator {config.aggregator.name} with these options.",
        hint="Was config.toml changed, or taken from another run?",
    )


def _training_labels(run_folder: RunFolder, config: RunConfig) -> dict[str, list[Label]]:
    """Read the labels that class weights were made of."""
    rows = [row for row in run_folder.slides() if row["split"] == TRAIN]
    kinds = target_kinds(config.task.targets)
    return {target: [kind.parse_label(row[target]) for row in rows] for target, kind in kinds.items()}


def _refuse_other_base(run_folder: RunFolder, sha256: str, config: RunConfig) -> None:
    """Refuse weights that are not those the run began with, where the checkpoint holds only a part."""
    began_with = run_folder.environments()[0]["weights_sha256"]
    if config.adaptation.scope != "full" and sha256 != began_with:
        raise WeightsDigestError(
            f"The weights of {config.encoder.name} are not those that {run_folder.folder} began with: their SHA-256 is "
            f"{sha256}, it was {began_with}.",
            hint="Give the file it began with: encoder.weights in config.toml.",
        )
