"""Create the arguments of `fit` from a configuration: model, optimisers and settings."""

from __future__ import annotations

from collections.abc import Mapping
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
from tapfm.aggregators.catalog import find_aggregator_card
from tapfm.config.settings import RunConfig
from tapfm.encoders.catalog import find_encoder_card, load_encoder_cards
from tapfm.encoders.features import FeatureMetadata
from tapfm.encoders.precision import can_compile_on_gpu
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, WeightsError
from tapfm.runs.build import build_run_aggregator, load_trainable_encoder
from tapfm.runs.data import RunData, RunSlide
from tapfm.runs.model import SlideModel
from tapfm.runtime.devices import choose_autocast_dtype, set_float32_precision
from tapfm.tasks.catalog import build_task
from tapfm.tiles.augment import Augmentation

_CPU_GRAPH_BYTES = 2 * 2**30  # maximum size of a chunk's graph
_GRAPH_VALUES_PER_INPUT = 24  # approximate number of values that a block saves for each value of its input


class BuiltLearner(NamedTuple):
    """A learner, the origin of its encoder's weights if known, and the step plan if a GPU trains the encoder."""

    learner: Learner
    weights_sha256: str | None
    weights: Mapping[str, str | None] | None  # their source; None with stored features
    plan: StepPlan | None


def build_learner(config: RunConfig, data: RunData, device: torch.device) -> BuiltLearner:
    """Build the model and its optimisers. The initial weights of aggregator and adapters depend only on the seed."""
    set_float32_precision(tf32=config.machine.tf32)
    _limit_memory(config, device)
    (weights_dtype, compute_dtype), compiled = select_dtypes(config, device), uses_compile(config, device)
    plan = None
    if config.adaptation.method == "fixed":
        metadata = _check_stored_features(config, data)
        encoder, feature_size, sha256, weights = None, metadata.size, metadata.weights_sha256, None
    else:
        # the learner moves it to the device after the conversion to the dtype of the weights
        try:
            encoder, provenance = load_trainable_encoder(config, torch.device("cpu"))
        except WeightsError as error:  # its hint is for commands with the option --weights
            error.hint = error.hint.replace("--weights ", "--set encoder.weights=")
            error.hint = error.hint.replace("--weights", "--set encoder.weights=FILE")
            raise
        feature_size, sha256, weights = encoder.feature_size, provenance.sha256, provenance.as_json()
        plan = _make_plan(config, data, encoder, device) if device.type == "cuda" else None
        encoder.compile_blocks(compiled)
        if plan is not None:
            encoder.recompute = plan.recompute
        elif config.adaptation.recompute != "auto":
            encoder.recompute = (config.adaptation.recompute,) * len(encoder.recompute)
    torch.manual_seed(config.seed)
    aggregator = build_run_aggregator(config, feature_size, len(data.targets)).to(device)
    task = build_task(
        data.training_labels(),
        smoothing=config.head.label_smoothing,
        weighting=config.task.weighting,
        kinds=data.targets,
    )
    chunking = Chunking() if encoder is None else _choose_chunking(config, encoder, plan)
    adaptation = build_adaptation_settings(config, chunking, compute_dtype)
    optimiser_settings = build_optimiser_settings(config, plan, weights_dtype=weights_dtype, compiled=compiled)
    model = SlideModel(encoder, aggregator, task, compute_dtype)
    return BuiltLearner(Learner(model, adaptation, optimiser_settings), sha256, weights, plan)


def _limit_memory(config: RunConfig, device: torch.device) -> None:
    """Limit the GPU memory of this process to `machine.gpu_memory_gib`."""
    if device.type == "cuda" and (limit_gib := config.machine.gpu_memory_gib) is not None:
        _, total_bytes = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total_bytes), device)


def select_dtypes(config: RunConfig, device: torch.device) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtype of the encoder's weights (None: unchanged) and of its autocast (None: no autocast).

    On a GPU, bfloat16 weights are used without autocast. float16 weights are not: small values would underflow.
    """
    dtype = choose_autocast_dtype(config.adaptation.precision, device)
    return (dtype, None) if device.type == "cuda" and dtype == torch.bfloat16 else (None, dtype)


def uses_compile(config: RunConfig, device: torch.device) -> bool:
    """Return whether the encoder's blocks are compiled."""
    return can_compile_on_gpu(device) if config.machine.compile == "auto" else config.machine.compile


def _training_precision(config: RunConfig, device: torch.device) -> Precision:
    dtype = choose_autocast_dtype(config.adaptation.precision, device)
    return "bfloat16" if dtype == torch.bfloat16 else "float16" if dtype == torch.float16 else "float32"


def _make_plan(config: RunConfig, data: RunData, encoder: VitEncoder, device: torch.device) -> StepPlan:
    """Plan the step for the largest slide, with the free GPU memory, but at most `machine.gpu_memory_gib`."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if (limit_gib := config.machine.gpu_memory_gib) is not None:
        free_bytes = min(free_bytes, int(limit_gib * 2**30))
    max_tiles = max((len(slide.tiles) for slide in data.slides if slide.tiles is not None), default=1)
    return plan_step(
        EncoderShape.from_encoder(encoder),
        tiles=min(max_tiles, _limit_or_none(config.adaptation.tiles_per_slide) or max_tiles),
        free_bytes=free_bytes,
        precision=_training_precision(config, device),
        compiled=uses_compile(config, device),
        **planner_arguments(config),
    )


def planner_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the keyword arguments of `plan_step` that the configuration determines."""
    return {
        "chunk": config.adaptation.chunk,
        "recompute": config.adaptation.recompute,
        "moments": config.optimiser.moments,
        "offload": config.machine.offload_optimiser,
        "slides_per_step": config.optimiser.slides_per_step,
        "backward_tiles": config.adaptation.backward_tiles or None,
    }


