"""`tapfm plan`: how a run would go through a GPU, without one and without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tapfm.adaptation.encoder_shape import EncoderShape
from tapfm.adaptation.from_config import asked_of_the_plan
from tapfm.adaptation.plan_text import least_passes, optimiser_in_words, recompute_in_words, tiles_in_words
from tapfm.adaptation.planner import StepPlan, plan_step
from tapfm.adaptation.step_costs import GIB, Precision
from tapfm.config.settings import RunConfig
from tapfm.encoders.adapters import Scope, apply_scope
from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.precision import can_compile
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, SettingError
from tapfm.runs.data import read_data
from tapfm.runtime.messages import counted

USUAL_CARDS = (8.0, 12.0, 16.0, 24.0, 48.0, 80.0)
# Of what is written on a card, CUDA sees about 98%; its context takes some of that before the first tensor.
SEEN, CONTEXT_BYTES = 0.98, 0.5 * GIB
OTHER_SCOPES = ("full", "last:4", "lora:16")
HOW_TO_READ = """\
A card's memory is taken as 98% of what is written on it, less 0.5 GiB for CUDA.
passes: work per tile, in forward passes.
time: against one pass that recomputes nothing; an estimate, with what small chunks and copies to the CPU lose."""


@dataclass(frozen=True)
class Card:
    """A GPU, and what of its memory is free for a run."""

    name: str
    free_bytes: int
    how_known: str
    precision: Precision  # the one "auto" takes
    compiles: bool


@dataclass(frozen=True)
class Row:
    """What was asked, and the plan; or why there is none."""

    label: str
    plan: StepPlan | None
    refusal: SettingError | None = None


@dataclass(frozen=True)
class Planned:
    """Everything there is to show."""

    config: RunConfig
    shape: EncoderShape
    tiles: int
    cards: tuple[Card, ...]
    rows: tuple[Row, ...]  # one per card
    alternatives: tuple[tuple[Row, str], ...]  # on the first card, and the smallest usual card for each
    this_machine: str


def plan_run(config: RunConfig, *, gpu_memory: Sequence[float], tiles: int | None) -> Planned:
    """Plan a run for this machine's GPU, or for cards of so many GB."""
    here = card_here(config) if not gpu_memory else None
    cards = [here] if here is not None else [card_of(gb) for gb in gpu_memory or USUAL_CARDS]
    shape = encoder_shape(config.encoder.name, config.adaptation.scope)
    count = tiles or tiles_of_a_bag(config)
    rows = tuple(plan_for(config, shape, count, card, card.name) for card in cards)
    if all(row.plan is None for row in rows):
        raise nothing_fits(config, count, cards[-1], rows[-1])
    single = len(cards) == 1
    return Planned(
        config=config,
        shape=shape,
        tiles=count,
        cards=tuple(cards),
        rows=rows,
        alternatives=tuple(alternatives(config, count, cards[0])) if single else (),
        this_machine="" if here is not None or gpu_memory else "There is no GPU here: tapfm train would use the CPU.",
    )


@cache
def encoder_shape(encoder_name: str, scope: str) -> EncoderShape:
    """Build the architecture without its weights, open what the scope says, and count."""
    card = encoder_card(encoder_name)
    with torch.device("meta"):
        encoder = VitEncoder(build_vit(card), mean=card.mean, std=card.std, feature=card.feature)
    apply_scope(encoder, Scope.parse(scope))
    return EncoderShape.of(encoder)


def tiles_of_a_bag(config: RunConfig) -> int:
    """Say how many tiles a step has: the setting, or those of the largest slide."""
    count = config.adaptation.tiles_per_slide
    if isinstance(count, int):
        return count
    try:
        return max(len(slide.tiles) for slide in read_data(config).slides if slide.tiles is not None)
    except InputError as error:
        raise InputError(
            f"adaptation.tiles_per_slide is all, and how many that are cannot be found out: {error.message}",
            hint="Say how many the largest slide has: --tiles 20000",
        ) from error


def card_of(gb: float) -> Card:
    """Take a card by what is written on it."""
    free = int(SEEN * gb * GIB - CONTEXT_BYTES)
    if free <= 0:
        raise InputError(f"--gpu-memory {gb:g} leaves nothing for a run.", hint="A usual value is 24, in GB.")
    how = f"of {gb:g} GB about {SEEN * gb:.1f} GiB are there, of which CUDA takes {CONTEXT_BYTES / GIB:.1f}"
    return Card(f"{gb:g} GB", free, how, precision="bfloat16", compiles=True)


