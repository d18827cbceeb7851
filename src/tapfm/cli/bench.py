"""The command that measures this machine. What it needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tapfm.cli.options import ReadingWorkers
from tapfm.errors import InputError

WITH_GPU, WITHOUT_GPU = "uni", "tapfm-pocket"


def bench(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN.toml", help="Measure for this run: its encoder, slides, ...")
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option("--encoder", help="One of `tapfm encoders`.", show_default="uni; without a GPU tapfm-pocket"),
    ] = None,
    cohort: Annotated[
        Path | None, typer.Option("--cohort", metavar="CSV", help="Your slides, to read and to plan for.")
    ] = None,
    tiles: Annotated[
        Path | None, typer.Option("--tiles", metavar="DIR", help="Their tiles: what `tapfm tile` wrote.")
    ] = None,
    slides: Annotated[
        Path | None, typer.Option("--slides", metavar="DIR", help="Where to look for slides that moved.")
    ] = None,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="SCOPE", help="Steps of this too: last:4, lora:16; repeatable."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="As in RUN.toml: auto, float32, ...", show_default="auto")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...", show_default="auto")
    ] = None,
    workers: ReadingWorkers = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write all figures here, as JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Rough figures, in seconds.")] = False,
) -> None:
    """Measure this machine, and say how long training and prediction will take.

    \b
    tapfm bench
    tapfm bench --encoder h-optimus-0 --scope lora:16 --out bench.json
    tapfm bench --cohort cohort.csv --tiles tiles    for your slides
    tapfm bench run.toml                             for a run

    Matrix product, reading tiles, encoding, the adaptation step in one pass
    and in chunks; then the times of an epoch, of a training and of a slide's
    prediction, and whether reading or computing takes longer. Weights are
    random, which are as fast as any: nothing is downloaded.
    """
    from tapfm.bench.slides import slides_of_cohort, slides_of_paper, slides_of_run
    from tapfm.config.loading import load_config
    from tapfm.encoders.adapters import Scope
    from tapfm.encoders.catalog import encoder_card
    from tapfm.runtime.devices import check_precision, choose_device
    from tapfm.runtime.workers import available_cores

    check_slides_options(run, cohort, tiles, slides)
    if out is not None and out.is_dir():
        raise InputError(f"{out} is a folder.", hint="Give a file to --out, such as bench.json.")
    for scope in scopes or ():
        Scope.parse(scope)
    if encoder is not None:
        encoder_card(encoder)
    check_precision(precision or "auto")
    given = {"encoder.name": encoder, "adaptation.precision": precision, "machine.device": device}
    changes = [f"{name}={value}" for name, value in given.items() if value is not None]
    # what is wrong with settings and slides is told before torch is waited for
    settings = load_config(run, changes) if run is not None else None
    if settings is not None:
        of_slides = slides_of_run(settings)
    elif cohort is not None and tiles is not None:
        of_slides = slides_of_cohort(cohort, tiles, slides)
    else:
        of_slides = slides_of_paper()
    from tapfm.bench import measure, show
    from tapfm.bench.models import Subject, settings_for
    from tapfm.cli.console import terminal

    chosen = choose_device(settings.machine.device if settings is not None else device or "auto")
    if settings is None:
        settings = settings_for(encoder or (WITH_GPU if chosen.type == "cuda" else WITHOUT_GPU), precision or "auto")
    if workers is None:
        workers = available_cores() if settings.machine.workers == "auto" else settings.machine.workers
    messages = Console(stderr=True, highlight=False)
    try:
        measured = measure.measure(
            Subject(settings, chosen),
            of_slides,
            list(dict.fromkeys([settings.adaptation.scope, *(scopes or ())])),
            workers=workers,
            quick=quick,
            console=messages,
        )
    except KeyboardInterrupt:
        messages.print("Stopped; nothing was written.")
        raise typer.Exit(130) from None
    show.show(measured, terminal())
    if out is not None:
        measure.write(measured, out)
        messages.print(f"Written: {out}", markup=False, soft_wrap=True)


def check_slides_options(run: Path | None, cohort: Path | None, tiles: Path | None, slides: Path | None) -> None:
    """Refuse options that say the same twice, or half of it."""
    options = {"--cohort": cohort, "--tiles": tiles, "--slides": slides}
    given = [name for name, value in options.items() if value is not None]
    if run is not None and given:
        raise InputError(
            f"{run} says which slides and tiles, so that {' and '.join(given)} cannot.", hint="Leave one of them out."
        )
    if given and (cohort is None or tiles is None):
        missing = "--tiles" if cohort is not None else "--cohort"
        raise InputError(f"{given[0]} needs {missing}.", hint="For example: --cohort cohort.csv --tiles tiles")
