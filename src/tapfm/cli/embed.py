"""The command `embed`. What it needs is imported when it runs, so that help and errors come at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tapfm.cli.options import INFERENCE_PRECISIONS_HELP, AllowFailures, Compiled, Device, ReadingWorkers


def embed(
    cohort: Annotated[
        Path,
        typer.Argument(metavar="COHORT.csv", help="slide_id,path[,...]; or a folder, or a slide. As for tapfm tile."),
    ],
    encoder: Annotated[str, typer.Option("--encoder", metavar="NAME", help="Its key or name: tapfm encoders.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the features, a file per slide.")],
    tiles: Annotated[
        Path, typer.Option("--tiles", metavar="DIR", help="What tapfm tile made; or TRIDENT, or CLAM.")
    ] = Path("tiles"),
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="PATH",
            help="A weights file, or a folder in the shape of a hub repository.",
            show_default="the hub's cache, then the hub",
        ),
    ] = None,
    device: Device = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="auto (bfloat16 where the GPU has it), " + INFERENCE_PRECISIONS_HELP)
    ] = "auto",
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            metavar="N",
            min=1,
            help="Tiles encoded at a time; halved when out of memory.",
            show_default="by the encoder's size",
        ),
    ] = None,
    compiled: Compiled = None,
    slides: Annotated[
        Path | None, typer.Option("--slides", help="Where to look for slides that the table names without their path.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Only this slide; may be repeated.")
    ] = None,
    workers: ReadingWorkers = None,
    allow_failures: AllowFailures = 0,
    force: Annotated[
        bool, typer.Option("--force/--resume", help="Embed everything again / keep what has the same settings.")
    ] = False,
) -> None:
    """Store what an encoder says of every tile: features, and how much it attends to each. Training on them is quick.

    \b
    tapfm embed cohort.csv --encoder uni --out features
    tapfm embed cohort.csv --encoder uni --out features --only case-17
    tapfm embed cohort.csv --encoder uni --tiles 20x_256px_0px_overlap --out f

    The second is for one slide, after mending it; the third takes tiles of
    TRIDENT. A run that was stopped goes on where it was. A slide fails when more
    than 5% of its tiles cannot be read. Exit code 3 when slides failed; the
    others are done.

    \b
    ID.h5          features, raw attention, positions: TRIDENT's layout
    summary.csv    a line for each slide
    failures.csv   what failed, why, and what to do
    """
    import shlex

    from tapfm.cli.console import terminal
    from tapfm.cohort.manifest import read_cohort
    from tapfm.encoders.catalog import encoder_card
    from tapfm.errors import InputError
    from tapfm.inference.precision import check_inference_precision, choose_inference_precision
    from tapfm.runtime.devices import choose_device
    from tapfm.runtime.output_folder import GOES_ON
    from tapfm.runtime.workers import available_cores

    card = encoder_card(encoder)
    check_inference_precision(precision)
    cohort_slides = read_cohort(cohort, slides)
    cohort_slides.check_ids(only or [])
    where = [] if slides is None else ["--slides", str(slides)]
    tile_command = shlex.join(["tapfm", "tile", str(cohort), *where, "--out", str(tiles)])
    if not (tiles / "patches").is_dir():
        raise InputError(
            f"There are no tiles in {tiles}: no folder {tiles / 'patches'}.", hint=f"Make them: {tile_command}"
        )
    if out.is_file():
        raise InputError(f"{out} is a file.", hint="Give a folder to --out.")
    if out.resolve() == tiles.resolve():
        raise InputError(
            f"{out} is the folder of the tiles, which has a summary.csv of its own.", hint="--out features"
        )
    place = choose_device(device)

    from tapfm.encoders.weights import load_encoder
    from tapfm.inference.cohort_embedding import embed_cohort
    from tapfm.inference.embedding_jobs import Settings
    from tapfm.inference.embedding_outcomes import show

    messages = Console(stderr=True, highlight=False)
    computed_in = choose_inference_precision(precision, place)
    try:
        loaded = load_encoder(card, weights=weights)
        loaded.encoder.to(place)
        report = embed_cohort(
            cohort_slides.rows,
            tiles,
            out,
            Settings(loaded, computed_in, batch, compiled),
            tile_command=tile_command,
            only=only or None,
            workers=available_cores() if workers is None else workers,
            force=force,
            console=messages,
        )
    except (KeyboardInterrupt, SystemExit) as stopped:  # SIGTERM comes as the latter
        messages.print(f"Stopped. {GOES_ON}")
        raise typer.Exit(130 if isinstance(stopped, KeyboardInterrupt) else 143) from None
    show(report, terminal())
    if sum(not only or outcome.slide_id in only for outcome in report.failed) > allow_failures:
        raise typer.Exit(3)
