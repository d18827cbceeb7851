"""`tapfm evaluate`: metrics of a model on held-out slides, or on another cohort."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import AllowFailures, Device, Resamples, SlidesFolder, Workers

if TYPE_CHECKING:
    from tapfm.workflows.evaluation_run import Evaluation


@options
class EvaluateOptions:
    """Options of `tapfm evaluate`."""

    model: Annotated[Path, Argument("Folder of a run, an export or an ensemble.", metavar="RUN|EXPORT|ENSEMBLE")]
    _: KW_ONLY
    out: Annotated[Path, Option("Output folder, such as evaluations/first.", metavar="DIR")]
    cohort: Annotated[Path | None, Option("Another cohort table.", metavar="CSV", default="the run's own")] = None
    slides: SlidesFolder = None
    tiles: Annotated[Path | None, Option("Output folder of `tapfm tile`.", metavar="DIR", default="the run's")] = None
    features: Annotated[Path | None, Option("Output folder of `tapfm embed`, for method fixed.", metavar="DIR")] = None
    split: Annotated[str | None, Option("test, val, train or all.", default="test; of another cohort: all")] = None
    unit: Annotated[str | None, Option("What counts once: slide or patient.", default="as in training")] = None
    sensitivity: Annotated[
        float, Option("Also report the threshold that reaches it on validation slides.", metavar="S")
    ] = 0.9
    by: Annotated[tuple[str, ...], Option("Subgroups, such as scanner or mpp; repeatable.", metavar="COLUMN")] = ()
    resamples: Resamples = 2000
    colours: Annotated[
        Path | None,
        Option("Keep slide colours here, to share them between evaluations.", metavar="FILE", default="in --out"),
    ] = None
    device: Device = "auto"
    workers: Workers = None
    allow_failures: AllowFailures = 0
    allow_overlap: Annotated[bool, Option("Accept another cohort that has patient_ids of the training slides.")] = False
    resume: Annotated[bool, Option("Resume the evaluation in the folder.")] = False

    def check(self) -> None:
        """Refuse a cohort that is not a file, and a file for the output folder."""
        if self.cohort is not None and not self.cohort.is_file():
            wrong = f"{self.cohort} is a folder." if self.cohort.is_dir() else f"{self.cohort} does not exist."
            raise InputError(wrong, hint="--cohort is a table of slides with labels.")
        if self.out.is_file():
            raise InputError(f"{self.out} is a file.", hint="Give a folder to --out.")


@command_function(EvaluateOptions)
def evaluate(options: EvaluateOptions, console: Console) -> Evaluation:
    """Evaluate a run, an export or an ensemble. Slides that failed are in `.failed` of the result."""
    from tapfm.evaluation.results import parse_evaluation_settings
    from tapfm.runs.ensemble import find_member_folders

    find_member_folders(options.model)
    settings = parse_evaluation_settings(options.unit, options.sensitivity, options.by, options.resamples)

    from tapfm.runs.evaluation_data import EvaluationRequest
    from tapfm.workflows.evaluation_run import run_evaluation

    request = EvaluationRequest(
        options.cohort, options.slides, options.tiles, options.features, options.split, options.allow_overlap
    )
    return run_evaluation(
        options.model,
        request,
        settings,
        options.out,
        device=options.device,
        workers=count_workers(options.workers),
        colours=options.colours,
        resume=options.resume,
        console=console,
    )
