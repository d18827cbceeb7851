"""`tapfm embed`: encode every tile of a cohort, and store its feature and raw attention."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.messages import format_command
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.shared_options import (
    AllowFailures,
    Compile,
    Device,
    Encoding,
    Missing,
    Only,
    SlidesFolder,
    Workers,
    print_table_notes,
    read_table_options,
)

if TYPE_CHECKING:
    from tapfm.inference.embedding_jobs import EmbeddingRecord
    from tapfm.runtime.cohort_job import SlideTable


@options
class EmbedOptions:
    """Options of `tapfm embed`."""

    cohort: Annotated[
        Path,
        Argument("Cohort table, folder of slides or single slide: the same as for `tapfm tile`.", metavar="COHORT.csv"),
    ]
    _: KW_ONLY
    encoder: Annotated[str, Option("Encoder to use, from `tapfm encoders`.", metavar="NAME")]
    out: Annotated[Path, Option("Output folder for the features, one file per slide.", metavar="DIR")]
    tiles: Annotated[
        Path, Option("Folder with the tile coordinates: output folder of `tapfm tile`, TRIDENT or CLAM.", metavar="DIR")
    ] = Path("tiles")
    weights: Annotated[
        Path | None,
        Option(
            "Weights file of the encoder, or a folder with the files of its Hugging Face repository.",
            metavar="PATH",
            show_default="from the tapfm package or the Hugging Face cache, else downloaded",
        ),
    ] = None
    device: Device = "auto"
    precision: Annotated[
        str,
        Option(
            "Precision of the encoder: auto (bfloat16 if the GPU supports it, else float16; float32 on a CPU), "
            "float32, bfloat16, float16 or float8."
        ),
    ] = "auto"
    batch: Annotated[
        int | None,
        Option(
            "Number of tiles per batch. It is halved if the device runs out of memory.",
            metavar="N",
            show_default="depends on the size of the encoder",
            at_least=1,
        ),
    ] = None
    compile: Compile = None
    slides: SlidesFolder = None
    encoding: Encoding = None
    missing: Missing = ()
    only: Only = ()
    workers: Workers = None
    allow_failures: AllowFailures = 0
    force: Annotated[
        bool, Option("Encode all slides again, or keep those with the same settings.", flag="--force/--resume")
    ] = False

    @property
    def tile_command(self) -> str:
        """Command that creates the tiles."""
        given: list[str | Path] = [] if self.slides is None else ["--slides", self.slides]
        given += [] if self.encoding is None else ["--encoding", self.encoding]
        given += [part for value in self.missing for part in ("--missing", value)]
        return format_command("tile", self.cohort, *given, "--out", self.tiles)

    def check(self) -> None:
        """Raise InputError if there are no tiles, or if the output folder cannot be used."""
        if not (self.tiles / "patches").is_dir():
            raise InputError(
                f"There are no tiles in {self.tiles}: {self.tiles / 'patches'} does not exist.",
                hint=f"Create them: {self.tile_command}. Or choose another folder with --tiles.",
            )
        if self.out.is_file():
            raise InputError(f"{self.out} is a file, not a folder.", hint="Choose another folder with --out.")
        if self.out.resolve() == self.tiles.resolve():
            raise InputError(
                f"--out and --tiles are the same folder, {self.out}, but both need their own summary.csv.",
                hint="Choose another folder, for example: --out features",
            )


@dataclass(frozen=True)
class EmbedResult:
    """Embedded slides, and the encoder that was used."""

    slides: SlideTable[EmbeddingRecord]
    encoder: str
    feature_size: int
    precision: str


@command_function(EmbedOptions)
def embed(options: EmbedOptions, console: Console) -> EmbedResult:
    """Store the feature and raw attention of every tile. Failed slides are in `.slides.failed` of the result."""
    from tapfm.cohort.cohort_table import read_cohort
    from tapfm.encoders.catalog import find_encoder_card
    from tapfm.inference.precision import check_inference_precision, choose_inference_precision
    from tapfm.runtime.devices import choose_device

    card = find_encoder_card(options.encoder)
    check_inference_precision(options.precision)
    cohort = read_cohort(options.cohort, read_table_options(options))
    cohort.check_ids(options.only)
    print_table_notes(console, cohort.reading_notes, ())
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
        workers=choose_worker_count(options.workers),
        force=options.force,
        console=console,
    )
    return EmbedResult(table, loaded.card.name, loaded.encoder.feature_size, precision)
