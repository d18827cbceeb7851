"""The command `tapfm`. Nothing here, nor what it imports at the top, imports torch: help and errors come at once."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tapfm.cli.bench import bench
from tapfm.cli.console import terminal
from tapfm.cli.demo import demo
from tapfm.cli.embed import embed
from tapfm.cli.evaluation import compare, evaluate
from tapfm.cli.options import AllowFailures
from tapfm.cli.plan import plan
from tapfm.cli.predict import predict
from tapfm.cli.report import report
from tapfm.cli.split import split
from tapfm.cli.study import probe, study
from tapfm.cli.training import config, export, train
from tapfm.cli.view import view
from tapfm.errors import InputError, TapfmError
from tapfm.runtime.commands import follow_parent
from tapfm.runtime.workers import available_cores
from tapfm.version import __version__

app = typer.Typer(
    name="tapfm",
    help="Adapt a pathology foundation model to your task from slide labels, on one GPU.",
    epilog="First time here? tapfm demo shows all of it in minutes; tapfm doctor says what this machine can do.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    """Print the version and stop."""
    if asked:
        typer.echo(f"tapfm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Adapt a pathology foundation model to your task from slide labels, on one GPU."""


WHERE_SLIDES_ARE = "Where to look for slides that a table names without their path, or that moved."
SOURCES = "Slides, folders of slides (searched below, a folder of DICOM files is one slide), or cohort tables."


