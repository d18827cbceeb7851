"""`tapfm evaluate`: compute the metrics of a model on held-out slides, or on another cohort."""

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
    Clini,
    Device,
    Encoding,
    Missing,
    Negative,
    PatientColumn,
    Resamples,
    SlidesArePatients,
    SlidesFolder,
    Workers,
    read_table_options,
)

if TYPE_CHECKING:
    from tapfm.workflows.evaluation_run import Evaluation


@options
class EvaluateOptions:
    """Options of `tapfm evaluate`."""

    model: Annotated[Path, Argument("Model: folder of a run, an export or an ensemble.", metavar="RUN|EXPORT|ENSEMBLE")]
    _: KW_ONLY
    out: Annotated[Path, Option("Output folder, such as evaluations/first.", metavar="DIR")]
    cohort: Annotated[
        Path | None,
        Option("Evaluate on this cohort table, with labels.", metavar="CSV", show_default="the cohort of the run"),
    ] = None
    positive: Annotated[
        tuple[str, ...],
        Option(
            "Positive class of a target in --cohort, if its labels are neither those of training nor 0 and 1. "
            "Repeatable.",
            metavar="NAME=VALUE",
        ),
    ] = ()
    negative: Negative = ()
    patient_column: PatientColumn = None
    slides_are_patients: SlidesArePatients = False
    missing: Missing = ()
    encoding: Encoding = None
    clini: Clini = None
    slides: SlidesFolder = None
    tiles: Annotated[
        Path | None,
        Option(
            "Output folder of `tapfm tile` for the evaluated slides.",
            metavar="DIR",
            show_default="as in the run; none with --cohort",
        ),
    ] = None
    features: Annotated[
        Path | None,
        Option(
            "Output folder of `tapfm embed` for the evaluated slides, for models of method fixed.",
            metavar="DIR",
            show_default="as in the run; none with --cohort or --tiles",
        ),
    ] = None
    split: Annotated[
        str | None,
        Option("Split to evaluate: test, val, train or all.", show_default="test; with --cohort all"),
    ] = None
    unit: Annotated[
        str | None,
        Option(
            "Unit of the metrics: slide, or patient (mean probability of the patient's slides).",
            show_default="as in training; slide for an export",
        ),
    ] = None
    sensitivity: Annotated[
        float,
        Option(
            "Also report the threshold that reaches this sensitivity (0 to 1) on the validation slides.",
            metavar="S",
        ),
    ] = 0.9
    by: Annotated[
        tuple[str, ...],
        Option(
            "Also report metrics of the subgroups in this column of the table, such as scanner. Repeatable.",
            metavar="COLUMN",
        ),
    ] = ()
    resamples: Resamples = 2000
    colours: Annotated[
        Path | None,
        Option(
            "File with the slide colours for the colour baseline. Several evaluations can share it to save time.",
            metavar="FILE",
            show_default="colours.csv in --out",
        ),
    ] = None
    device: Device = "auto"
    workers: Workers = None
    allow_failures: AllowFailures = 0
    allow_overlap: Annotated[
        bool, Option("Evaluate even if some of the evaluated patients are also in training or validation.")
    ] = False
    resume: Annotated[
        bool, Option("Resume the evaluation in --out, or compute its metrics again from the stored predictions.")
    ] = False

    def check(self) -> None:
        """Raise InputError if the cohort is not a file, or the output folder is one."""
        if self.cohort is not None and not self.cohort.is_file():
            problem = "is a folder" if self.cohort.is_dir() else "does not exist"
            raise InputError(
                f"{self.cohort} {problem}.", hint="--cohort needs a CSV file with the slides and their labels."
            )
        table_options = ("positive", "patient_column", "slides_are_patients", "missing", "encoding", "clini")
        if self.cohort is None and (given := [name for name in table_options if getattr(self, name)]):
            raise InputError(
                f"--{given[0].replace('_', '-')} needs another cohort; that of the run is read as in training.",
                hint="Pass it too: --cohort EXTERNAL.csv",
            )
        if self.out.is_file():
            raise InputError(f"{self.out} is a file, not a folder.", hint="Choose another folder with --out.")


@command_function(EvaluateOptions)
def evaluate(options: EvaluateOptions, console: Console) -> Evaluation:
    """Evaluate a run, an export or an ensemble. Failed slides are in `.failed` of the result."""
    from tapfm.evaluation.model_evaluation import parse_evaluation_settings
    from tapfm.runs.ensemble import find_member_folders

    find_member_folders(options.model)
    settings = parse_evaluation_settings(options.unit, options.sensitivity, options.by, options.resamples)

    from tapfm.runs.evaluation_data import EvaluationRequest
    from tapfm.tasks.label_columns import parse_class_options
    from tapfm.workflows.evaluation_run import run_evaluation

    request = EvaluationRequest(
        options.cohort,
        read_table_options(options),
        parse_class_options((), options.positive, options.negative).texts,
        options.tiles,
        options.features,
        options.split,
        options.allow_overlap,
        options.unit,
        options.by,
    )
    return run_evaluation(
        options.model,
        request,
        settings,
        options.out,
        device=options.device,
        workers=choose_worker_count(options.workers),
        colours=options.colours,
        resume=options.resume,
        console=console,
    )
