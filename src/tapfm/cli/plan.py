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
    """Predict the GPU memory that a training run needs, and how it will be used.

    Needs neither a GPU nor weights. `tapfm train` makes the same plan for the
    memory that is free when it starts. If all tiles of a slide fit, they are
    encoded in one pass. Otherwise they are encoded in chunks, some of them
    twice, and the less memory there is, the more activations are recomputed.
    This does not change the result. The moments of the optimiser are stored in
    CPU memory if this is needed or faster, and with fewer bits only if float32
    moments do not fit or would make a step much slower.

    \b
    Examples:
      tapfm plan run.toml                       # for the GPU of this machine
      tapfm plan run.toml --gpu-memory 24       # for a GPU with 24 GB
      tapfm plan run.toml --gpu-memory 12 --gpu-memory 80
      tapfm plan run.toml --gpu-memory 8 --set adaptation.scope=lora:16

    \b
    Columns:
      strategy      one-pass (all tiles at once), hybrid or chunked (in chunks)
      graphs kept   chunks that need not be encoded again for the backward pass
      recomputed    activations that are computed again instead of stored:
                    nothing, pointwise (norms, activation functions), mlp, block
      peak GiB      predicted peak memory; 5% and 0.25 GiB are left free
      passes        work per tile, in forward passes of the encoder
      time          estimated time of a step, relative to the minimum

    Exit code 2 if the run does not fit on any of the GPUs; the message lists
    settings that fit.
    """
    planned = workflow.plan.run(options, stderr_console())
    if planned is None:
        text = "Method fixed does not train the encoder. It needs a few hundred MB of memory on any device."
        typer.echo(json.dumps({"method": "fixed", "gpus": []}) if as_json else text)
    elif as_json:
        from tapfm.adaptation.memory_plan import plan_to_json

        print_json(plan_to_json(planned))
    else:
        _print_plan(planned, stdout_console())


def _print_plan(planned: MemoryPlan, console: Console) -> None:
    from tapfm.adaptation.memory_plan import planner_arguments_for_gpu

    shape, config = planned.shape, planned.config
    trainable = "all" if shape.trainable_parameters == shape.parameters else f"{shape.trainable_parameters:,}"
    console.print(
        f"{config.encoder.name}: {shape.parameters:,} parameters, {trainable} trainable "
        f"(scope {config.adaptation.scope}); {format_count(planned.tiles, 'tile')} per slide and step.",
        markup=False,
    )
    if planned.note:
        console.print(f"{planned.note} Plans for common GPU sizes:", markup=False)
    console.print()
    if len(planned.plans) > 1:
        console.print(_gpus_table(planned))
        console.print(
            "\nThe usable memory is assumed to be 98% of the nominal size, less 0.5 GiB for CUDA.", markup=False
        )
        return
    (gpu,), (row,) = planned.gpus, planned.plans
    assert row.plan is not None
    console.print(_plan_table(row.plan, shape, planner_arguments_for_gpu(config, gpu)))
    console.print(f"\nPeak memory on {gpu.name} ({gpu.memory_description}):", markup=False)
    console.print(_parts_table(row.plan, gpu))
    if planned.alternatives:
        console.print("\nWith other settings (--set):", markup=False)
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

    minimum = minimum_passes(shape)
    overhead = plan.cost - plan.passes
    slower = (
        f"; kernel launches and copies add the time of {overhead:.1f} passes" if overhead >= 0.1 * plan.passes else ""
    )
    ratio = f"{plan.passes / minimum:.2f} times the minimum of {minimum:.1f}"
    return f"{plan.passes:.1f} forward passes per tile, {ratio}{slower}"


def _parts_table(plan: StepPlan, gpu: Gpu) -> Table:
    table = _plain_table("", "GiB", right=("GiB",))
    for name, size in plan.parts.items():
        table.add_row(name, f"{size / _GIB:.2f}")
    table.add_row("total", f"{plan.peak_bytes / _GIB:.2f}", style="bold")
    table.add_row("left free", f"{(gpu.free_bytes - plan.peak_bytes) / _GIB:.2f}")
    return table


def _gpus_table(planned: MemoryPlan) -> Table:
    from tapfm.adaptation.plan_text import describe_recompute, minimum_passes

    costs = ("peak GiB", "passes", "time")
    columns = ("GPU", "strategy", "chunk", "graphs kept", "recomputed", "moments", "optimiser on", *costs)
    table = _plain_table(*columns, right=("chunk", "graphs kept", *costs))
    shape = planned.shape
    for row in planned.plans:
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
        "", "strategy", "peak GiB", "passes", "smallest GPU", right=("peak GiB", "passes", "smallest GPU")
    )
    for row, smallest in planned.alternatives:
        if row.plan is None:
            table.add_row(row.label, "does not fit", "", "", smallest)
        else:
            peak, passes = f"{row.plan.peak_bytes / _GIB:.1f}", f"{row.plan.passes:.1f}"
            table.add_row(row.label, row.plan.strategy, peak, passes, smallest)
    return table
