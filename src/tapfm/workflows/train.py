"""`tapfm train`: train a model, and write a run folder with the weights of the best epoch; or do so for each fold."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Option, command_function, options
from tapfm.runtime.workers import choose_worker_count
from tapfm.workflows.run_file import Overrides, RunFile, read_run_config

if TYPE_CHECKING:
    from tapfm.adaptation.training_run import TrainingResult
    from tapfm.workflows.cross_validation import CrossValidation


@options
class TrainOptions:
    """Options of `tapfm train`."""

    run: RunFile
    _: KW_ONLY
    out: Annotated[Path, Option("New run folder, such as runs/first.", metavar="DIR")]
    set: Overrides = ()
    folds: Annotated[
        int | None,
        Option(
            "Cross-validation: train a model for each of K folds, and evaluate them out of fold. The folds are the "
            "columns fold_0, fold_1, ... of the cohort table. If there are none, folds are created by patient.",
            metavar="K",
            at_least=2,
        ),
    ] = None
    resume: Annotated[bool, Option("Resume the run in --out, or start it if there is none.")] = False
    device: Annotated[
        str | None,
        Option(
            "Device to train on: auto (the GPU if there is one), cpu, cuda, or cuda:1 for the second GPU.",
            show_default="as in RUN.toml, else auto",
        ),
    ] = None
    workers: Annotated[
        int | None,
        Option(
            "Number of worker processes that read tiles. 0: read them in the main process.",
            metavar="N",
            show_default="as in RUN.toml, else one per CPU core",
            at_least=0,
        ),
    ] = None
    unit: Annotated[
        str | None,
        Option(
            "Unit of the AUC: slide, or patient (mean probability of the patient's slides).",
            show_default="as in RUN.toml, else slide",
        ),
    ] = None
    allow_failures: Annotated[
        int | None,
        Option(
            "Number of slides that may fail before the run stops with exit code 3.",
            metavar="N",
            show_default="as in RUN.toml, else 0",
            at_least=0,
        ),
    ] = None

    def check(self) -> None:
        """Raise InputError if the run folder is a file, or if options contradict each other."""
        if self.out.is_file():
            raise InputError(f"{self.out} is a file, not a folder.", hint="Choose another folder with --out.")
        if self.folds is not None and any(each.partition("=")[0].strip() == "cohort.fold" for each in self.set):
            raise InputError(
                "--folds and --set cohort.fold cannot be combined.",
                hint="--folds trains every fold. To train a single fold, remove --folds.",
            )

    @property
    def overrides(self) -> list[str]:
        """All options that override settings of RUN.toml, as `key=value`."""
        machine = {"device": self.device, "workers": self.workers, "allow_failures": self.allow_failures}
        given = [f"machine.{name}={value}" for name, value in machine.items() if value is not None]
        return [*self.set, *given, *([f"selection.unit={self.unit}"] if self.unit is not None else [])]


@command_function(TrainOptions)
def train(options: TrainOptions, console: Console) -> TrainingResult | CrossValidation:
    """Train a model, save the weights of the best epoch, and predict the validation and test slides.

    `run` may be a `RunConfig` from `tapfm.configure`. Failed slides are in `.failed` of the result. After Ctrl-C, the
    run is saved and can be resumed. With `folds`, a model is trained for each fold, and the result has the metrics of
    each fold in `.folds`, and of their out-of-fold predictions in `.auc`.
    """
    config = read_run_config(options.run, options.overrides)
    if options.folds is not None:
        from tapfm.workflows.cross_validation import cross_validate

        return cross_validate(config, options.folds, options.out, resume=options.resume, console=console)

    from tapfm.runs.data import read_run_data

    data = read_run_data(config)

    from tapfm.adaptation.training_run import run_training

    workers = config.machine.workers
    return run_training(
        config,
        data,
        options.out,
        resume=options.resume,
        workers=choose_worker_count(None if workers == "auto" else workers),
        console=console,
    )
