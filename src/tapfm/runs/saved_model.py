"""Load saved models for inference: the best epoch of a run, or an export."""

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
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.timm_folder import WEIGHTS_FILE
from tapfm.encoders.weights import load_encoder
from tapfm.errors import CheckpointError, RunError, SettingError, WeightsDigestError, WeightsError
from tapfm.runs.build import load_trainable_encoder
from tapfm.runs.checkpoint import load_checkpoint
from tapfm.runs.ensemble import EXPORT_METADATA_FILE, is_export
from tapfm.runs.folder import RunFolder
from tapfm.runs.model import SlideModel, load_parameters
from tapfm.tasks.catalog import build_task, target_kinds
from tapfm.tasks.target import Label

AGGREGATOR_FILE = "aggregator.safetensors"  # in an export


@dataclass(frozen=True)
class SavedModel:
    """A loaded model, its encoder card and its metadata."""

    model: SlideModel
    card: EncoderCard
    metadata: dict[str, Any]  # as in the tapfm.json of an export


def load_member(folder: Path, device: torch.device | None = None) -> SavedModel:
    """Load the model of a run or an export."""
    return (load_export if is_export(folder) else load_run)(folder, device)


def load_run(folder: Path, device: torch.device | None = None) -> SavedModel:
    """Load the best epoch of a run, in evaluation mode; LoRA adapters are merged into the encoder."""
    run_folder, device = RunFolder(folder), device or torch.device("cpu")
    if not run_folder.has_run:
        raise RunError(
            f"{folder} is not a run folder: it has no config.toml.",
            hint="Pass the --out folder of a tapfm train command.",
        )
    run_folder.check_best_checkpoint_exists()
    if missing := [name for name in ("split.csv", "environment.json") if not (folder / name).exists()]:
        raise RunError(f"{folder} has no {' and no '.join(missing)}.", hint="Copy the whole run folder again.")
    config = load_config(folder / "config.toml")
    tensors, checkpoint_metadata = load_checkpoint(run_folder.best_checkpoint)
    labels = _read_training_labels(run_folder, config)
    metadata = {
        "targets": config.task.targets,
        "labels": config.class_texts,
        "encoder": {
            "name": config.encoder.name,
            "adapted": config.adaptation.method != "fixed",
            "base_weights_sha256": run_folder.read_environments()[0]["weights_sha256"],
            "base_weights": run_folder.read_environments()[0].get("weights"),
            "features_source": run_folder.read_environments()[0].get("features_source"),
        },
        "aggregator": {
            "name": config.aggregator.name,
            "options": config.aggregator.options,
            "tau": config.adaptation.tau,
            "layer_norm": config.head.layer_norm,
            "feature_size": _infer_feature_size(tensors, config),
        },
        "training_labels": {
            target: kind.summarise_training_labels(labels[target])
            for target, kind in target_kinds(config.task.targets, config.class_texts).items()
        },
        "tiles": run_folder.read_environments()[0].get("tiles"),
        "run": run_folder.compute_run_id(),
        "epoch": checkpoint_metadata["epoch"],
        "method": config.adaptation.method,
        "scope": config.adaptation.scope,
        "recipe": config.recipe,
        "seed": config.seed,
    }
    encoder = None
    if config.adaptation.method != "fixed":
        try:
            encoder, provenance = load_trainable_encoder(config, device)
        except WeightsError as error:
            if "--weights" in error.hint:
                error.hint = f"Set encoder.weights in {folder / 'config.toml'} to the weights file."
            raise
        _check_same_base_weights(run_folder, provenance.sha256, config)
    model = SlideModel(
        encoder,
        _build_untrained_aggregator(metadata, device),
        build_task(labels, kinds=target_kinds(config.task.targets, config.class_texts)),
    )
    load_parameters(model.trainable_parameters(), tensors)
    if encoder is not None:
        merge_adapters(encoder)
    model.train(False)
    return SavedModel(model, find_encoder_card(config.encoder.name), metadata)