@app.command()
def inspect(
    sources: Annotated[list[Path], typer.Argument(metavar="SLIDE|FOLDER|COHORT.csv...", help=SOURCES)],
    slides: Annotated[
        Path | None,
        typer.Option("--slides", help=WHERE_SLIDES_ARE),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    cohort: Annotated[
        Path | None,
        typer.Option("--write-cohort", metavar="CSV", help="Write a table of these slides, with a column mpp to fill."),
    ] = None,
) -> None:
    """Say what each slide is, at which scale, and what would be a problem with it. Nothing is changed.

    \b
    tapfm inspect slide.svs
    tapfm inspect slides/ --write-cohort cohort.csv
    tapfm inspect cohort.csv --json

    Exit code 3 when a slide has a problem, so that it could not be tiled.
    """
    from tapfm.cohort import inspection as inspect_slides
    from tapfm.cohort.manifest import TABLE_SUFFIXES

    if cohort is not None and cohort.exists():
        raise InputError(f"{cohort} is there already.", hint="Give another name to --write-cohort, or remove it first.")
    if cohort is not None and (tables := [source for source in sources if source.suffix.lower() in TABLE_SUFFIXES]):
        raise InputError(f"{tables[0]} is a table already.", hint="--write-cohort makes one of slides and folders.")
    rows = inspect_slides.collect(sources, slides)
    inspections = inspect_slides.inspect_all(rows, available_cores(), Console(stderr=True))
    inspect_slides.show(inspections, terminal(), as_json=as_json)
    if cohort is not None:
        inspect_slides.write_cohort(rows, cohort)
        Console(stderr=True, highlight=False).print(
            f"Written: {cohort}. Next: tapfm tile {cohort} --out tiles", markup=False
        )
    if any(inspection.problem for inspection in inspections):
        raise typer.Exit(3)


@app.command()
def tile(
    cohort: Annotated[
        Path,
        typer.Argument(metavar="COHORT.csv", help="slide_id,path[,patient_id][,mpp][,...]; or a folder, or a slide."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tiles, overlays and tables.")],
    size: Annotated[int, typer.Option("--size", help="Side of a tile in pixels, as the encoder takes it.")] = 224,
    mpp: Annotated[float, typer.Option("--mpp", help="Microns per pixel of the tiles; 0.5 is 20x.")] = 0.5,
    overlap: Annotated[int, typer.Option("--overlap", help="Pixels that neighbouring tiles share.")] = 0,
    min_tissue: Annotated[
        float, typer.Option("--min-tissue", help="Part of a tile that has to be tissue, above 0 to 1.")
    ] = 0.25,
    tissue: Annotated[
        str,
        typer.Option(
            "--tissue",
            help="How tissue is found: otsu (colour, as in the paper), darkness (pale stains), texture (unstained).",
        ),
    ] = "otsu",
    tissue_mask: Annotated[
        Path | None,
        typer.Option(
            "--tissue-mask",
            help="Tissue drawn by a person: a folder with ID.geojson or ID.png (white on tissue), or one slide's file.",
        ),
    ] = None,
    keep_pen: Annotated[bool, typer.Option("--keep-pen", help="Do not leave out tiles with pen marks.")] = False,
    keep_blur: Annotated[
        bool, typer.Option("--keep-blur", help="Do not leave out tiles that are out of focus.")
    ] = False,
    layout: Annotated[
        str, typer.Option("--layout", help="Whose HDF5 layout to write: trident or clam. Both are read.")
    ] = "trident",
    slides: Annotated[
        Path | None,
        typer.Option("--slides", help=WHERE_SLIDES_ARE),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Only this slide; may be repeated.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes side by side.", show_default="one for each core")
    ] = None,
    allow_failures: AllowFailures = 0,
    force: Annotated[
        bool, typer.Option("--force/--resume", help="Tile everything again / keep what has the same settings.")
    ] = False,
) -> None:
    """Find the tissue of each slide and lay a grid of tiles on it, all at the same microns per pixel.

    \b
    tapfm tile cohort.csv --out tiles
    tapfm tile cohort.csv --out tiles --only case-17   one slide, after mending it
    tapfm tile slides/ --out tiles                     a folder, without a table

    A run that was stopped goes on where it was. Exit code 3 when slides failed; the others are done.

    \b
    patches/ID_patches.h5   positions of the tiles
    overlays/ID.png         tissue, tiles, what was left out
    tissue/ID.geojson       for QuPath; corrected, give it to --tissue-mask
    index.html              all overlays on a page
    summary.csv             a line for each slide
    failures.csv            what failed, why, and what to do
    """
    from tapfm.cohort.manifest import read_cohort
    from tapfm.errors import UnknownNameError
    from tapfm.runtime.output_folder import GOES_ON
    from tapfm.tiles import cohort_tiling as tile_slides
    from tapfm.tiles.grid import TileSpec
    from tapfm.tiles.store import LAYOUTS

    spec = TileSpec(size, mpp, overlap, min_tissue, tissue, not keep_pen, not keep_blur)
    chosen = next((each for each in LAYOUTS if each == layout), None)
    if chosen is None:
        raise UnknownNameError.of("layout", layout, LAYOUTS, see=", ".join(LAYOUTS))
    check_workers(workers)
    if tissue_mask is not None and not tissue_mask.exists():
        raise InputError(f"There is no {tissue_mask}.", hint="--tissue-mask is a folder, or a file for one slide.")
    if out.is_file():
        raise InputError(f"{out} is a file.", hint="Give a folder to --out.")
    slides_of = read_cohort(cohort, slides)
    slides_of.check_ids(only or [])
    messages = Console(stderr=True, highlight=False)
    try:
        report = tile_slides.tile_cohort(
            slides_of.rows,
            out,
            spec,
            only=only or None,
            layout=chosen,
            tissue=tissue_mask,
            workers=workers or available_cores(),
            force=force,
            console=messages,
        )
    except KeyboardInterrupt:
        messages.print(f"Stopped. {GOES_ON}")
        raise typer.Exit(130) from None
    tile_slides.show(report, terminal())
    if sum(not only or outcome.slide_id in only for outcome in report.failed) > allow_failures:
        raise typer.Exit(3)


def check_workers(workers: int | None) -> None:
    """Refuse to work with nobody."""
    if workers is not None and workers < 1:
        raise InputError(f"--workers is {workers}: it has to be at least 1.", hint="Leave it out for one per core.")


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for slides, tables and truth.")],
    slides: Annotated[int, typer.Option("--slides", help="Slides of the development cohort.")] = 60,
    external: Annotated[
        int, typer.Option("--external", help="Slides of the external cohort: other sites, another scanner.")
    ] = 30,
    task: Annotated[
        str, typer.Option("--task", help="fgfr3 (one target) or luad4 (EGFR, KRAS, MET, ALK at once).")
    ] = "fgfr3",
    difficulty: Annotated[
        str,
        typer.Option(
            "--difficulty",
            help="easy, medium or hard: how many tiles show the signal, how clearly, and how much resembles it.",
        ),
    ] = "medium",
    prevalence: Annotated[
        list[str] | None,
        typer.Option(
            "--prevalence",
            metavar="P|TARGET=P",
            help="Share of positive slides, for all targets or one; may be repeated.",
            show_default="as in the paper",
        ),
    ] = None,
    fractions: Annotated[
        tuple[float, float, float],
        typer.Option("--fractions", metavar="TRAIN VAL TEST", help="How the development cohort is split."),
    ] = (0.8, 0.1, 0.1),
    tiles: Annotated[int, typer.Option("--tiles", help="Tiles of tissue on a slide, about.")] = 80,
    seed: Annotated[int, typer.Option("--seed", help="The same seed paints the same cohort.")] = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes side by side.", show_default="one for each core")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force/--resume", help="Paint everything again / keep slides that are painted.")
    ] = False,
) -> None:
    """Paint a cohort of H&E slides with a planted signal, to try everything without slides of your own.

    \b
    tapfm synth painted
    tapfm synth painted --slides 12 --external 6 --prevalence 0.4   a small one, in a minute
    tapfm synth lung --task luad4 --difficulty easy

    Some nests of a positive slide have nuclei of another size and chromatin. Colour, tissue, site and
    scanner are drawn without looking at the label, and differ in the external cohort. Which tiles
    carry the signal is written beside the slides. A run that was stopped goes on where it was.

    \b
    cohort.csv, external.csv   slides, patients, splits, labels
    slides/, external/         SVS files, 30% of them 40x
    contact-sheet.jpg          all slides at a glance
    truth/                     compartments, foci, tiles.csv
    """
    from tapfm.runtime.output_folder import GOES_ON
    from tapfm.synthetic import cohort_painting as synthesize

    spec = synthesize.cohort_spec(slides, external, task, difficulty, prevalence or [], fractions, tiles, seed)
    check_workers(workers)
    messages = Console(stderr=True, highlight=False)
    try:
        planned = synthesize.synthesise(spec, out, workers=workers or available_cores(), force=force, console=messages)
    except KeyboardInterrupt:
        messages.print(f"Stopped. {GOES_ON}")
        raise typer.Exit(130) from None
    synthesize.show(spec, planned, out, terminal())


