"""Load runs and exports for inference, on tiles or on stored features."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from rich.console import Console

from tapfm.aggregators.catalog import aggregator_card
from tapfm.encoders.inference import prepare_encoder
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.errors import FeatureStoreError, RunError, WeightsDigestError
from tapfm.inference.float8_check import COMPARED_TILES, use_float8
from tapfm.inference.precision import choose_inference_precision
from tapfm.inference.predictor import InferenceModel
from tapfm.inference.slide_bags import slide_tiles
from tapfm.runs.data import RunSlide
from tapfm.runs.ensemble import load_member
from tapfm.runs.model import SlideModel
from tapfm.runs.model_folder import ModelFolder, ModelMember
from tapfm.runs.saved_model import SavedModel
from tapfm.runtime.device_memory import memory_for_loading


@dataclass(frozen=True)
class InferenceOptions:
    """Where and how inference runs; None is chosen by the amount of work."""

    device: torch.device
    workers: int  # processes that read tiles
    batch: int | None = None
    precision: str = "auto"  # the one that each model was trained in
    compiled: bool | None = None


def load_with_encoder(member: ModelMember, device: torch.device) -> SlideModel:
    """Load a model for tiles; one that was trained on stored features gets the encoder that made them."""
    with memory_for_loading(device):
        saved = load_member(member.folder, device)
        if saved.model.encoder is not None:
            return saved.model
        return SlideModel(_base_encoder(member, saved, device), saved.model.aggregator, saved.model.task)


def load_for_features(member: ModelMember, slides: Sequence[RunSlide], device: torch.device) -> InferenceModel:
    """Load a model for the stored features of these slides."""
    with memory_for_loading(device):
        saved = load_member(member.folder, device)
    _refuse_other_features(saved, slides)
    return InferenceModel(None, SlideModel(None, saved.model.aggregator, saved.model.task))


def prepare_model(
    member: ModelMember, model: SlideModel, precision: str = "auto", *, tiles: int, compiled: bool | None = None
) -> InferenceModel:
    """Prepare a model for inference on `tiles` tiles in total; auto is the precision that it was trained in."""
    assert model.encoder is not None
    if precision == "auto" and member.config is not None:
        precision = member.config.adaptation.precision
    model.train(False)
    chosen = choose_inference_precision(precision, model.device)
    with memory_for_loading(model.device):
        return InferenceModel(prepare_encoder(model.encoder, chosen, tiles=tiles, compiled=compiled), model)


def prepare_models(
    evaluated: ModelFolder,
    slides: Sequence[RunSlide],
    options: InferenceOptions,
    console: Console,
    loading: Future[list[SlideModel]] | None = None,
) -> list[InferenceModel]:
    """Prepare the members for all tiles of these slides; `loading` has their weights where they were loaded before."""
    tiles = sum(len(slide.tiles) for slide in slides if slide.tiles is not None)
    prepared = []
    for member in evaluated.members:
        # popped: a reference in the future would keep the weights in memory
        model = load_with_encoder(member, options.device) if loading is None else loading.result().pop(0)
        if options.precision != "float8":
            prepared.append(prepare_model(member, model, options.precision, tiles=tiles, compiled=options.compiled))
            continue
        exact = prepare_model(member, model, "bfloat16", tiles=COMPARED_TILES)
        float8, message = use_float8(
            exact,
            slide_tiles(slides),
            tiles=tiles,
            compiled=options.compiled,
            batch=options.batch,
            workers=options.workers,
        )
        if message:
            console.print(message, markup=False, soft_wrap=True)
        prepared.append(float8)
    return prepared


def _base_encoder(member: ModelMember, saved: SavedModel, device: torch.device) -> VitEncoder:
    """Load the encoder whose features a run was trained on; refuse other weights."""
    assert member.config is not None  # an export contains its encoder
    loaded = load_encoder(saved.card, weights=member.config.encoder.weights)
    made_by = saved.description["encoder"]["began_with_sha256"]
    if made_by not in (None, loaded.provenance.sha256):
        raise WeightsDigestError(
            f"{member.folder} was trained on features of other weights of {saved.card.name}: their SHA-256 is "
            f"{made_by}, here is {loaded.provenance.sha256}.",
            hint="Features of the same weights can be evaluated: tapfm evaluate RUN --features DIR",
        )
    feature_size = saved.description["aggregator"]["feature_size"]
    if loaded.encoder.feature_size != feature_size:
        raise RunError(
            f"{member.folder} was trained on features of size {feature_size}, and {saved.card.name} makes some of size "
            f"{loaded.encoder.feature_size}.",
            hint="Features of the encoder that made them can be evaluated: tapfm evaluate RUN --features DIR",
        )
    return loaded.encoder.to(device)


def _refuse_other_features(saved: SavedModel, slides: Sequence[RunSlide]) -> None:
    """Refuse features that were not made like those the model was trained on."""
    aggregator, encoder = saved.description["aggregator"], saved.description["encoder"]
    card = aggregator_card(aggregator["name"])
    for slide in slides:
        assert slide.features is not None
        path, facts = slide.features.path, slide.features.facts
        if facts.size != aggregator["feature_size"]:
            problem = f"holds features of size {facts.size}, and the model takes {aggregator['feature_size']}"
        elif facts.weights_sha256 and encoder["began_with_sha256"] not in (None, facts.weights_sha256):
            problem = f"was made by other weights of {encoder['name']} than the model was trained with"
        elif card.uses_attention and not facts.has_attention:
            problem = f"({facts.origin}) has no attention, which {card.name} uses to weight tiles"
        elif card.uses_places and not facts.has_positions:
            problem = f"({facts.origin}) has no tile coordinates, which {card.name} uses"
        else:
            continue
        raise FeatureStoreError(
            f"{path} {problem}.", hint=f"Make them: tapfm embed COHORT.csv --encoder {encoder['name']} --out DIR"
        )
