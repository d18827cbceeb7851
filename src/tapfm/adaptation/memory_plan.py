"""How a run uses the memory of a GPU: a plan for this machine's, or for cards of given sizes, without weights."""

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
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.precision import can_compile
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, SettingError
from tapfm.runs.data import read_run_data

_USUAL_CARDS = (8.0, 12.0, 16.0, 24.0, 48.0, 80.0)
# Of what is written on a card, CUDA sees about 98%; its context takes some of that before the first tensor.
_SEEN, _CONTEXT_BYTES = 0.98, 0.5 * GIB
_OTHER_SCOPES = ("full", "last:4", "lora:16")


@dataclass(frozen=True)
class Gpu:
    """A GPU, and what of its memory is free for a run."""

    name: str
    free_bytes: int
    memory_source: str
    precision: Precision  # the one "auto" takes
    compiles: bool


@dataclass(frozen=True)
class GpuPlan:
    """The plan of a step on one card, or why none fits."""

    label: str
    plan: StepPlan | None
    refusal: SettingError | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """How a run would use the memory of one or more cards."""

    config: RunConfig
    shape: EncoderShape
    tiles: int
    gpus: tuple[Gpu, ...]
    rows: tuple[GpuPlan, ...]  # one per card
    alternatives: tuple[tuple[GpuPlan, str], ...]  # on the first card, and the smallest usual card for each
    this_machine: str


def plan_memory(config: RunConfig, *, gpu_memory: Sequence[float], tiles: int | None) -> MemoryPlan:
    """Plan a run for this machine's GPU, or for cards of so many GB."""
    here = _card_here(config) if not gpu_memory else None
    cards = [here] if here is not None else [_card_of_size(gb) for gb in gpu_memory or _USUAL_CARDS]
    shape = _encoder_shape(config.encoder.name, config.adaptation.scope)
    count = tiles or _count_tiles(config)
    rows = tuple(_plan_for(config, shape, count, card, card.name) for card in cards)
    if all(row.plan is None for row in rows):
        raise _nothing_fits(config, count, cards[-1], rows[-1])
    single = len(cards) == 1
    return MemoryPlan(
        config=config,
        shape=shape,
        tiles=count,
        gpus=tuple(cards),
        rows=rows,
        alternatives=tuple(_alternatives(config, count, cards[0])) if single else (),
        this_machine="" if here is not None or gpu_memory else "There is no GPU here: tapfm train would use the CPU.",
    )


@cache
def _encoder_shape(encoder_name: str, scope: str) -> EncoderShape:
    """Build the architecture without its weights, with the scope's part of it trainable."""
    card = encoder_card(encoder_name)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
    apply_scope(encoder, Scope.parse(scope))
    return EncoderShape.of(encoder)


def _count_tiles(config: RunConfig) -> int:
    """Return how many tiles a step has: the setting, or those of the largest slide."""
    count = config.adaptation.tiles_per_slide
    if isinstance(count, int):
        return count
    try:
        return max(len(slide.tiles) for slide in read_run_data(config).slides if slide.tiles is not None)
    except InputError as error:
        raise InputError(
            f"adaptation.tiles_per_slide is all, and the tiles of the slides cannot be counted: {error.message}",
            hint="Give the number of tiles of the largest slide, for example: --tiles 20000",
        ) from error


def _card_of_size(gb: float) -> Gpu:
    """Return a card of a nominal size."""
    free = int(_SEEN * gb * GIB - _CONTEXT_BYTES)
    if free <= 0:
        raise InputError(f"--gpu-memory {gb:g} leaves nothing for a run.", hint="A usual value is 24, in GB.")
    how = f"of {gb:g} GB about {_SEEN * gb:.1f} GiB are there, of which CUDA takes {_CONTEXT_BYTES / GIB:.1f}"
    return Gpu(f"{gb:g} GB", free, how, precision="bfloat16", compiles=True)