def card_here(config: RunConfig) -> Card | None:
    """Take the GPU that the run would use, with what is free on it now."""
    if config.machine.device == "cpu" or not torch.cuda.is_available():
        return None
    device = torch.device("cuda" if config.machine.device == "auto" else config.machine.device)
    free, total = torch.cuda.mem_get_info(device)
    limit = config.machine.gpu_memory_gib
    if limit is not None:
        free = min(free, int(limit * GIB))
    with torch.cuda.device(device):
        half = torch.cuda.is_bf16_supported(including_emulation=False)
    return Card(
        torch.cuda.get_device_name(device),
        free,
        f"free now, of {total / GIB:.1f} GiB" if limit is None else f"machine.gpu_memory_gib, of {total / GIB:.1f} GiB",
        precision="bfloat16" if half else "float16",
        compiles=can_compile(device),
    )


def plan_for(config: RunConfig, shape: EncoderShape, tiles: int, card: Card, label: str, **changes: Any) -> Row:
    """Plan for one card."""
    settings = settings_for(config, card) | changes
    try:
        return Row(label, plan_step(shape, tiles=tiles, free_bytes=card.free_bytes, **settings))
    except SettingError as error:
        return Row(label, None, error)


def settings_for(config: RunConfig, card: Card) -> dict[str, Any]:
    """Unpack what the planner has to keep to, on this card."""
    precision, compiled = config.adaptation.precision, config.machine.compile
    return asked_of_the_plan(config) | {
        "precision": card.precision if precision == "auto" else precision,
        "compiled": card.compiles if compiled == "auto" else compiled,
    }


