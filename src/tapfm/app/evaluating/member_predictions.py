"""What a run or an export says of slides, on all of their tiles: as the final figures of training are made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console

from tapfm.adaptation.bags import Bags, FeatureBags, PixelBags, SlideTiles
from tapfm.adaptation.learner import Learner, Optimisation
from tapfm.adaptation.trainer import LabelledSlide
from tapfm.adaptation.two_graph import Adaptation
from tapfm.aggregators.catalog import aggregator_card
from tapfm.app.build_run import labelled
from tapfm.app.devices import choose_device
from tapfm.app.evaluating.data import EvaluatedSlides
from tapfm.app.evaluating.ensemble import load_member
from tapfm.app.evaluating.members import Member
from tapfm.app.final_predictions import Final, Looked, Remembered, final_of, predict_slides
from tapfm.app.looking import looking_precision
from tapfm.app.progress import Counter
from tapfm.app.saved_model import SavedModel
from tapfm.encoders.inference import make_ready, usual_batch
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import load_encoder
from tapfm.errors import FeatureStoreError, RunError, WeightsDigestError
from tapfm.model import SlideModel
from tapfm.tiles.augment import Augmentation

AHEAD_BYTES = 2**30


def predict_member(
    member: Member,
    data: EvaluatedSlides,
    notes: Path,
    *,
    device: str,
    workers: int,
    said_as: str,
    console: Console,
    asked_to_stop: Callable[[], int | None],
) -> Final:
    """Predict the slides; those that the run has predicted already, with these weights and tiles, are not read again.

    What is done is remembered in the file `notes`.
    """
    slides = labelled(data.slides)
    remembered = Remembered(notes, member.digest, data.contents())
    known = remembered.read()
    for slide_id, looked in predicted_in_training(member, data, slides).items():
        if slide_id not in known:
            remembered.add(slide_id, looked)
            known[slide_id] = looked
    if all(slide.slide_id in known for slide in slides):
        return final_of(slides, member.targets, known, {})
    model = ready_model(member, data, choose_device(device))
    bags = bags_of(data, model, workers)
    with closing(Counter(console, said_as, sum(slide.slide_id not in known for slide in slides))) as counter:
        # the optimisers of this learner are never asked
        return predict_slides(
            Learner(model, Adaptation(), Optimisation()),
            bags,
            slides,
            remembered,
            said=counter.one_more,
            asked_to_stop=asked_to_stop,
        )


def predicted_in_training(member: Member, data: EvaluatedSlides, slides: list[LabelledSlide]) -> dict[str, Looked]:
    """Recall what the run wrote of these slides with its best epoch's weights.

    Their tiles, or features, are those of then: slides whose content changed are refused before.
    """
    if not data.own or member.adapted != (data.features is None):
        return {}
    noted = {row["slide_id"] for row in member.slides()}
    known: dict[str, Looked] = {}
    for split in {slide.split for slide in slides}:
        known |= Remembered(member.folder / f".predictions-{split}.jsonl", member.digest).read()
    wanted = {slide.slide_id for slide in slides}
    return {slide_id: looked for slide_id, looked in known.items() if slide_id in wanted & noted}


def ready_model(member: Member, data: EvaluatedSlides, device: torch.device) -> SlideModel:
    """Load a model for what is given to it: tiles, or features of its encoder."""
    if data.features is None:
        return model_of_tiles(member, device, tiles=sum(len(slide.tiles) for slide in data.slides if slide.tiles))
    saved = load_member(member.folder, device)
    refuse_other_features(saved, data)
    return SlideModel(None, saved.model.aggregator, saved.model.task)


def load_with_encoder(member: Member, device: torch.device) -> SlideModel:
    """Load a model for tiles; where it learnt from stored features, it gets the encoder that made them."""
    saved = load_member(member.folder, device)
    if saved.model.encoder is not None:
        return saved.model
    return SlideModel(base_encoder(member, saved, device), saved.model.aggregator, saved.model.task)


def model_of_tiles(
    member: Member,
    device: torch.device,
    precision: str = "auto",
    *,
    tiles: int,
    compiled: bool | None = None,
    loaded: SlideModel | None = None,
) -> SlideModel:
    """Load a model that is to look at so many tiles, and make it ready; auto is the precision that it learnt in."""
    model = load_with_encoder(member, device) if loaded is None else loaded
    encoder = model.encoder
    assert encoder is not None
    if precision == "auto" and member.config is not None:
        precision = member.config.adaptation.precision
    looking = make_ready(encoder, looking_precision(precision, device), tiles=tiles, compiled=compiled)
    ready = SlideModel(encoder, model.aggregator, model.task, looking=looking)
    ready.train(False)
    return ready


def base_encoder(member: Member, saved: SavedModel, device: torch.device) -> VitEncoder:
    """Load the encoder whose features a run learnt from; other weights are refused."""
    assert member.config is not None  # an export loads it by itself
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


def refuse_other_features(saved: SavedModel, data: EvaluatedSlides) -> None:
    """Refuse features that are not made as those the model learnt from."""
    aggregator, encoder = saved.description["aggregator"], saved.description["encoder"]
    card = aggregator_card(aggregator["name"])
    for slide in data.slides:
        assert slide.features is not None
        path, facts = slide.features.path, slide.features.facts
        if facts.size != aggregator["feature_size"]:
            problem = f"holds features of size {facts.size}, and the model takes {aggregator['feature_size']}"
        elif facts.weights_sha256 and encoder["began_with_sha256"] not in (None, facts.weights_sha256):
            problem = f"was made by other weights of {encoder['name']} than the model learnt with"
        elif card.uses_attention and not facts.has_attention:
            problem = f"({facts.origin}) has no attention, by which {card.name} weighs tiles"
        elif card.uses_places and not facts.has_positions:
            problem = f"({facts.origin}) does not say where its tiles are, by which {card.name} joins them"
        else:
            continue
        raise FeatureStoreError(
            f"{path} {problem}.", hint=f"Make them: tapfm embed COHORT.csv --encoder {encoder['name']} --out DIR"
        )


def bags_of(data: EvaluatedSlides, model: SlideModel, workers: int) -> Bags:
    """Say where bags come from."""
    if model.encoder is None:
        files = {slide.row.slide_id: slide.features.path for slide in data.slides if slide.features is not None}
        return FeatureBags(files, device=model.device, ahead_bytes=AHEAD_BYTES)
    return PixelBags(
        {slide.row.slide_id: SlideTiles(slide.row.path, slide.tiles) for slide in data.slides if slide.tiles},
        tile_px=model.encoder.tile_px,
        augmentation=Augmentation(),  # of training bags, which are not asked for
        device=model.device,
        workers=workers,
        ahead_bytes=AHEAD_BYTES,
        chunk=usual_batch(model.encoder),
    )
