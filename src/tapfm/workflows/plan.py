"""`tapfm plan`: predict the GPU memory of a training run. Needs neither a GPU nor weights."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.runtime.options import Option, command_function, options
from tapfm.workflows.run_file import Overrides, RunFile, read_run_config

if TYPE_CHECKING:
    from tapfm.adaptation.memory_plan import MemoryPlan


@options
class PlanOptions:
    """Options of `tapfm plan`."""

    run: RunFile
    _: KW_ONLY
    gpu_memory: Annotated[
        tuple[float, ...],
        Option(
            "Memory of the GPU in GB, as advertised. Repeatable, to compare GPUs.",
            metavar="GB",
            show_default="the GPU of this machine; without one, common sizes",
        ),
    ] = ()
    tiles_per_slide: Annotated[
        int | None,
        Option("Tiles per slide in a training step.", metavar="N", show_default="as in RUN.toml", at_least=1),
    ] = None
    set: Overrides = ()


@command_function(PlanOptions)
def plan(options: PlanOptions, console: Console) -> MemoryPlan | None:  # noqa: ARG001 - required by command_function
    """Return the memory plan of a run, or None for method fixed, which does not train the encoder.

    Raises SettingError if the run does not fit in memory; its hint lists settings that do.
    """
    config = read_run_config(options.run, options.set)
    if config.adaptation.method == "fixed":
        return None
    from tapfm.adaptation.memory_plan import plan_memory

    return plan_memory(config, gpu_memory=options.gpu_memory, tiles=options.tiles_per_slide)
