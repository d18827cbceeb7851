"""From a configuration to what `fit` takes: model, optimisers, plan and bags. Config stops here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tapfm.adaptation.bags import Bags, FeatureBags, PixelBags, SlideTiles
from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.learner import Learner, Optimisation
from tapfm.adaptation.optimisers import Schedule
from tapfm.adaptation.trainer import LabelledSlide, Plan
from tapfm.adaptation.two_graph import Adaptation
from tapfm.aggregators.catalog import aggregator_card, build_aggregator
from tapfm.app.config import RunConfig
from tapfm.app.devices import choose_precision
from tapfm.app.run_data import RunData, SlideOfRun
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.features import FeatureFacts
from tapfm.encoders.vit import VitEncoder
from tapfm.encoders.weights import Provenance, load_encoder
from tapfm.errors import InputError, WeightsError
from tapfm.model import SlideModel
from tapfm.tasks.catalog import build_task
from tapfm.tiles.augment import Augmentation

GRAPH_BYTES = 2 * 2**30  # of a chunk, where memory cannot be asked for
GRAPH_FLOATS = 24  # that a block keeps for each number of its input
CUDA_CHUNK = 64
ENCODING_CHUNK = 64  # without a graph


def build_learner(config: RunConfig, data: RunData, device: torch.device) -> tuple[Learner, str | None]:
    """Build the model and its optimisers; also gives the SHA-256 of the encoder's weights, where it is known.

    The same seed gives the same first weights.
    """
    compute_dtype = choose_precision(config.adaptation.precision, device)
    if config.adaptation.method == "fixed":
        facts = stored_features(config, data)
        encoder, feature_size, sha256 = None, facts.size, facts.weights_sha256
    else:
        encoder, provenance = ready_encoder(config, device)
        feature_size, sha256 = encoder.feature_size, provenance.sha256
    torch.manual_seed(config.seed)
    aggregator = build_aggregator(
        config.aggregator.name,
        feature_size,
        len(data.targets),
        tau=config.adaptation.tau,
        layer_norm=config.head.layer_norm,
        options=config.aggregator.options,
    ).to(device)
    task = build_task(data.training_labels(), smoothing=config.head.label_smoothing, weighting=config.task.weighting)
    model = SlideModel(encoder, aggregator, task, compute_dtype)
    adaptation = Adaptation(
        lambda_=config.adaptation.lambda_,
        beta=config.adaptation.beta,
        cosine=config.adaptation.cosine,
        bag_gradient=config.adaptation.bag_gradient,
        chunking=Chunking() if encoder is None else chunking_of(config, encoder, device),
        compute_dtype=compute_dtype,
    )
    return Learner(model, adaptation, optimisation_of(config)), sha256


def ready_encoder(config: RunConfig, device: torch.device) -> tuple[VitEncoder, Provenance]:
    """Load the encoder, and open to learning what the scope says."""
    try:
        loaded = load_encoder(config.encoder.name, weights=config.encoder.weights)
    except WeightsError as error:
        error.hint += "\nIn a configuration, --weights FILE is: --set encoder.weights=FILE"
        raise
    apply_scope(loaded.encoder, Scope.parse(config.adaptation.scope), seed=config.seed)
    loaded.encoder.checkpoint_blocks = config.adaptation.checkpoint_blocks
    return loaded.encoder.to(device), loaded.provenance


def stored_features(config: RunConfig, data: RunData) -> FeatureFacts:
    """Say what the features are; all have to be of one encoder, and with attention where the aggregator asks for it."""
    found: dict[tuple[object, ...], list[SlideOfRun]] = {}
    aggregator = aggregator_card(config.aggregator.name)
    for slide in data.slides:
        assert slide.features is not None
        facts = slide.features.facts
        found.setdefault((facts.size, facts.encoder, facts.weights_sha256, facts.precision), []).append(slide)
        if aggregator.uses_attention and not facts.has_attention:
            raise InputError(
                f"{slide.features.path} ({facts.origin}) has no attention, by which {config.aggregator.name} weighs "
                "tiles.",
                hint='Make features with it: tapfm embed; or use an aggregator without: aggregator.name = "abmil"',
            )
        if aggregator.uses_places and not facts.has_positions:
            raise InputError(
                f"{slide.features.path} ({facts.origin}) does not say where its tiles are, by which {aggregator.name} "
                "joins them.",
                hint='Make features that do: tapfm embed; or use another aggregator: aggregator.name = "abmil"',
            )
    if len(found) > 1:
        kinds = [
            f"{facts[0]} features by {facts[1] or 'an encoder that is not named'}: {slides[0].row.slide_id} "
            f"(and {len(slides) - 1:,} more)"
            for facts, slides in found.items()
        ]
        raise InputError(
            "The features are not all made by the same encoder, weights and precision:\n  " + "\n  ".join(kinds),
            hint="Make them anew: tapfm embed COHORT.csv --encoder NAME --out DIR --force",
        )
    assert slide.features is not None
    facts = slide.features.facts
    ours = encoder_card(config.encoder.name).key
    if facts.origin == "tapfm" and facts.encoder not in (None, ours):  # other tools have other names for it
        raise InputError(
            f"The features were made by {facts.encoder}, and the configuration says {ours}.",
            hint=f"Say which it is: --set encoder.name={facts.encoder}",
        )
    return facts


def chunking_of(config: RunConfig, encoder: VitEncoder, device: torch.device) -> Chunking:
    """Say how a bag goes through the encoder. Without a GPU by a fixed rule: another split would round otherwise."""
    chunk, cuda = config.adaptation.chunk, device.type == "cuda"
    if chunk == "all":
        return Chunking()
    vit = encoder.vit
    tokens = int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens)
    tile_bytes = 4 * GRAPH_FLOATS * tokens * int(vit.embed_dim) * len(vit.blocks)
    fitting = CUDA_CHUNK if cuda else max(1, GRAPH_BYTES // tile_bytes)
    return Chunking(tiles=fitting if chunk == "auto" else chunk, keep="fit" if cuda else 1)


def optimisation_of(config: RunConfig) -> Optimisation:
    """Unpack the optimisers' settings."""
    return Optimisation(
        encoder_lr=config.optimiser.encoder_lr,
        aggregator_lr=config.optimiser.aggregator_lr,
        encoder_lr_min=config.schedule.encoder_lr_min,
        aggregator_lr_min=config.schedule.aggregator_lr_min,
        weight_decay=config.optimiser.weight_decay,
        decay_all=config.optimiser.decay_all,
        clip_norm=config.optimiser.clip_norm,
        slides_per_step=config.optimiser.slides_per_step,
        schedule=Schedule(config.schedule.first_cycle, config.schedule.cycle_factor),
    )


