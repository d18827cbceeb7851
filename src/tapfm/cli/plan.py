"""`tapfm plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tapfm.cli.command import command
from tapfm.cli.console import print_json, stderr_console, stdout_console
from tapfm.runtime.messages import format_count
from tapfm.workflows import plan as workflow

if TYPE_CHECKING:
    from tapfm.adaptation.encoder_shape import EncoderShape
    from tapfm.adaptation.memory_plan import Gpu, MemoryPlan
    from tapfm.adaptation.planner import StepPlan

_GIB = 2**30


@command(workflow.PlanOptions)
def plan(
    options: workflow.PlanOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan how a run uses the memory of a GPU.

    \b
    tapfm plan run.toml                     on this machine's GPU
    tapfm plan run.toml --gpu-memory 24     on a card of 24 GB
    tapfm plan run.toml --gpu-memory 12 --gpu-memory 80   a row for each
    tapfm plan run.toml --gpu-memory 8 --set adaptation.scope=lora:16

    Neither a GPU nor weights are needed. `tapfm train` makes the same plan
    from what is free when it starts: all tiles at once where they fit, else in
    chunks that are encoded twice, with more recomputed the less memory there is.
    None of that changes the result. Only where even this does not fit, the
    optimiser's moments are rounded, or kept in the machine's memory.

    \b
    passes   work per tile; 3 is a forward and a backward pass, no more
    graphs   chunks of which backward needs no second encoding
    peak     predicted; tapfm leaves 5% and 0.25 GiB free besides

    Exit code 2 when nothing fits, with what would.
    """
    planned = workflow.plan.run(options, stderr_console())
    if planned is None:
        text = "Method fixed trains no encoder: it learns from stored features, in a few hundred MB on any device."
        typer.echo(json.dumps({"method": "fixed", "gpus": []}) if as_json else text)
    elif as_json:
        from tapfm.adaptation.memory_plan import plan_to_json

        print_json(plan_to_json(planned))
    else:
        _print_plan(planned, stdout_console())


def _print_plan(planned: MemoryPlan, console: Console) -> None:
    from tapfm.adaptation.memory_plan import planner_settings

    shape, config = planned.shape, planned.config
    part = "all of which learn" if shape.trainable == shape.parameters else f"of which {shape.trainable:,} learn"
    console.print(
        f"{config.encoder.name}, {shape.parameters:,} parameters, {part} (scope {config.adaptation.scope}); "
        f"{format_count(planned.tiles, 'tile')} a step.",
        markup=False,
    )
    if planned.this_machine:
        console.print(f"{planned.this_machine} On cards of the usual sizes:", markup=False)
    console.print()
    if len(planned.rows) > 1:
        console.print(_cards_table(planned))
        console.print(
            "\nA card's memory is taken as 98% of what is written on it, less 0.5 GiB for CUDA.", markup=False
        )
        return
    (card,), (row,) = planned.gpus, planned.rows
    assert row.plan is not None
    console.print(_plan_table(row.plan, shape, planner_settings(config, card)))
    console.print(f"\nMemory at its peak, on {card.name} ({card.memory_source}):", markup=False)
    console.print(_parts_table(row.plan, card))
    if planned.alternatives:
        console.print("\nWith --set:", markup=False)
        console.print(_alternatives_table(planned))


def _plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _plan_table(plan: StepPlan, shape: EncoderShape, settings: dict[str, Any]) -> Table:
    from tapfm.adaptation.plan_text import describe_chunks, describe_optimiser, describe_recompute

    table = _plain_table("", "")
    compiled = ", compiled" if settings["compiled"] else ""
    table.add_row("tiles", describe_chunks(plan))
    table.add_row("precision", f"{settings['precision']}{compiled}")
    table.add_row("recomputed", describe_recompute(plan.recompute[shape.depth - shape.trainable_blocks :], shape))
    table.add_row("optimiser", describe_optimiser(plan))
    table.add_row("work", _describe_work(plan, shape))
    return table


def _describe_work(plan: StepPlan, shape: EncoderShape) -> str:
    from tapfm.adaptation.plan_text import minimum_passes

    least = minimum_passes(shape)
    lost = plan.cost - plan.passes
    slower = f"; small chunks and copies take the time of {lost:.1f} more" if lost >= 0.1 * plan.passes else ""
    return (
        f"{plan.passes:.1f} forward passes a tile, {plan.passes / least:.2f} times those of one pass that recomputes "
        f"nothing ({least:.1f}){slower}"
    )


def _parts_table(plan: StepPlan, card: Gpu) -> Table:
    table = _plain_table("", "GiB", right=("GiB",))
    for name, size in plan.parts.items():
        table.add_row(name, f"{size / _GIB:.2f}")
    table.add_row("together", f"{plan.peak_bytes / _GIB:.2f}", style="bold")
    table.add_row("left, for gaps", f"{(card.free_bytes - plan.peak_bytes) / _GIB:.2f}")
    return table


def _cards_table(planned: MemoryPlan) -> Table:
    from tapfm.adaptation.plan_text import describe_recompute, minimum_passes

    figures = ("peak GiB", "passes", "time")
    columns = ("card", "way", "chunk", "graphs kept", "recomputed", "moments", "optimiser on", *figures)
    table = _plain_table(*columns, right=("chunk", "graphs kept", *figures))
    shape = planned.shape
    for row in planned.rows:
        if row.plan is None:
            table.add_row(row.label, "does not fit")
            continue
        plan = row.plan
        table.add_row(
            row.label,
            plan.strategy,
            f"{plan.chunk:,}",
            f"{plan.graphs_kept} of {plan.chunks}",
            describe_recompute(plan.recompute[shape.depth - shape.trainable_blocks :], shape),
            plan.moments,
            "CPU" if plan.offload else "GPU",
            f"{plan.peak_bytes / _GIB:.1f}",
            f"{plan.passes:.1f}",
            f"{plan.cost / minimum_passes(shape):.1f} x",
        )
    return table


def _alternatives_table(planned: MemoryPlan) -> Table:
    table = _plain_table(
        "", "way", "peak GiB", "passes", "smallest card", right=("peak GiB", "passes", "smallest card")
    )
    for row, smallest in planned.alternatives:
        if row.plan is None:
            table.add_row(row.label, "does not fit", "", "", smallest)
        else:
            figures = (f"{row.plan.peak_bytes / _GIB:.1f}", f"{row.plan.passes:.1f}")
            table.add_row(row.label, row.plan.strategy, *figures, smallest)
    return table
