"""`tapfm predict`: probabilities of slides, the score of each tile, and heatmaps."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import AllowFailures, Compiled, Device, SlidesFolder, Workers

if TYPE_CHECKING:
    from tapfm.prediction.cohort_prediction import Predictions


@options
class PredictOptions:
    """Options of `tapfm predict`."""

    sources: Annotated[
        tuple[Path, ...],
        Argument("Slides, folders of slides, or cohort tables.", metavar="SLIDE|FOLDER|COHORT.csv..."),
    ]
    _: KW_ONLY
    model: Annotated[Path, Option("Folder of a run, an export or an ensemble.", metavar="MODEL")]
    out: Annotated[Path, Option("Output folder, such as predicted.", metavar="DIR")]
    heatmaps: Annotated[bool, Option("Draw heatmaps of each slide, and its most influential tiles.")] = False
    geojson: Annotated[bool, Option("Write the tiles for QuPath.")] = False
    tiles: Annotated[
        Path | None,
        Option("Output folder of `tapfm tile`.", metavar="DIR", default="slides are tiled as in training"),
    ] = None
    slides: SlidesFolder = None
    split: Annotated[str | None, Option("Of cohort tables only the slides of train, val or test.", metavar="NAME")] = (
        None
    )
    sensitivity: Annotated[
        float | None,
        Option(
            "Call slides positive by the threshold that reaches it on validation slides.",
            metavar="S",
            default="Youden's threshold",
        ),
    ] = None
    batch: Annotated[str | int, Option("Tiles encoded at a time; halved when out of memory.", metavar="N|auto")] = (
        "auto"
    )
    device: Device = "auto"
    precision: Annotated[str, Option("auto (as in training), float32, bfloat16, float16, float8.")] = "auto"
    compile: Compiled = None
    workers: Workers = None
    allow_failures: AllowFailures = 0
    resume: Annotated[bool, Option("Resume the predictions in the folder; add slides or pictures.")] = False

    @property
    def batch_size(self) -> int | None:
        """Tiles encoded at a time; None is auto."""
        if self.batch == "auto":
            return None
        text = str(self.batch)
        if not text.isdecimal() or int(text) < 1:
            raise InputError(f"--batch is '{text}': it is auto, or a number of tiles.", hint="Such as --batch 32.")
        return int(text)

    def check(self) -> None:
        """Refuse values outside their range, files for folders, and slides that do not exist."""
        _ = self.batch_size
        if self.sensitivity is not None and not 0 < self.sensitivity <= 1:
            raise InputError(
                f"--sensitivity is {self.sensitivity:g}: it has to be above 0 and at most 1.", hint="Such as 0.9."
            )
        if self.out.is_file():
            raise InputError(f"{self.out} is a file.", hint="Give a folder to --out.")
        for source in self.sources:
            if not source.exists():
                raise InputError(f"{source} does not exist.", hint="Give slides, folders of slides, or COHORT.csv")


@command_function(PredictOptions)
def predict(options: PredictOptions, console: Console) -> Predictions:
    """Predict whole slides. Slides that failed are in `.failed` of the result. Ctrl-C keeps what is finished."""
    from tapfm.inference.precision import check_inference_precision
    from tapfm.runs.ensemble import find_member_folders

    find_member_folders(options.model)
    check_inference_precision(options.precision)

    from tapfm.prediction.cohort_prediction import predict_slides
    from tapfm.prediction.drawing import OutputOptions

    return predict_slides(
        options.model,
        options.sources,
        options.out,
        slides=options.slides,
        tiles=options.tiles,
        split=options.split,
        outputs=OutputOptions(heatmaps=options.heatmaps, geojson=options.geojson),
        batch=options.batch_size,
        sensitivity=options.sensitivity,
        device=options.device,
        precision=options.precision,
        compiled=options.compile,
        workers=count_workers(options.workers),
        resume=options.resume,
        console=console,
    )
