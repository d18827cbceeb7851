"""`tapfm bench`: the speed of this machine, and how long training and prediction take on it."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.run_file import read_run_config
from tapfm.workflows.shared_options import SlidesFolder

if TYPE_CHECKING:
    from tapfm.bench.measure import BenchResult

_WITH_GPU, _WITHOUT_GPU = "uni", "tapfm-pocket"  # encoders


@options
class BenchOptions:
    """Options of `tapfm bench`."""

    run: Annotated[
        Path | Any | None,  # Any: a RunConfig
        Argument("Measure for this run: its encoder, slides, ...", metavar="RUN.toml"),
    ] = None
    _: KW_ONLY
    encoder: Annotated[str | None, Option("One of `tapfm encoders`.", default="uni; without a GPU tapfm-pocket")] = None
    cohort: Annotated[Path | None, Option("Your slides, to read and to plan for.", metavar="CSV")] = None
    tiles: Annotated[Path | None, Option("Their tiles: output folder of `tapfm tile`.", metavar="DIR")] = None
    slides: SlidesFolder = None
    scope: Annotated[
        tuple[str, ...],
        Option("Measure steps of this scope too: last:4, lora:16; repeatable.", metavar="SCOPE"),
    ] = ()
    precision: Annotated[str | None, Option("As in RUN.toml: auto, float32, ...", default="auto")] = None
    device: Annotated[str | None, Option("auto, cpu, cuda, cuda:1, ...", default="auto")] = None
    workers: Annotated[
        int | None,
        Option(
            "Worker processes; 0: none, all work in this process.",
            default="as in RUN.toml: one per core",
            at_least=0,
        ),
    ] = None
    out: Annotated[Path | None, Option("Write all measurements to this JSON file.", metavar="FILE")] = None
    quick: Annotated[bool, Option("Rough measurements, in seconds.")] = False

    def check(self) -> None:
        """Refuse options that repeat each other, or need another one."""
        named = {"--cohort": self.cohort, "--tiles": self.tiles, "--slides": self.slides}
        given = [name for name, value in named.items() if value is not None]
        if self.run is not None and given:
            raise InputError(
                f"{self.run} names slides and tiles, and so do {' and '.join(given)}.", hint="Leave one of them out."
            )
        if given and (self.cohort is None or self.tiles is None):
            missing = "--tiles" if self.cohort is not None else "--cohort"
            raise InputError(f"{given[0]} needs {missing}.", hint="For example: --cohort cohort.csv --tiles tiles")
        if self.out is not None and self.out.is_dir():
            raise InputError(f"{self.out} is a folder.", hint="Give a file to --out, such as bench.json.")
        if self.out is not None and not _is_writable(self.out):
            raise InputError(f"{self.out} cannot be written.", hint="Give another file to --out.")

    @property
    def changes(self) -> list[str]:
        """The changes to the configuration of the run."""
        named = {"encoder.name": self.encoder, "adaptation.precision": self.precision, "machine.device": self.device}
        return [f"{name}={value}" for name, value in named.items() if value is not None]


def _is_writable(file: Path) -> bool:
    """Return whether the folder of a file, or the nearest one above it that exists, can be written to."""
    folder = next(each for each in file.absolute().parents if each.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


@command_function(BenchOptions)
def bench(options: BenchOptions, console: Console) -> BenchResult:
    """Measure this machine, and estimate the times of an epoch, a training and a prediction."""
    from tapfm.bench.slides import slides_of_cohort, slides_of_paper, slides_of_run
    from tapfm.encoders.adapters import Scope
    from tapfm.encoders.catalog import encoder_card
    from tapfm.runtime.devices import check_precision, choose_device

    for scope in options.scope:
        Scope.parse(scope)
    if options.encoder is not None:
        encoder_card(options.encoder)
    check_precision(options.precision or "auto")
    config = None if options.run is None else read_run_config(options.run, options.changes)
    if config is not None:
        slides = slides_of_run(config)
    elif options.cohort is not None and options.tiles is not None:
        slides = slides_of_cohort(options.cohort, options.tiles, options.slides)
    else:
        slides = slides_of_paper()

    from tapfm.bench.measure import measure, write
    from tapfm.bench.models import BenchSubject, settings_for

    device = choose_device(config.machine.device if config is not None else options.device or "auto")
    if config is None:
        encoder = options.encoder or (_WITH_GPU if device.type == "cuda" else _WITHOUT_GPU)
        config = settings_for(encoder, options.precision or "auto")
    workers = options.workers
    if workers is None and config.machine.workers != "auto":
        workers = config.machine.workers
    measured = measure(
        BenchSubject(config, device),
        slides,
        list(dict.fromkeys([config.adaptation.scope, *options.scope])),
        workers=count_workers(workers),
        quick=options.quick,
        console=console,
    )
    if options.out is not None:
        write(measured, options.out)
    return measured
