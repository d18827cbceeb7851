"""`tapfm predict`. What it needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tapfm.cli.options import INFERENCE_PRECISIONS_HELP, AllowFailures, Compiled, Device, ReadingWorkers
from tapfm.errors import InputError


def predict(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SLIDE|FOLDER|COHORT.csv...", help="Slides, folders of them, or tables.")
    ],
    model: Annotated[
        Path,
        typer.Option("--model", metavar="RUN|EXPORT|ENSEMBLE", help="Folder of a run, an export or an ensemble."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for what comes out, such as predicted.")],
    heatmaps: Annotated[
        bool, typer.Option("--heatmaps", help="Draw maps of each slide, and its telling tiles.")
    ] = False,
    geojson: Annotated[bool, typer.Option("--geojson", help="Write the tiles for QuPath.")] = False,
    tiles: Annotated[
        Path | None,
        typer.Option("--tiles", metavar="DIR", help="What `tapfm tile` wrote.", show_default="laid as in training"),
    ] = None,
    slides: Annotated[
        Path | None, typer.Option("--slides", metavar="DIR", help="Where to look for slides that tables name.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="Of tables only the slides of train, val or test."),
    ] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option(
            "--sensitivity",
            metavar="S",
            help="Call by the threshold that has it on validation.",
            show_default="Youden's threshold",
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", metavar="N|auto", help="Tiles encoded at a time; halved when out of memory.")
    ] = "auto",
    device: Device = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="auto (as in training), " + INFERENCE_PRECISIONS_HELP)
    ] = "auto",
    compiled: Compiled = None,
    workers: ReadingWorkers = None,
    allow_failures: AllowFailures = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is in the folder; add slides or pictures.")
    ] = False,
) -> None:
    """Predict whole slides: probabilities, calls, and what each tile has to do with them.

    \b
    tapfm predict --model runs/first slide.svs --out predicted --heatmaps
    tapfm predict --model runs/first slides/ --out predicted
    tapfm predict --model exported cohort.csv --out predicted --geojson

    All tiles of each slide, read once, in bounded memory. A slide that cannot be
    read costs only itself. Stopped, it goes on with --resume; what is done is
    not done again, also where --heatmaps is added later.

    \b
    predictions.csv                   a line for each slide and target
    failures.csv                      what failed, why, and what to do
    per-slide/ID/tiles.parquet        x, y, attention, weight, contributions
    per-slide/ID/heatmap-*.png, .tif  maps, with their unit; for QuPath too
    per-slide/ID/gallery-*.png        the tiles that say most, for and against
    per-slide/ID/tiles.geojson        for QuPath
    tiles/                            where tiles were laid: look at index.html

    float8 is for GPUs that have it; it is refused where it changes what the model
    says of the first slide by more than 0.01.

    Exit code 3 when more slides failed than may; the others are predicted.
    """
    from tapfm.inference.precision import check_inference_precision
    from tapfm.runs.ensemble import member_folders
    from tapfm.runtime.output_folder import GOES_ON
    from tapfm.runtime.workers import available_cores

    member_folders(model)  # what is no model is told before torch is waited for
    size = batch_of(batch)
    check_inference_precision(precision)
    if sensitivity is not None and not 0 < sensitivity <= 1:
        raise InputError(f"--sensitivity is {sensitivity:g}: it has to be above 0 and at most 1.", hint="Such as 0.9.")
    if out.is_file():
        raise InputError(f"{out} is a file.", hint="Give a folder to --out.")
    for source in sources:
        if not source.exists():
            raise InputError(f"There is no {source}.", hint="Give slides, folders of slides, or COHORT.csv")
    from tapfm.cli.console import terminal
    from tapfm.errors import Interrupted
    from tapfm.prediction.drawing import Wishes
    from tapfm.workflows import predict as predicting

    messages = Console(stderr=True, highlight=False)
    try:
        predicted = predicting.predict(
            model,
            sources,
            out,
            slides=slides,
            tiles=tiles,
            split=split,
            wishes=Wishes(heatmaps, geojson),
            batch=size,
            sensitivity=sensitivity,
            device=device,
            precision=precision,
            compiled=compiled,
            workers=available_cores() if workers is None else workers,
            resume=resume,
            console=messages,
        )
    except (KeyboardInterrupt, Interrupted) as stopped:
        goes_on = GOES_ON.replace("the same command", "the same command with --resume")
        messages.print(f"Stopped. {goes_on}", soft_wrap=True)
        raise typer.Exit(128 + stopped.signal_number if isinstance(stopped, Interrupted) else 130) from None
    predicting.show(predicted, terminal(), messages)
    if len(predicted.failed) > allow_failures:
        raise typer.Exit(3)


def batch_of(text: str) -> int | None:
    """Read a batch; None is auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--batch is '{text}': it is auto, or a number of tiles.", hint="Such as --batch 32.")
    return int(text)