app.command()(demo)
app.command()(split)
app.command()(embed)
app.command()(config)
app.command()(plan)
app.command()(train)
app.command()(evaluate)
app.command()(compare)
app.command()(study)
app.command(hidden=True)(probe)  # a step of `study`, for those who want it alone
app.command()(export)
app.command()(predict)
app.command()(report)
app.command()(view)
app.command()(bench)


@app.command()
def encoders(
    name: Annotated[
        str | None,
        typer.Argument(help="One encoder, in full: its key or name ('uni', 'Virchow2'), or timm:<architecture>."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Load the weights (cache, then hub, or --weights), verify them, encode a tile."),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="With --check: a weights file, or a folder in the shape of a hub repository."),
    ] = None,
) -> None:
    """List the foundation models tapfm can adapt, or show one.

    \b
    tapfm encoders               the catalogue
    tapfm encoders uni           one card: architecture, pixels, licence, weights
    tapfm encoders uni --check   can it be loaded here? (if gated: how to get access)
    tapfm encoders uni --check --weights pytorch_model.bin
    """
    from tapfm.cli import encoder_cards as encoder_views
    from tapfm.encoders.catalog import encoder_card, encoder_cards

    if name is None:
        if check or weights is not None:
            raise InputError("--check needs the name of an encoder.", hint="For example: tapfm encoders uni --check")
        encoder_views.show_table(encoder_cards().values(), terminal(), as_json=as_json)
        return
    if weights is not None and not check:
        raise InputError(
            "--weights is used by --check.", hint=f"Type: tapfm encoders {name} --check --weights {weights}"
        )
    card = encoder_card(name)
    if check:
        encoder_views.check_encoder(card, weights, terminal(), as_json=as_json)
    else:
        encoder_views.show_card(card, terminal(), as_json=as_json)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the hub which gated encoders open.")] = False,
) -> None:
    """Say what this machine can do, and what to do about what it cannot.

    Python and packages, GPU and memory, hub token and the gated encoders it opens, cached weights with their SHA-256,
    OpenSlide, free disk. Exit code 1 when something needed is broken.
    """
    from tapfm.workflows import doctor as examination

    findings = examination.examine(offline=offline, progress=Console(stderr=True))
    examination.show(findings, terminal(), as_json=as_json)
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; errors of ours are one message and a hint, not a traceback."""
    follow_parent()
    # what schedulers send before they kill: ended like Ctrl-C, so that tables are saved
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except TapfmError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("error:", style="bold red", end=" ")
        console.print(error.message, markup=False)
        if error.hint:
            console.print(error.hint, markup=False)
        sys.exit(error.exit_code)
