"""`tapfm train`: from a configuration to a run folder with the best epoch's weights."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.run_file import Changes, RunFile, read_run_config

if TYPE_CHECKING:
    from tapfm.adaptation.training_run import TrainingResult


@options
class TrainOptions:
    """Options of `tapfm train`."""

    run: RunFile
    _: KW_ONLY
    out: Annotated[Path, Option("Run folder, such as runs/first.", metavar="DIR")]
    set: Changes = ()
    resume: Annotated[bool, Option("Resume the run in this folder, or start it if there is none.")] = False
    device: Annotated[str | None, Option("auto, cpu, cuda, cuda:1, ...", default="as in RUN.toml: auto")] = None
    workers: Annotated[
        int | None,
        Option(
            "Worker processes; 0: none, all work in this process.",
            default="as in RUN.toml: one per core",
            at_least=0,
        ),
    ] = None
    unit: Annotated[
        str | None, Option("What an AUC counts once: slide or patient.", default="as in RUN.toml: slide")
    ] = None
    allow_failures: Annotated[
        int | None,
        Option("Continue while no more than N slides fail.", metavar="N", default="as in RUN.toml: 0", at_least=0),
    ] = None

    def check(self) -> None:
        """Refuse a file for the run folder."""
        if self.out.is_file():
            raise InputError(f"{self.out} is a file.", hint="Give a folder to --out.")

    @property
    def changes(self) -> list[str]:
        """The changes to the configuration, those of other options too."""
        machine = {"device": self.device, "workers": self.workers, "allow_failures": self.allow_failures}
        given = [f"machine.{name}={value}" for name, value in machine.items() if value is not None]
        return [*self.set, *given, *([f"selection.unit={self.unit}"] if self.unit is not None else [])]


@command_function(TrainOptions)
def train(options: TrainOptions, console: Console) -> TrainingResult:
    """Train, keep the best epoch, and predict the held-out slides. Ctrl-C saves first.

    `run` may be a `RunConfig`, as `tapfm.configure` makes. Slides that failed are in `.failed` of the result.
    """
    from tapfm.runs.data import read_run_data

    config = read_run_config(options.run, options.changes)
    data = read_run_data(config)

    from tapfm.adaptation.training_run import run_training

    workers = config.machine.workers
    return run_training(
        config,
        data,
        options.out,
        resume=options.resume,
        workers=count_workers(None if workers == "auto" else workers),
        console=console,
    )
