"""`tapfm embed`: store the features and the raw attention of every tile of a cohort."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.messages import format_command
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import AllowFailures, Compiled, Device, Only, SlidesFolder, Workers

if TYPE_CHECKING:
    from tapfm.inference.embedding_jobs import EmbedRecord
    from tapfm.runtime.cohort_job import SlideTable


@options
class EmbedOptions:
    """Options of `tapfm embed`."""

    cohort: Annotated[
        Path,
        Argument("slide_id,path[,...]; or a folder, or a slide. As for tapfm tile.", metavar="COHORT.csv"),
    ]
    _: KW_ONLY
    encoder: Annotated[str, Option("Key or name of the encoder: tapfm encoders lists them.", metavar="NAME")]
    out: Annotated[Path, Option("Folder for the features, one file per slide.", metavar="DIR")]
    tiles: Annotated[Path, Option("Output folder of tapfm tile, TRIDENT or CLAM.", metavar="DIR")] = Path("tiles")
    weights: Annotated[
        Path | None,
        Option(
            "A weights file, or a folder in the layout of a hub repository.",
            metavar="PATH",
            default="the hub's cache, then the hub",
        ),
    ] = None
    device: Device = "auto"
    precision: Annotated[str, Option("auto (bfloat16 where the GPU has it), float32, bfloat16, float16, float8.")] = (
        "auto"
    )
    batch: Annotated[
        int | None,
        Option(
            "Tiles encoded at a time; halved when out of memory.",
            metavar="N",
            default="by the encoder's size",
            at_least=1,
        ),
    ] = None
    compile: Compiled = None
    slides: SlidesFolder = None
    only: Only = ()
    workers: Workers = None
    allow_failures: AllowFailures = 0
    force: Annotated[
        bool, Option("Embed everything again / keep what has the same settings.", flags="--force/--resume")
    ] = False

    @property
    def tile_command(self) -> str:
        """The command that makes the tiles."""
        slides: tuple[str | Path, ...] = () if self.slides is None else ("--slides", self.slides)
        return format_command("tile", self.cohort, *slides, "--out", self.tiles)

    def check(self) -> None:
        """Refuse folders without tiles, and those that cannot take features."""
        if not (self.tiles / "patches").is_dir():
            raise InputError(
                f"The folder {self.tiles} has no tiles: {self.tiles / 'patches'} does not exist.",
                hint=f"Make them: {self.tile_command}",
            )
        if self.out.is_file():
            raise InputError(f"{self.out} is a file.", hint="Give a folder with --out.")
        if self.out.resolve() == self.tiles.resolve():
            raise InputError(
                f"{self.out} is the folder of the tiles, which has a summary.csv of its own.",
                hint="Give another folder, such as --out features",
            )


@dataclass(frozen=True)
class EmbedResult:
    """The slides that were embedded, and by what."""

    slides: SlideTable[EmbedRecord]
    encoder: str
    feature_size: int
    precision: str


@command_function(EmbedOptions)
def embed(options: EmbedOptions, console: Console) -> EmbedResult:
    """Store features and raw attention of every tile. Slides that failed are in `.slides.failed` of the result."""
    from tapfm.cohort.cohort_table import read_cohort
    from tapfm.encoders.catalog import encoder_card
    from tapfm.inference.precision import check_inference_precision, choose_inference_precision
    from tapfm.runtime.devices import choose_device

    card = encoder_card(options.encoder)
    check_inference_precision(options.precision)
    cohort = read_cohort(options.cohort, options.slides)
    cohort.check_ids(options.only)
    device = choose_device(options.device)

    from tapfm.encoders.weights import load_encoder
    from tapfm.inference.cohort_embedding import embed_cohort
    from tapfm.inference.embedding_jobs import EmbeddingSettings

    precision = choose_inference_precision(options.precision, device)
    loaded = load_encoder(card, weights=options.weights)
    loaded.encoder.to(device)
    table = embed_cohort(
        cohort.rows,
        options.tiles,
        options.out,
        EmbeddingSettings(loaded, precision, options.batch, options.compile),
        tile_command=options.tile_command,
        only=options.only or None,
        workers=count_workers(options.workers),
        force=options.force,
        console=console,
    )
    return EmbedResult(table, loaded.card.name, loaded.encoder.feature_size, precision)
