"""Plan the GPU memory of a run, for this machine's GPU or for GPUs of given sizes. Needs no GPU and no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.from_config import planner_arguments
from tapfm.adaptation.planner import StepPlan, plan_step
from tapfm.adaptation.step_costs import GIB, Precision
from tapfm.config.settings import RunConfig
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.precision import can_compile_on_gpu
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, SettingError
from tapfm.runs.data import read_run_data

_COMMON_SIZES_GB = (8.0, 12.0, 16.0, 24.0, 48.0, 80.0)
# CUDA can use about 98% of the nominal memory; the CUDA context takes some of it.
_USABLE_FRACTION, _CONTEXT_BYTES = 0.98, 0.5 * GIB
_OTHER_SCOPES = ("full", "last:4", "lora:16")


@dataclass(frozen=True)
class Gpu:
    """A GPU and its free memory."""

    name: str
    free_bytes: int
    memory_description: str
    precision: Precision  # that "auto" selects
    can_compile: bool


@dataclass(frozen=True)
class GpuPlan:
    """Plan of a step for one GPU, or the error if no plan fits."""

    label: str
    plan: StepPlan | None
    error: SettingError | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plans of a run for one or more GPUs."""

    config: RunConfig
    shape: EncoderShape
    tiles: int
    gpus: tuple[Gpu, ...]
    plans: tuple[GpuPlan, ...]  # one per GPU
    alternatives: tuple[tuple[GpuPlan, str], ...]  # plans with other settings, each with the smallest GPU that fits
    note: str  # why the plans are for common GPU sizes; empty if they are not


def plan_memory(config: RunConfig, *, gpu_memory: Sequence[float], tiles: int | None) -> MemoryPlan:
    """Plan a run for this machine's GPU, for GPUs with `gpu_memory` GB, or, without either, for common GPU sizes.

    tiles: number of tiles per slide and step; None: from the configuration.

    Raises `SettingError` if no plan fits on any of the GPUs.
    """
    detected = _detect_gpu(config) if not gpu_memory else None
    gpus = [detected] if detected is not None else [_make_gpu(gb) for gb in gpu_memory or _COMMON_SIZES_GB]
    shape = _encoder_shape(config.encoder.name, config.adaptation.scope)
    count = tiles or _count_tiles(config)
    plans = tuple(_plan_for_gpu(config, shape, count, gpu, gpu.name) for gpu in gpus)
    if all(gpu_plan.plan is None for gpu_plan in plans):
        raise _does_not_fit_error(config, count, gpus[-1], plans[-1])
    single = len(gpus) == 1
    return MemoryPlan(
        config=config,
        shape=shape,
        tiles=count,
        gpus=tuple(gpus),
        plans=plans,
        alternatives=tuple(_plan_alternatives(config, count, gpus[0])) if single else (),
        note=""
        if detected is not None or gpu_memory
        else 'No GPU found, or machine.device is "cpu", so `tapfm train` would not use a GPU.',
    )


@cache
def _encoder_shape(encoder_name: str, scope: str) -> EncoderShape:
    """Build the architecture without weights, apply the scope, and count its parameters."""
    card = find_encoder_card(encoder_name)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
    apply_scope(encoder, Scope.parse(scope))
    return EncoderShape.from_encoder(encoder)


def _count_tiles(config: RunConfig) -> int:
    """Return the number of tiles per slide and step: the setting, or the tiles of the largest slide."""
    count = config.adaptation.tiles_per_slide
    if isinstance(count, int):
        return count
    try:
        return max(len(slide.tiles) for slide in read_run_data(config).slides if slide.tiles is not None)
    except InputError as error:
        raise InputError(
            f"adaptation.tiles_per_slide is 'all', but the tiles of the slides cannot be counted: {error.message}",
            hint="Pass the number of tiles of the largest slide, for example --tiles-per-slide 20000.",
        ) from error


def _make_gpu(gb: float) -> Gpu:
    """Return a GPU with a nominal memory size in GB."""
    free = int(_USABLE_FRACTION * gb * GIB - _CONTEXT_BYTES)
    if free <= 0:
        raise InputError(
            f"--gpu-memory {gb:g} is too small: CUDA itself takes {_CONTEXT_BYTES / GIB:g} GiB.",
            hint="Pass the memory of the GPU in GB, for example --gpu-memory 24.",
        )
    usable = f"{_USABLE_FRACTION:.0%} of {gb:g} GiB"
    source = f"{free / GIB:.1f} GiB free: {usable}, minus {_CONTEXT_BYTES / GIB:.1f} GiB for CUDA"
    return Gpu(f"{gb:g} GB", free, source, precision="bfloat16", can_compile=True)


