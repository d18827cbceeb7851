"""`tapfm compare`: compare models on the patients that all of them have predicted."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError, SettingError
from tapfm.runtime.options import Argument, Option, command_function, options
from tapfm.workflows.shared_options import Resamples

if TYPE_CHECKING:
    from tapfm.evaluation.model_comparison import Comparison

_SEED = 0  # of the bootstrap


@options
class CompareOptions:
    """Options of `tapfm compare`."""

    models: Annotated[
        tuple[str, ...],
        Argument(
            "Two or more models, each an output folder of `tapfm evaluate`, a run folder or a CSV of predictions. "
            "NAME= sets the name in the tables.",
            metavar="[NAME=]PATH...",
        ),
    ]
    _: KW_ONLY
    out: Annotated[Path, Option("Output folder for the tables and the plot.", metavar="DIR")]
    unit: Annotated[
        str, Option("Unit of the metrics: slide, or patient (mean probability of the patient's slides).")
    ] = "slide"
    against: Annotated[
        str | None, Option("Compare all models with this one only.", metavar="NAME", show_default="all pairs")
    ] = None
    split: Annotated[str, Option("Split whose predictions are read from run folders: test or val.")] = "test"
    resamples: Resamples = 2000

    def check(self) -> None:
        """Raise InputError for values that are out of range, and for a single model."""
        if self.unit not in ("slide", "patient"):
            raise SettingError(f"--unit must be slide or patient; got '{self.unit}'.")
        if self.resamples < 1:
            raise SettingError(f"--resamples must be at least 1; got {self.resamples}.")
        if len(self.models) < 2:
            raise InputError(
                f"{self.models[0]} is the only model; a comparison needs at least two.",
                hint="For example: tapfm compare runs/first runs/second --out comparison",
            )


@command_function(CompareOptions)
def compare(options: CompareOptions, console: Console) -> Comparison:
    """Compare runs, evaluations or tables of predictions, and write tables and a plot."""
    from tapfm.evaluation.comparison_tables import FILES, write_comparison
    from tapfm.evaluation.model_comparison import compare_models
    from tapfm.runs.compared_predictions import read_compared_predictions
    from tapfm.runtime.output_folder import check_no_other_files, lock_folder, remove_unfinished_files

    read = read_compared_predictions([str(each) for each in options.models], options.split)
    for warning in read.warnings:
        console.print(warning, style="bold yellow", markup=False, soft_wrap=True)
    comparison = compare_models(
        {name: [predictions] for name, predictions in read.predictions.items()},
        read.targets,
        "patient" if options.unit == "patient" else "slide",
        resamples=options.resamples,
        seed=_SEED,
        against=options.against,
    )
    with lock_folder(options.out, "tapfm compare"):
        remove_unfinished_files(options.out)
        check_no_other_files(options.out, allowed=FILES, hint="Choose a new folder with --out.")
        files = {name: str(path) for name, path in read.files.items()}
        write_comparison(options.out, comparison, files, resamples=options.resamples, seed=_SEED, notes=read.warnings)
    return comparison
