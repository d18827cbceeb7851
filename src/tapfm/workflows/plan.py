"""`tapfm plan`: how a run would use the memory of a GPU, without one and without weights."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.runtime.options import Option, command_function, options
from tapfm.workflows.run_file import Changes, RunFile, read_run_config

if TYPE_CHECKING:
    from tapfm.adaptation.memory_plan import MemoryPlan


@options
class PlanOptions:
    """Options of `tapfm plan`."""

    run: RunFile
    _: KW_ONLY
    gpu_memory: Annotated[
        tuple[float, ...], Option("Memory of a card; repeatable.", metavar="GB", default="this machine's")
    ] = ()
    tiles: Annotated[int | None, Option("Tiles of a slide.", metavar="N", default="as in RUN.toml", at_least=1)] = None
    set: Changes = ()


@command_function(PlanOptions)
def plan(options: PlanOptions, console: Console) -> MemoryPlan | None:  # noqa: ARG001 - every command gets one
    """Plan how a run uses the memory of a GPU. None for method fixed, which trains no encoder.

    Raises `SettingError` when nothing fits, with what would.
    """
    config = read_run_config(options.run, options.set)
    if config.adaptation.method == "fixed":
        return None
    from tapfm.adaptation.memory_plan import plan_memory

    return plan_memory(config, gpu_memory=options.gpu_memory, tiles=options.tiles)
