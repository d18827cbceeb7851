"""`tapfm bench`: measure the speed of this machine and estimate the duration of training and prediction."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.run_file import read_run_config
from tapfm.workflows.shared_options import SlidesFolder

if TYPE_CHECKING:
    from tapfm.bench.measure import BenchResult

_GPU_ENCODER, _CPU_ENCODER = "uni", "tapfm-pocket"  # defaults


@options
class BenchOptions:
    """Options of `tapfm bench`."""

    run: Annotated[
        Path | Any | None,  # Any: a RunConfig
        Argument("Measure with the encoder, slides and settings of this run.", metavar="RUN.toml"),
    ] = None
    _: KW_ONLY
    encoder: Annotated[
        str | None,
        Option(
            "Encoder to measure, from `tapfm encoders`.",
            metavar="NAME",
            show_default="as in RUN.toml, else uni on a GPU, tapfm-pocket on a CPU",
        ),
    ] = None
    cohort: Annotated[
        Path | None,
        Option(
            "Cohort table: read tiles from these slides, and estimate durations for this cohort. Needs --tiles.",
            metavar="CSV",
            show_default="a synthetic slide; durations are estimated for the paper's cohort",
        ),
    ] = None
    tiles: Annotated[
        Path | None, Option("Output folder of `tapfm tile` for the slides of --cohort.", metavar="DIR")
    ] = None
    slides: SlidesFolder = None
    scope: Annotated[
        tuple[str, ...],
        Option(
            "Also measure training steps with this trainable part of the encoder: full, last:4, lora:16. Repeatable.",
            metavar="SCOPE",
        ),
    ] = ()
    precision: Annotated[
        str | None, Option("Precision: auto, float32, bfloat16 or float16.", show_default="as in RUN.toml, else auto")
    ] = None
    device: Annotated[
        str | None,
        Option(
            "Device to measure: auto (the GPU if there is one), cpu, cuda, or cuda:1 for the second GPU.",
            show_default="as in RUN.toml, else auto",
        ),
    ] = None
    workers: Annotated[
        int | None,
        Option(
            "Number of worker processes that read tiles. 0: read them in the main process.",
            metavar="N",
            show_default="as in RUN.toml, else one per CPU core",
            at_least=0,
        ),
    ] = None
    out: Annotated[Path | None, Option("Also write all measurements to this JSON file.", metavar="FILE")] = None
    quick: Annotated[bool, Option("Measure for a few seconds only. The results are less precise.")] = False

    def check(self) -> None:
        """Raise InputError if options contradict each other or need another option."""
        slide_options = {"--cohort": self.cohort, "--tiles": self.tiles, "--slides": self.slides}
        given = [name for name, value in slide_options.items() if value is not None]
        if self.run is not None and given:
            source = self.run if isinstance(self.run, Path) else "a RunConfig"
            raise InputError(
                f"{' and '.join(given)} cannot be combined with {source}, which already defines slides and tiles.",
                hint="Use either RUN.toml or --cohort and --tiles.",
            )
        if given and (self.cohort is None or self.tiles is None):
            missing = "--tiles" if self.cohort is not None else "--cohort"
            raise InputError(f"{given[0]} needs {missing}.", hint="For example: --cohort cohort.csv --tiles tiles")
        if self.out is not None and self.out.is_dir():
            raise InputError(
                f"--out {self.out} is a folder, not a file.", hint=f"For example: --out {self.out / 'bench.json'}"
            )
        if self.out is not None and not _is_writable(self.out):
            raise InputError(
                f"{self.out} cannot be written: its folder is not writable.", hint="Choose another file with --out."
            )

    @property
    def overrides(self) -> list[str]:
        """Options that override settings of the run, as `key=value`."""
        settings = {"encoder.name": self.encoder, "adaptation.precision": self.precision, "machine.device": self.device}
        return [f"{name}={value}" for name, value in settings.items() if value is not None]


def _is_writable(file: Path) -> bool:
    """Return whether a file can be created. Missing folders are created later, so the nearest existing one counts."""
    folder = next(each for each in file.absolute().parents if each.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)


@command_function(BenchOptions)
def bench(options: BenchOptions, console: Console) -> BenchResult:
    """Measure this machine, and estimate the duration of an epoch, a training run and a prediction."""
    from tapfm.bench.bench_slides import slides_from_cohort, slides_from_paper, slides_from_run
    from tapfm.encoders.adapters import Scope
    from tapfm.encoders.catalog import find_encoder_card
    from tapfm.runtime.devices import check_precision, choose_device

    for scope in options.scope:
        Scope.parse(scope)
    if options.encoder is not None:
        find_encoder_card(options.encoder)
    check_precision(options.precision or "auto")
    config = None if options.run is None else read_run_config(options.run, options.overrides)
    if config is not None:
        slides = slides_from_run(config)
    elif options.cohort is not None and options.tiles is not None:
        slides = slides_from_cohort(options.cohort, options.tiles, options.slides)
    else:
        slides = slides_from_paper()

    from tapfm.bench.measure import measure_machine, write_result
    from tapfm.bench.models import BenchSetup, make_default_config

    device = choose_device(config.machine.device if config is not None else options.device or "auto")
    if config is None:
        encoder = options.encoder or (_GPU_ENCODER if device.type == "cuda" else _CPU_ENCODER)
        config = make_default_config(encoder, options.precision or "auto")
    workers = options.workers
    if workers is None and config.machine.workers != "auto":
        workers = config.machine.workers
    result = measure_machine(
        BenchSetup(config, device),
        slides,
        list(dict.fromkeys([config.adaptation.scope, *options.scope])),
        workers=choose_worker_count(workers),
        quick=options.quick,
        console=console,
    )
    if options.out is not None:
        write_result(result, options.out)
    return result
