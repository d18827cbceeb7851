"""`tapfm predict`: predict slides, compute the contribution of each tile, and draw heatmaps."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.shared_options import (
    AllowFailures,
    Compile,
    Device,
    Encoding,
    PatientColumn,
    SlidesFolder,
    Workers,
    read_table_options,
)

if TYPE_CHECKING:
    from tapfm.prediction.cohort_prediction import Predictions


@options
class PredictOptions:
    """Options of `tapfm predict`."""

    sources: Annotated[
        tuple[Path, ...],
        Argument(
            "Slides to predict: slide files, folders of slides or cohort tables.", metavar="SLIDE|FOLDER|COHORT.csv..."
        ),
    ]
    _: KW_ONLY
    model: Annotated[Path, Option("Model: folder of a run, an export or an ensemble.", metavar="MODEL")]
    out: Annotated[Path, Option("Output folder, for example 'predicted'.", metavar="DIR")]
    heatmaps: Annotated[
        bool, Option("Also draw heatmaps of each slide, and galleries of the tiles with the highest and lowest values.")
    ] = False
    geojson: Annotated[bool, Option("Also write the tiles of each slide as GeoJSON, for QuPath.")] = False
    tiles: Annotated[
        Path | None,
        Option(
            "Use the tiles in this output folder of `tapfm tile`.",
            metavar="DIR",
            show_default="tile the slides with the settings of the training tiles",
        ),
    ] = None
    mpp: Annotated[
        float | None,
        Option(
            "Microns per pixel of the slides without a usable scale, neither in the column mpp of the cohort table nor "
            "in the file. Slides with a scale keep it.",
            metavar="MPP",
        ),
    ] = None
    slides: SlidesFolder = None
    patient_column: PatientColumn = None
    encoding: Encoding = None
    split: Annotated[
        str | None,
        Option("Predict only the slides of this split of the cohort tables: train, val or test.", metavar="NAME"),
    ] = None
    sensitivity: Annotated[
        float | None,
        Option(
            "Choose the call threshold that reaches this sensitivity (0 to 1) on the validation slides. A slide is "
            "called positive if its probability is at least the threshold.",
            metavar="S",
            show_default="the threshold with the highest Youden index",
        ),
    ] = None
    batch: Annotated[
        str | int,
        Option("Number of tiles per batch. It is halved if the device runs out of memory.", metavar="N|auto"),
    ] = "auto"
    device: Device = "auto"
    precision: Annotated[
        str,
        Option(
            "Precision of the encoder: auto (as in training; for an export, as in `tapfm embed`), float32, bfloat16, "
            "float16 or float8."
        ),
    ] = "auto"
    compile: Compile = None
    workers: Workers = None
    allow_failures: AllowFailures = 0
    resume: Annotated[bool, Option("Resume the predictions in --out, or add slides, heatmaps or GeoJSON to them.")] = (
        False
    )

    @property
    def batch_size(self) -> int | None:
        """Number of tiles per batch; None is auto."""
        if self.batch == "auto":
            return None
        text = str(self.batch)
        if not text.isdecimal() or int(text) < 1:
            raise InputError(
                f"--batch must be auto or a positive number of tiles; got '{text}'.", hint="For example: --batch 32"
            )
        return int(text)

    def check(self) -> None:
        """Raise InputError for values out of range, missing slides, or if the output folder is a file."""
        _ = self.batch_size
        if self.mpp is not None:
            from tapfm.slides.scale import check_mpp_option

            check_mpp_option(self.mpp)
        if self.sensitivity is not None and not 0 < self.sensitivity <= 1:
            raise InputError(
                f"--sensitivity must be above 0 and at most 1; got {self.sensitivity:g}.",
                hint="For example: --sensitivity 0.9",
            )
        if self.out.is_file():
            raise InputError(f"{self.out} is a file, not a folder.", hint="Choose another folder with --out.")
        for source in self.sources:
            if not source.exists():
                raise InputError(
                    f"{source} does not exist.", hint="Give slides, folders of slides, or cohort tables (CSV)."
                )


@command_function(PredictOptions)
def predict(options: PredictOptions, console: Console) -> Predictions:
    """Predict slides. Failed slides are in `.failed` of the result. After Ctrl-C, finished slides are saved."""
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
        table_options=read_table_options(options),
        tiles=options.tiles,
        mpp=options.mpp,
        split=options.split,
        outputs=OutputOptions(heatmaps=options.heatmaps, geojson=options.geojson),
        batch=options.batch_size,
        sensitivity=options.sensitivity,
        device=options.device,
        precision=options.precision,
        compiled=options.compile,
        workers=choose_worker_count(options.workers),
        resume=options.resume,
        console=console,
    )