def _card_here(config: RunConfig) -> Gpu | None:
    """Return the GPU that the run would use, with what is free on it now; None without one."""
    if config.machine.device == "cpu" or not torch.cuda.is_available():
        return None
    device = torch.device("cuda" if config.machine.device == "auto" else config.machine.device)
    free, total = torch.cuda.mem_get_info(device)
    limit = config.machine.gpu_memory_gib
    if limit is not None:
        free = min(free, int(limit * GIB))
    with torch.cuda.device(device):
        half = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(
        torch.cuda.get_device_name(device),
        free,
        f"free now, of {total / GIB:.1f} GiB" if limit is None else f"machine.gpu_memory_gib, of {total / GIB:.1f} GiB",
        precision="bfloat16" if half else "float16",
        compiles=can_compile(device),
    )


def _plan_for(config: RunConfig, shape: EncoderShape, tiles: int, card: Gpu, label: str, **changes: Any) -> GpuPlan:
    """Plan a step on one card."""
    settings = planner_settings(config, card) | changes
    try:
        return GpuPlan(label, plan_step(shape, tiles=tiles, free_bytes=card.free_bytes, **settings))
    except SettingError as error:
        return GpuPlan(label, None, error)


def planner_settings(config: RunConfig, card: Gpu) -> dict[str, Any]:
    """Return the arguments of the planner for this card."""
    precision, compiled = config.adaptation.precision, config.machine.compile
    return planner_arguments(config) | {
        "precision": card.precision if precision == "auto" else precision,
        "compiled": card.compiles if compiled == "auto" else compiled,
    }


def _alternatives(config: RunConfig, tiles: int, card: Gpu) -> Iterator[tuple[GpuPlan, str]]:
    """Plan the run with other scopes, or backward for fewer tiles; yield each with the smallest usual card for it."""
    for scope in dict.fromkeys((config.adaptation.scope, *_OTHER_SCOPES)):
        try:
            shape = _encoder_shape(config.encoder.name, scope)
        except InputError:  # fewer blocks than that, or peft is missing
            continue
        for share in (None, max(1, tiles // 4)) if scope == config.adaptation.scope and tiles >= 16 else (None,):
            changes = {} if share is None else {"backward_tiles": share}
            said = f"adaptation.scope={scope}" if share is None else f"adaptation.backward_tiles={share}"
            row = _plan_for(config, shape, tiles, card, said, **changes)
            cards = map(_card_of_size, _USUAL_CARDS)
            fitting = (each.name for each in cards if _plan_for(config, shape, tiles, each, "", **changes).plan)
            yield row, next(fitting, "-")


def _nothing_fits(config: RunConfig, tiles: int, card: Gpu, row: GpuPlan) -> SettingError:
    """Return the error that names what would fit on the card, and which card would do."""
    assert row.refusal is not None
    lines = [row.refusal.hint] if row.refusal.hint else []
    would = [(each, smallest) for each, smallest in _alternatives(config, tiles, card)]
    if fitting := [each for each, _ in would if each.plan is not None]:
        said = ", ".join(f"{each.label} ({each.plan.peak_bytes / GIB:.1f} GiB)" for each in fitting if each.plan)
        lines.append(f"This would fit on the card: {said}.")
    if would and would[0][1] != "-":
        lines.append(f"The run as it is fits a card of {would[0][1]}.")
    return SettingError(f"{card.name}: {row.refusal.message}", hint="\n".join(lines))


def plan_to_json(planned: MemoryPlan) -> dict[str, Any]:
    """Return a plan for JSON."""

    def of_plan(row: GpuPlan) -> dict[str, Any] | None:
        return None if row.plan is None else asdict(row.plan) | {"peak_bytes": row.plan.peak_bytes}

    return {
        "encoder": planned.config.encoder.name,
        "scope": planned.config.adaptation.scope,
        "tiles": planned.tiles,
        "shape": asdict(planned.shape),
        "gpus": [
            {"gpu": card.name, "free_bytes": card.free_bytes, "plan": of_plan(row)}
            for card, row in zip(planned.gpus, planned.rows, strict=True)
        ],
        "alternatives": [
            {"set": row.label, "plan": of_plan(row), "smallest_gpu": smallest} for row, smallest in planned.alternatives
        ],
    }
