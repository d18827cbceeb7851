"""The command about memory. What it needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tapfm.cli.training import CHANGES, RUN


def plan(
    run: RUN,
    gpu_memory: Annotated[
        list[float] | None,
        typer.Option(
            "--gpu-memory", metavar="GB", help="A card with so much; repeatable.", show_default="this machine's"
        ),
    ] = None,
    tiles: Annotated[
        int | None, typer.Option("--tiles", metavar="N", min=1, help="Tiles of a slide.", show_default="as in RUN.toml")
    ] = None,
    changes: CHANGES = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say how a run would go through a GPU, and what memory it takes.

    \b
    tapfm plan run.toml                     on this machine's GPU
    tapfm plan run.toml --gpu-memory 24     on a card of 24 GB
    tapfm plan run.toml --gpu-memory 12 --gpu-memory 80   a row for each
    tapfm plan run.toml --gpu-memory 8 --set adaptation.scope=lora:16

    Neither a GPU nor weights are needed. `tapfm train` makes the same plan
    from what is free when it starts: all tiles at once where they fit, else in
    chunks that are encoded twice, with more computed again the less there is.
    None of that changes the result. Only where even this does not fit, the
    optimiser's moments are rounded, or kept in the machine's memory.

    \b
    passes   work per tile; 3 is a forward and a backward pass, no more
    graphs   chunks of which backward needs no second encoding
    peak     predicted; tapfm leaves 5% and 0.25 GiB free besides

    Exit code 2 when nothing fits, with what would.
    """
    from tapfm.config.loading import load_config

    config = load_config(run, changes or [])
    if config.adaptation.method == "fixed":
        said = "Method fixed trains no encoder: it learns from stored features, in a few hundred MB on any device."
        typer.echo(json.dumps({"method": "fixed", "cards": []}) if as_json else said)
        return
    from tapfm.cli.console import terminal
    from tapfm.workflows import plan as plan_run

    planned = plan_run.plan_run(config, gpu_memory=gpu_memory or [], tiles=tiles)
    plan_run.show(planned, terminal(), as_json=as_json)