def load_export(folder: Path, device: torch.device | None = None) -> SavedModel:
    """Load an export, in evaluation mode; an export of a fixed encoder uses the published encoder weights."""
    device = device or torch.device("cpu")
    try:
        metadata = json.loads((folder / EXPORT_METADATA_FILE).read_text("utf-8"))
        name, adapted = metadata["encoder"]["name"], metadata["encoder"]["adapted"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{folder} is not an exported model ({error}).", hint="Create one: tapfm export runs/NAME --out DIR"
        ) from error
    card, feature_size = find_encoder_card(name), metadata["aggregator"]["feature_size"]
    if feature_size != card.feature_size:
        raise RunError(
            f"{folder} was trained on features of size {feature_size}, but {card.name} computes features of size "
            f"{card.feature_size}.",
            hint="Train again with the encoder that computed the features: --set encoder.name=NAME",
        )
    encoder, _, provenance = load_encoder(card, weights=folder / WEIGHTS_FILE if adapted else None)
    if not adapted and (expected := metadata["encoder"]["base_weights_sha256"]) not in (None, provenance.sha256):
        raise WeightsDigestError(
            f"{folder} was trained on features of {card.name}, but with other weights than the published ones. SHA-256 "
            f"in training: {expected}; published: {provenance.sha256}.",
            hint="Compute features with the published weights (tapfm embed), then train again.",
        )
    encoder.to(device)
    summaries = metadata["training_labels"]
    kinds = target_kinds(summaries, metadata.get("labels"))
    labels = {target: kind.restore_training_labels(summaries[target]) for target, kind in kinds.items()}
    model = SlideModel(encoder, load_aggregator(folder, metadata, device), build_task(labels, kinds=kinds))
    model.train(False)
    return SavedModel(model, card, metadata)


def load_aggregator(folder: Path, metadata: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """Load the aggregator of an export."""
    aggregator = _build_untrained_aggregator(metadata, device)
    tensors, _ = load_checkpoint(folder / AGGREGATOR_FILE)
    load_parameters({f"aggregator/{name}": each for name, each in aggregator.named_parameters()}, tensors)
    return aggregator


def _build_untrained_aggregator(metadata: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """Build the aggregator that the metadata of a saved model describes."""
    settings = metadata["aggregator"]
    return build_aggregator(
        settings["name"],
        settings["feature_size"],
        len(metadata["targets"]),
        tau=settings["tau"],
        layer_norm=settings["layer_norm"],
        options=settings["options"],
    ).to(device)


def _infer_feature_size(tensors: dict[str, Tensor], config: RunConfig) -> int:
    """Return the size of the features that the aggregator takes.

    An adapted encoder computes features of the size in its card. Stored features of a fixed encoder may have another
    size, which is inferred from the shapes of the aggregator's tensors.
    """
    if config.adaptation.method != "fixed":
        return find_encoder_card(config.encoder.name).feature_size
    # try each size that occurs in the tensors, until an aggregator of this feature size has the same shapes
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
        f'The checkpoint does not match aggregator.name = "{config.aggregator.name}" and its options in config.toml.',
        hint="Restore the config.toml that the run was started with.",
    )


def _read_training_labels(run_folder: RunFolder, config: RunConfig) -> dict[str, list[Label]]:
    """Read the labels of the training slides from split.csv, by target."""
    rows = [row for row in run_folder.read_split_rows() if row["split"] == TRAIN]
    kinds = target_kinds(config.task.targets, config.class_texts)
    return {target: [kind.parse_label(row[target]) for row in rows] for target, kind in kinds.items()}


def _check_same_base_weights(run_folder: RunFolder, sha256: str, config: RunConfig) -> None:
    """Raise WeightsDigestError if the base weights differ from those of the run.

    With adaptation.scope = "full", they may differ, because the checkpoint contains all weights.
    """
    expected = run_folder.read_environments()[0]["weights_sha256"]
    if config.adaptation.scope != "full" and sha256 != expected:
        raise WeightsDigestError(
            f"The weights of {config.encoder.name} differ from those that {run_folder.folder} was started with: "
            f"SHA-256 {sha256} instead of {expected}.",
            hint="Set encoder.weights in config.toml to the original file.",
        )