def _check_stored_features(config: RunConfig, data: RunData) -> FeatureMetadata:
    """Return the metadata of the feature files.

    Raises `InputError` if the files differ in encoder, weights, precision or feature size, if tapfm created them with
    another encoder than the configured one, if their size is not that of this encoder, or if they lack what the
    aggregator needs.
    """
    slides_by_source: dict[tuple[object, ...], list[RunSlide]] = {}
    aggregator = find_aggregator_card(config.aggregator.name)
    for slide in data.slides:
        assert slide.features is not None
        metadata = slide.features.metadata
        key = (metadata.size, metadata.encoder, metadata.weights_sha256, metadata.precision)
        slides_by_source.setdefault(key, []).append(slide)
        if aggregator.uses_raw_attention and not metadata.has_attention:
            raise InputError(
                f"{slide.features.path} ({metadata.origin}) has no raw attention, but the aggregator "
                f"{config.aggregator.name} needs it.",
                hint="Create features with raw attention: "
                "tapfm embed COHORT.csv --tiles DIR --encoder NAME --out NEW_DIR\n"
                'Or use an aggregator that needs none: aggregator.name = "abmil"',
            )
        if aggregator.uses_coordinates and not metadata.has_coordinates:
            raise InputError(
                f"{slide.features.path} ({metadata.origin}) has no tile coordinates in level-0 pixels, but the "
                f"aggregator {aggregator.name} needs them.",
                hint="Create features with coordinates: "
                "tapfm embed COHORT.csv --tiles DIR --encoder NAME --out NEW_DIR\n"
                'Or use an aggregator that needs none: aggregator.name = "abmil"',
            )
    if len(slides_by_source) > 1:
        groups = [
            f"{size} features per tile, encoder {encoder or 'unknown'}, precision {precision or 'unknown'}: "
            f"{slides[0].row.slide_id} (and {len(slides) - 1:,} more)"
            for (size, encoder, _, precision), slides in slides_by_source.items()
        ]
        raise InputError(
            "The feature files were not all created with the same encoder, weights and precision:\n  "
            + "\n  ".join(groups),
            hint="Create them again: tapfm embed COHORT.csv --tiles DIR --encoder NAME --out NEW_DIR",
        )
    first = data.slides[0].features
    assert first is not None
    path, metadata = first.path, first.metadata
    card = find_encoder_card(config.encoder.name)
    if metadata.origin == "tapfm" and metadata.encoder not in (None, card.key):  # other tools use other encoder names
        raise InputError(
            f"{path} was created with {metadata.encoder}, but encoder.name is {card.key}.",
            hint=f"Use the encoder of the features: --set encoder.name={metadata.encoder}",
        )
    if metadata.size != card.feature_size:
        named = f" (its encoder: {metadata.encoder})" if metadata.encoder else ""
        same_size = [each.key for each in load_encoder_cards().values() if each.feature_size == metadata.size]
        raise InputError(
            f"{path}{named} has {metadata.size:,} features per tile, but {card.name} (encoder.name) computes "
            f"{card.feature_size:,}.",
            hint=f"Set encoder.name to the encoder of the features. With {metadata.size:,} features per tile, tapfm "
            f"knows {', '.join(same_size) or 'none'}.\n"
            f"Or create features of {card.name}: "
            f"tapfm embed COHORT.csv --tiles DIR --encoder {card.key} --out NEW_DIR",
        )
    return metadata


def _choose_chunking(config: RunConfig, encoder: VitEncoder, plan: StepPlan | None) -> Chunking:
    """Return the chunking of the plan. On a CPU, it does not depend on free memory, so that runs are reproducible."""
    if plan is not None:
        return Chunking() if plan.strategy == "one-pass" else Chunking(plan.chunk, plan.graphs_kept)
    chunk = config.adaptation.chunk
    if chunk == "all":
        return Chunking()
    vit = encoder.vit
    tokens = int(vit.patch_embed.num_patches) + int(vit.num_prefix_tokens)
    tile_bytes = 4 * _GRAPH_VALUES_PER_INPUT * tokens * int(vit.embed_dim) * len(vit.blocks)
    return Chunking(tiles=max(1, _CPU_GRAPH_BYTES // tile_bytes) if chunk == "auto" else chunk)


def build_adaptation_settings(
    config: RunConfig, chunking: Chunking, compute_dtype: torch.dtype | None
) -> AdaptationSettings:
    return AdaptationSettings(
        lambda_=config.adaptation.lambda_,
        beta=config.adaptation.beta,
        cosine_loss=config.adaptation.cosine_loss,
        bag_gradient=config.adaptation.bag_gradient,
        chunking=chunking,
        backward_tiles=config.adaptation.backward_tiles or None,
        compute_dtype=compute_dtype,
    )


def build_augmentation(config: RunConfig) -> Augmentation:
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
    """Return the optimiser settings. The plan determines those that are "auto"."""
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
    return TrainingSettings(
        epochs=config.schedule.epochs,
        augmentation=build_augmentation(config),
        seed=config.seed,
        tiles_per_slide=_limit_or_none(config.adaptation.tiles_per_slide),
        validation_tiles=_limit_or_none(config.selection.validation_tiles),
        patience=config.selection.patience,
        unit=config.selection.unit,
        checkpoint_every_s=60 * config.machine.checkpoint_minutes,
        allow_failures=config.machine.allow_failures,
    )


def _limit_or_none(value: int | str) -> int | None:
    """Return a number of tiles, or None for "all"."""
    return value if isinstance(value, int) else None