def _detect_gpu(config: RunConfig) -> Gpu | None:
    """Return the GPU that the run would use, with its free memory. None if it would use the CPU."""
    if config.machine.device == "cpu" or not torch.cuda.is_available():
        return None
    device = torch.device("cuda" if config.machine.device == "auto" else config.machine.device)
    free, total = torch.cuda.mem_get_info(device)
    limit = config.machine.gpu_memory_gib
    source = "free"
    if limit is not None and limit * GIB < free:
        free, source = int(limit * GIB), "allowed by machine.gpu_memory_gib"
    with torch.cuda.device(device):
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(
        torch.cuda.get_device_name(device),
        free,
        f"{free / GIB:.1f} GiB {source}, of {total / GIB:.1f} GiB",
        precision="bfloat16" if has_bfloat16 else "float16",
        can_compile=can_compile_on_gpu(device),
    )


def _plan_for_gpu(config: RunConfig, shape: EncoderShape, tiles: int, gpu: Gpu, label: str, **changes: Any) -> GpuPlan:
    arguments = planner_arguments_for_gpu(config, gpu) | changes
    try:
        return GpuPlan(label, plan_step(shape, tiles=tiles, free_bytes=gpu.free_bytes, **arguments))
    except SettingError as error:
        return GpuPlan(label, None, error)


def planner_arguments_for_gpu(config: RunConfig, gpu: Gpu) -> dict[str, Any]:
    """Return the keyword arguments of `plan_step` for this GPU."""
    precision, compiled = config.adaptation.precision, config.machine.compile
    return planner_arguments(config) | {
        "precision": gpu.precision if precision == "auto" else precision,
        "compiled": gpu.can_compile if compiled == "auto" else compiled,
    }


def _plan_alternatives(config: RunConfig, tiles: int, gpu: Gpu) -> Iterator[tuple[GpuPlan, str]]:
    """Plan the configured scope, a sampled backward pass and other scopes. Yield each with the smallest common GPU."""
    for scope in dict.fromkeys((config.adaptation.scope, *_OTHER_SCOPES)):
        try:
            shape = _encoder_shape(config.encoder.name, scope)
        except InputError:  # the encoder has fewer blocks, or peft is not installed
            continue
        samples_tiles = scope == config.adaptation.scope and tiles >= 16
        for backward_tiles in (None, max(1, tiles // 4)) if samples_tiles else (None,):
            changes = {} if backward_tiles is None else {"backward_tiles": backward_tiles}
            label = f"adaptation.scope={scope}"
            if backward_tiles is not None:
                label = f"adaptation.backward_tiles={backward_tiles}"
            gpu_plan = _plan_for_gpu(config, shape, tiles, gpu, label, **changes)
            common_gpus = [_make_gpu(gb) for gb in _COMMON_SIZES_GB]
            plans = (_plan_for_gpu(config, shape, tiles, each, each.name, **changes) for each in common_gpus)
            yield gpu_plan, next((each.label for each in plans if each.plan is not None), "-")


def _does_not_fit_error(config: RunConfig, tiles: int, gpu: Gpu, gpu_plan: GpuPlan) -> SettingError:
    """Return an error that names settings that fit on this GPU, and the smallest GPU for the current settings."""
    assert gpu_plan.error is not None
    alternatives = [(each, smallest) for each, smallest in _plan_alternatives(config, tiles, gpu)]
    fitting = [each for each, _ in alternatives if each.plan is not None]
    # the list below replaces the general hints, except those that do not change the model
    lines = [line for line in gpu_plan.error.hint.splitlines() if line.startswith("Set ") or not fitting]
    if fitting:
        listed = ", ".join(f"{each.label} ({each.plan.peak_bytes / GIB:.1f} GiB)" for each in fitting if each.plan)
        lines.append(f"Pass one of these settings with --set to fit on this GPU: {listed}.")
    if alternatives and alternatives[0][1] != "-":
        lines.append(f"The current settings fit on a GPU with {alternatives[0][1]}.")
    return SettingError(f"{gpu.name}: {gpu_plan.error.message}", hint="\n".join(lines))


def plan_to_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return the output of `tapfm plan --json`."""

    def plan_values(gpu_plan: GpuPlan) -> dict[str, Any] | None:
        return None if gpu_plan.plan is None else asdict(gpu_plan.plan) | {"peak_bytes": gpu_plan.plan.peak_bytes}

    return {
        "encoder": plan.config.encoder.name,
        "scope": plan.config.adaptation.scope,
        "tiles": plan.tiles,
        "shape": asdict(plan.shape),
        "gpus": [
            {"gpu": gpu.name, "free_bytes": gpu.free_bytes, "plan": plan_values(gpu_plan)}
            for gpu, gpu_plan in zip(plan.gpus, plan.plans, strict=True)
        ],
        "alternatives": [
            {"set": gpu_plan.label, "plan": plan_values(gpu_plan), "smallest_gpu": smallest}
            for gpu_plan, smallest in plan.alternatives
        ],
    }