def plan_of(config: RunConfig) -> Plan:
    """Unpack the plan's settings."""
    return Plan(
        epochs=config.schedule.epochs,
        seed=config.seed,
        tiles_per_slide=number_or_all(config.adaptation.tiles_per_slide),
        validation_tiles=number_or_all(config.selection.validation_tiles),
        patience=config.selection.patience,
        unit=config.selection.unit,
        save_every_s=60 * config.machine.save_minutes,
        allow_failures=config.machine.allow_failures,
    )


def number_or_all(value: int | str) -> int | None:
    """Read "all" as no limit."""
    return value if isinstance(value, int) else None


def make_bags(config: RunConfig, data: RunData, model: SlideModel, workers: int) -> Bags:
    """Say where bags come from."""
    ahead_bytes = int(config.machine.read_ahead_gib * 2**30)
    if model.encoder is None:
        files = {slide.row.slide_id: slide.features.path for slide in data.slides if slide.features is not None}
        return FeatureBags(files, device=model.device, ahead_bytes=ahead_bytes)
    augmentation = config.augmentation
    return PixelBags(
        {slide.row.slide_id: SlideTiles(slide.row.path, slide.tiles) for slide in data.slides if slide.tiles},
        tile_px=model.encoder.tile_px,
        augmentation=Augmentation(
            flip=augmentation.flip,
            quarter_turns=augmentation.quarter_turns,
            blur=augmentation.blur,
            blur_radius=augmentation.blur_radius,
            stain_jitter=augmentation.stain_jitter,
        ),
        device=model.device,
        workers=workers,
        ahead_bytes=ahead_bytes,
        chunk=ENCODING_CHUNK,
    )


def labelled(slides: Sequence[SlideOfRun]) -> list[LabelledSlide]:
    """Take what the trainer needs of each slide."""
    return [
        LabelledSlide(slide.row.slide_id, slide.row.patient_id, slide.labels, slide.split, slide.row.cohort)
        for slide in slides
    ]
