"""From a configuration to what `fit` takes: model, optimisers and plan. Config stops here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tapfm.adaptation.chunked import Chunking
from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.learner import Learner, OptimiserSettings
from tapfm.adaptation.optimisers import LearningRateSchedule
from tapfm.adaptation.planner import StepPlan, plan_step
from tapfm.adaptation.step_costs import Precision
from tapfm.adaptation.trainer import TrainingSettings
from tapfm.adaptation.two_graph import AdaptationSettings
from tapfm.aggregators.catalog import aggregator_card
from tapfm.config.settings import RunConfig
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.features import FeatureMetadata
from tapfm.encoders.precision import can_compile
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError
from tapfm.runs.build import build_run_aggregator, load_trainable_encoder
from tapfm.runs.data import RunData, RunSlide
from tapfm.runs.model import SlideModel
from tapfm.runtime.devices import choose_precision, set_float32_precision
from tapfm.tasks.catalog import build_task
from tapfm.tiles.augment import Augmentation

_GRAPH_BYTES = 2 * 2**30  # of a chunk, where memory cannot be asked for
_GRAPH_FLOATS = 24  # that a block keeps for each number of its input


class BuiltLearner(NamedTuple):
    """A learner; the SHA-256 of its encoder's weights, where it is known; and the plan it follows on a GPU."""

    learner: Learner
    weights_sha256: str | None
    plan: StepPlan | None


def build_learner(config: RunConfig, data: RunData, device: torch.device) -> BuiltLearner:
    """Build the model and its optimisers. The same seed gives the same first weights."""
    set_float32_precision(tf32=config.machine.tf32)
    _limit_memory(config, device)
    (weights_dtype, compute_dtype), compiled = select_dtypes(config, device), uses_compile(config, device)
    plan = None
    if config.adaptation.method == "fixed":
        facts = _stored_features(config, data)
        encoder, feature_size, sha256 = None, facts.size, facts.weights_sha256
    else:
        # the learner moves it, once it is small enough
        encoder, provenance = load_trainable_encoder(config, torch.device("cpu"))
        feature_size, sha256 = encoder.feature_size, provenance.sha256
        plan = _plan_of_step(config, data, encoder, device) if device.type == "cuda" else None
        encoder.compile_blocks(compiled)
        if plan is not None:
            encoder.recompute = plan.recompute
        elif config.adaptation.recompute != "auto":
            encoder.recompute = (config.adaptation.recompute,) * len(encoder.recompute)
    torch.manual_seed(config.seed)
    aggregator = build_run_aggregator(config, feature_size, len(data.targets)).to(device)
    task = build_task(data.training_labels(), smoothing=config.head.label_smoothing, weighting=config.task.weighting)
    chunking = Chunking() if encoder is None else _chunking_of(config, encoder, plan)
    adaptation = build_adaptation_settings(config, chunking, compute_dtype)
    optimisation = build_optimiser_settings(config, plan, weights_dtype=weights_dtype, compiled=compiled)
    model = SlideModel(encoder, aggregator, task, compute_dtype)
    return BuiltLearner(Learner(model, adaptation, optimisation), sha256, plan)


def _limit_memory(config: RunConfig, device: torch.device) -> None:
    """Take no more of the GPU's memory than may be used."""
    if device.type == "cuda" and (most := config.machine.gpu_memory_gib) is not None:
        _, total_bytes = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, most * 2**30 / total_bytes), device)


def select_dtypes(config: RunConfig, device: torch.device) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Give the types of the encoder's weights, and of its autocast; None: as they are, and none.

    On a GPU weights are kept in bfloat16; float16 has too few small numbers for that.
    """
    dtype = choose_precision(config.adaptation.precision, device)
    return (dtype, None) if device.type == "cuda" and dtype == torch.bfloat16 else (None, dtype)


def uses_compile(config: RunConfig, device: torch.device) -> bool:
    """Say whether blocks run as compiled code."""
    return can_compile(device) if config.machine.compile == "auto" else config.machine.compile


def _training_precision(config: RunConfig, device: torch.device) -> Precision:
    """Name the precision of training."""
    dtype = choose_precision(config.adaptation.precision, device)
    return "bfloat16" if dtype == torch.bfloat16 else "float16" if dtype == torch.float16 else "float32"


def _plan_of_step(config: RunConfig, data: RunData, encoder: VitEncoder, device: torch.device) -> StepPlan:
    """Choose how a bag goes through the GPU, by what is free of its memory, or by what of it may be used."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if (most := config.machine.gpu_memory_gib) is not None:
        free_bytes = min(free_bytes, int(most * 2**30))
    most_tiles = max((len(slide.tiles) for slide in data.slides if slide.tiles is not None), default=1)
    return plan_step(
        EncoderShape.of(encoder),
        tiles=min(most_tiles, _number_or_all(config.adaptation.tiles_per_slide) or most_tiles),
        free_bytes=free_bytes,
        precision=_training_precision(config, device),
        compiled=uses_compile(config, device),
        **planner_arguments(config),
    )


