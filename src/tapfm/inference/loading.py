"""Load runs and exports for inference, on tiles or on stored features."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from rich.console import Console

from tapfm.aggregators.catalog import find_aggregator_card
from tapfm.encoders.inference import prepare_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.errors import FeatureStoreError, RunError, WeightsDigestError, WeightsError
from tapfm.inference.float8_check import COMPARED_TILES, prepare_float8_model
from tapfm.inference.precision import choose_inference_precision
from tapfm.inference.predictor import InferenceModel
from tapfm.inference.slide_bags import collect_slide_tiles
from tapfm.runs.data import RunSlide
from tapfm.runs.model import SlideModel
from tapfm.runs.model_folder import ModelFolder, ModelMember
from tapfm.runs.saved_model import SavedModel, load_member
from tapfm.runtime.device_memory import explain_memory_error


@dataclass(frozen=True)
class InferenceOptions:
    """Device and performance options of inference; None: chosen automatically."""

    device: torch.device
    workers: int  # processes that read tiles
    batch: int | None = None  # tiles encoded at a time
    precision: str = "auto"  # auto: as in training; for an export, bfloat16 if the GPU supports it
    compiled: bool | None = None


def load_with_encoder(member: ModelMember, device: torch.device) -> SlideModel:
    """Load a model for tiles; if it was trained on stored features, also load the encoder that computed them."""
    with explain_memory_error(device):
        saved = load_member(member.folder, device)
        if saved.model.encoder is not None:
            return saved.model
        return SlideModel(_load_base_encoder(member, saved, device), saved.model.aggregator, saved.model.task)


def load_for_features(member: ModelMember, slides: Sequence[RunSlide], device: torch.device) -> InferenceModel:
    """Load a model for the stored features of these slides."""
    with explain_memory_error(device):
        saved = load_member(member.folder, device)
    _check_features_match(saved, slides)
    return InferenceModel(None, SlideModel(None, saved.model.aggregator, saved.model.task))


def prepare_model(
    member: ModelMember, model: SlideModel, precision: str = "auto", *, tiles: int, compiled: bool | None = None
) -> InferenceModel:
    """Prepare a model for inference on `tiles` tiles in total; "auto": see `InferenceOptions`."""
    assert model.encoder is not None
    if precision == "auto" and member.config is not None:
        precision = member.config.adaptation.precision
    model.train(False)
    chosen = choose_inference_precision(precision, model.device)
    with explain_memory_error(model.device):
        return InferenceModel(prepare_encoder(model.encoder, chosen, tiles=tiles, compiled=compiled), model)


def prepare_models(
    model_folder: ModelFolder,
    slides: Sequence[RunSlide],
    options: InferenceOptions,
    console: Console,
    loading: Future[list[SlideModel]] | None = None,
) -> list[InferenceModel]:
    """Prepare all members of a model for these slides.

    loading: the models, if loading has already started in another thread.
    """
    tiles = sum(len(slide.tiles) for slide in slides if slide.tiles is not None)
    prepared = []
    for member in model_folder.members:
        # pop: a reference held by the future would keep the weights in memory
        model = load_with_encoder(member, options.device) if loading is None else loading.result().pop(0)
        if options.precision != "float8":
            prepared.append(prepare_model(member, model, options.precision, tiles=tiles, compiled=options.compiled))
            continue
        reference = prepare_model(member, model, "bfloat16", tiles=COMPARED_TILES)
        float8, message = prepare_float8_model(
            reference,
            collect_slide_tiles(slides),
            tiles=tiles,
            compiled=options.compiled,
            batch=options.batch,
            workers=options.workers,
        )
        if message:
            console.print(message, markup=False, soft_wrap=True)
        prepared.append(float8)
    return prepared


def _load_base_encoder(member: ModelMember, saved: SavedModel, device: torch.device) -> VitEncoder:
    """Load the encoder of the features that a run was trained on. Raises an error if the weights differ."""
    assert member.config is not None  # an export contains its encoder
    weights = member.config.encoder.weights
    source = weights or ("the tapfm package" if saved.card.packaged else "the Hugging Face cache")
    try:
        loaded = load_encoder(saved.card, weights=weights)
    except WeightsError as error:
        error.hint += (
            f"\nThis command has no option --weights: it reads the weights of {member.folder} from {source}. Without "
            "them, you can evaluate on features: tapfm evaluate RUN --features DIR"
        )
        raise
    expected = saved.metadata["encoder"]["base_weights_sha256"]
    if expected not in (None, loaded.provenance.sha256):
        raise WeightsDigestError(
            f"{member.folder} was trained on features from different weights of {saved.card.name}: SHA-256 {expected}, "
            f"but the weights found have {loaded.provenance.sha256}.",
            hint=f"The weights are read from {source}. Restore those with the first SHA-256, or evaluate on features "
            "from them: tapfm evaluate RUN --features DIR",
        )
    feature_size = saved.metadata["aggregator"]["feature_size"]
    if loaded.encoder.feature_size != feature_size:
        raise RunError(
            f"{member.folder} was trained on features of size {feature_size}, but {saved.card.name} computes features "
            f"of size {loaded.encoder.feature_size}.",
            hint="Evaluate on features from the same encoder: tapfm evaluate RUN --features DIR",
        )
    return loaded.encoder.to(device)


def _check_features_match(saved: SavedModel, slides: Sequence[RunSlide]) -> None:
    """Raise FeatureStoreError if the features are not like those that the model was trained on."""
    aggregator, encoder = saved.metadata["aggregator"], saved.metadata["encoder"]
    card = find_aggregator_card(aggregator["name"])
    for slide in slides:
        assert slide.features is not None
        path, metadata = slide.features.path, slide.features.metadata
        own_weights = ""
        if metadata.size != aggregator["feature_size"]:
            problem = f"has features of size {metadata.size}, but the model needs {aggregator['feature_size']}"
        elif metadata.origin == "tapfm" and metadata.encoder not in (None, saved.card.key):
            problem = f"was created with {metadata.encoder}, but the model needs features of {saved.card.key}"
        elif metadata.weights_sha256 and encoder["base_weights_sha256"] not in (None, metadata.weights_sha256):
            problem = f"was created with different weights of {encoder['name']} than the model was trained with"
            own_weights = ", and --weights FILE if the model was trained with your own weights file"
        elif card.uses_raw_attention and not metadata.has_attention:
            problem = f"({metadata.origin}) has no raw attention, which {card.name} uses to weight tiles"
        elif card.uses_coordinates and not metadata.has_coordinates:
            problem = f"({metadata.origin}) has no tile coordinates in level-0 pixels, which {card.name} uses"
        else:
            continue
        raise FeatureStoreError(
            f"{path} {problem}.",
            hint="Compute the features: tapfm embed COHORT.csv --tiles DIR "
            f"--encoder {encoder['name']} --out NEW_DIR{own_weights}",
        )