def alternatives(config: RunConfig, tiles: int, card: Card) -> Iterator[tuple[Row, str]]:
    """Plan the run with less of the encoder learning, or fewer tiles gone back through; and find the smallest card."""
    for scope in dict.fromkeys((config.adaptation.scope, *OTHER_SCOPES)):
        try:
            shape = encoder_shape(config.encoder.name, scope)
        except InputError:  # fewer blocks than that, or peft is missing
            continue
        for share in (None, max(1, tiles // 4)) if scope == config.adaptation.scope and tiles >= 16 else (None,):
            changes = {} if share is None else {"backward_tiles": share}
            said = f"adaptation.scope={scope}" if share is None else f"adaptation.backward_tiles={share}"
            row = plan_for(config, shape, tiles, card, said, **changes)
            fitting = (c for c in map(card_of, USUAL_CARDS) if plan_for(config, shape, tiles, c, "", **changes).plan)
            smallest = next(fitting, None)
            yield row, "-" if smallest is None else smallest.name


def nothing_fits(config: RunConfig, tiles: int, card: Card, row: Row) -> SettingError:
    """Say what would fit on the card, or which card would do."""
    assert row.refusal is not None
    lines = [row.refusal.hint] if row.refusal.hint else []
    would = [(each, smallest) for each, smallest in alternatives(config, tiles, card)]
    if fitting := [each for each, _ in would if each.plan is not None]:
        said = ", ".join(f"{each.label} ({each.plan.peak_bytes / GIB:.1f} GiB)" for each in fitting if each.plan)
        lines.append(f"On this card would fit: {said}.")
    if would and would[0][1] != "-":
        lines.append(f"As it is, it fits a card of {would[0][1]}.")
    return SettingError(f"{card.name}: {row.refusal.message}", hint="\n".join(lines))


# On the screen


def show(planned: Planned, console: Console, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        print(json.dumps(as_tables(planned), indent=1))
        return
    shape, config = planned.shape, planned.config
    part = "all of which learn" if shape.trainable == shape.parameters else f"of which {shape.trainable:,} learn"
    console.print(
        f"{config.encoder.name}, {shape.parameters:,} parameters, {part} (scope {config.adaptation.scope}); "
        f"{counted(planned.tiles, 'tile')} a step.",
        markup=False,
    )
    if planned.this_machine:
        console.print(f"{planned.this_machine} On cards of the usual sizes:", markup=False)
    console.print()
    if len(planned.rows) > 1:
        console.print(table_of_cards(planned))
        console.print(
            "\nA card's memory is taken as 98% of what is written on it, less 0.5 GiB for CUDA.", markup=False
        )
        return
    (card,), (row,) = planned.cards, planned.rows
    assert row.plan is not None
    console.print(table_of_plan(row.plan, shape, settings_for(config, card)))
    console.print(f"\nMemory at its peak, on {card.name} ({card.how_known}):", markup=False)
    console.print(table_of_parts(row.plan, card))
    if planned.alternatives:
        console.print("\nWith --set:", markup=False)
        console.print(table_of_alternatives(planned))


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Make a table as all of ours are."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def table_of_plan(plan: StepPlan, shape: EncoderShape, settings: dict[str, Any]) -> Table:
    """Lay out one plan."""
    table = plain_table("", "")
    compiled = ", compiled" if settings["compiled"] else ""
    table.add_row("tiles", tiles_in_words(plan))
    table.add_row("precision", f"{settings['precision']}{compiled}")
    table.add_row("recomputed", recompute_in_words(plan.recompute[shape.depth - shape.learning_blocks :], shape))
    table.add_row("optimiser", optimiser_in_words(plan))
    table.add_row("work", work_in_words(plan, shape))
    return table


def work_in_words(plan: StepPlan, shape: EncoderShape) -> str:
    """Say what a tile costs."""
    least = least_passes(shape)
    lost = plan.cost - plan.passes
    slower = f"; small chunks and copies take the time of {lost:.1f} more" if lost >= 0.1 * plan.passes else ""
    return (
        f"{plan.passes:.1f} forward passes a tile, {plan.passes / least:.2f} times those of one pass that recomputes "
        f"nothing ({least:.1f}){slower}"
    )


def table_of_parts(plan: StepPlan, card: Card) -> Table:
    """Lay out what takes the memory."""
    table = plain_table("", "GiB", right=("GiB",))
    for name, size in plan.parts.items():
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_row("together", f"{plan.peak_bytes / GIB:.2f}", style="bold")
    table.add_row("left, for gaps", f"{(card.free_bytes - plan.peak_bytes) / GIB:.2f}")
    return table


def table_of_cards(planned: Planned) -> Table:
    """Lay out a row for each card."""
    figures = ("peak GiB", "passes", "time")
    columns = ("card", "way", "chunk", "graphs kept", "recomputed", "moments", "optimiser on", *figures)
    table = plain_table(*columns, right=("chunk", "graphs kept", *figures))
    shape = planned.shape
    for row in planned.rows:
        if row.plan is None:
            table.add_row(row.label, "does not fit")
            continue
        plan = row.plan
        table.add_row(
            row.label,
            plan.way,
            f"{plan.chunk:,}",
            f"{plan.kept} of {plan.chunks}",
            recompute_in_words(plan.recompute[shape.depth - shape.learning_blocks :], shape),
            plan.moments,
            "CPU" if plan.offload else "GPU",
            f"{plan.peak_bytes / GIB:.1f}",
            f"{plan.passes:.1f}",
            f"{plan.cost / least_passes(shape):.1f} x",
        )
    return table


def table_of_alternatives(planned: Planned) -> Table:
    """Lay out what else could be done on the card."""
    table = plain_table("", "way", "peak GiB", "passes", "smallest card", right=("peak GiB", "passes", "smallest card"))
    for row, smallest in planned.alternatives:
        if row.plan is None:
            table.add_row(row.label, "does not fit", "", "", smallest)
        else:
            figures = (f"{row.plan.peak_bytes / GIB:.1f}", f"{row.plan.passes:.1f}")
            table.add_row(row.label, row.plan.way, *figures, smallest)
    return table


def as_tables(planned: Planned) -> dict[str, Any]:
    """Give it for JSON."""

    def of_plan(row: Row) -> dict[str, Any] | None:
        return None if row.plan is None else asdict(row.plan) | {"peak_bytes": row.plan.peak_bytes}

    return {
        "encoder": planned.config.encoder.name,
        "scope": planned.config.adaptation.scope,
        "tiles": planned.tiles,
        "shape": asdict(planned.shape),
        "cards": [
            {"card": card.name, "free_bytes": card.free_bytes, "plan": of_plan(row)}
            for card, row in zip(planned.cards, planned.rows, strict=True)
        ],
        "alternatives": [
            {"set": row.label, "plan": of_plan(row), "smallest_card": smallest}
            for row, smallest in planned.alternatives
        ],
    }