def planner_arguments(config: RunConfig) -> dict[str, Any]:
    """Unpack what the planner has to keep to, whatever the card."""
    return {
        "chunk": config.adaptation.chunk,
        "recompute": config.adaptation.recompute,
        "moments": config.optimiser.moments,
        "offload": config.machine.offload_optimiser,
        "slides_per_step": config.optimiser.slides_per_step,
        "backward_tiles": config.adaptation.backward_tiles or None,
    }


def _stored_features(config: RunConfig, data: RunData) -> FeatureMetadata:
    """Say what the features are; all have to be of one encoder, and with attention where the aggregator asks for it."""
    found: dict[tuple[object, ...], list[RunSlide]] = {}
    aggregator = aggregator_card(config.aggregator.name)
    for slide in data.slides:
        assert slide.features is not None
        facts = slide.features.metadata
        found.setdefault((facts.size, facts.encoder, facts.weights_sha256, facts.precision), []).append(slide)
        if aggregator.uses_attention and not facts.has_attention:
            raise InputError(
                f"{slide.features.path} ({facts.origin}) has no attention, by which {config.aggregator.name} weighs "
                "tiles.",
                hint='Make features with it: tapfm embed; or use an aggregator without: aggregator.name = "abmil"',
            )
        if aggregator.uses_positions and not facts.has_positions:
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
    facts = slide.features.metadata
    ours = encoder_card(config.encoder.name).key
    if facts.origin == "tapfm" and facts.encoder not in (None, ours):  # other tools have other names for it
        raise InputError(
            f"The features were made by {facts.encoder}, and the configuration says {ours}.",
            hint=f"Say which it is: --set encoder.name={facts.encoder}",
        )
    return facts


def _chunking_of(config: RunConfig, encoder: VitEncoder, plan: StepPlan | None) -> Chunking:
    """Say how a bag goes through the encoder. Without a GPU by a fixed rule: another split would round otherwise."""
    if plan is not None:
        return Chunking() if plan.strategy == "one-pass" else Chunking(plan.chunk, plan.graphs_kept)
    chunk = config.adaptation.chunk
    if chunk == "all":
        return Chunking()
    vit = encoder.vit
    tokens = int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens)
    tile_bytes = 4 * _GRAPH_FLOATS * tokens * int(vit.embed_dim) * len(vit.blocks)
    return Chunking(tiles=max(1, _GRAPH_BYTES // tile_bytes) if chunk == "auto" else chunk)


def build_adaptation_settings(
    config: RunConfig, chunking: Chunking, compute_dtype: torch.dtype | None
) -> AdaptationSettings:
    """Unpack the step's settings."""
    return AdaptationSettings(
        lambda_=config.adaptation.lambda_,
        beta=config.adaptation.beta,
        cosine=config.adaptation.cosine,
        bag_gradient=config.adaptation.bag_gradient,
        chunking=chunking,
        backward_tiles=config.adaptation.backward_tiles or None,
        compute_dtype=compute_dtype,
    )


def build_augmentation(config: RunConfig) -> Augmentation:
    """Unpack what is done to training tiles."""
    settings = config.augmentation
    return Augmentation(
        flip=settings.flip,
        rotate_90=settings.rotate_90,
        blur=settings.blur,
        blur_radius=settings.blur_radius,
        stain_jitter=settings.stain_jitter,
    )


def build_optimiser_settings(
    config: RunConfig,
    plan: StepPlan | None = None,
    *,
    weights_dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> OptimiserSettings:
    """Unpack the optimisers' settings; what they leave open, the plan has chosen."""
    moments, offload = config.optimiser.moments, config.machine.offload_optimiser
    return OptimiserSettings(
        encoder_lr=config.optimiser.encoder_lr,
        aggregator_lr=config.optimiser.aggregator_lr,
        encoder_lr_min=config.schedule.encoder_lr_min,
        aggregator_lr_min=config.schedule.aggregator_lr_min,
        weight_decay=config.optimiser.weight_decay,
        decay_all=config.optimiser.decay_all,
        clip_norm=config.optimiser.clip_norm,
        slides_per_step=config.optimiser.slides_per_step,
        schedule=LearningRateSchedule(config.schedule.first_cycle, config.schedule.cycle_factor),
        weights_dtype=weights_dtype,
        float32_gradients=plan is None or plan.float32_gradients,
        moments=plan.moments if plan is not None else "float32" if moments == "auto" else moments,
        offload=plan.offload if plan is not None else offload is True,
        compiled=compiled,
    )


def build_training_settings(config: RunConfig) -> TrainingSettings:
    """Unpack the plan's settings."""
    return TrainingSettings(
        epochs=config.schedule.epochs,
        augmentation=build_augmentation(config),
        seed=config.seed,
        tiles_per_slide=_number_or_all(config.adaptation.tiles_per_slide),
        validation_tiles=_number_or_all(config.selection.validation_tiles),
        patience=config.selection.patience,
        unit=config.selection.unit,
        checkpoint_every_s=60 * config.machine.checkpoint_minutes,
        allow_failures=config.machine.allow_failures,
    )


def _number_or_all(value: int | str) -> int | None:
    """Read "all" as no limit."""
    return value if isinstance(value, int) else None
