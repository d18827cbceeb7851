"""`tapfm split`: split a cohort by patient into training, validation and test."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Argument, Option, options, verb
from tapfm.runtime.workers import count_workers
from tapfm.workflows.shared_options import SlidesFolder

if TYPE_CHECKING:
    from tapfm.cohort.splitting import CohortSplit

_FRACTIONS = (0.8, 0.1, 0.1)


@options
class SplitOptions:
    """Options of `tapfm split`."""

    cohort: Annotated[Path, Argument("A table with slides, patients and labels (0, 1 or empty).", metavar="COHORT.csv")]
    _: KW_ONLY
    out: Annotated[Path, Option("The table to write, with splits.", metavar="SPLIT.csv")]
    targets: Annotated[
        tuple[str, ...],
        Option("Label column to balance; repeatable.", metavar="NAME", default="all that hold both 0 and 1"),
    ] = ()
    fractions: Annotated[
        tuple[float, float, float] | None,
        Option(
            "Share of the patients in each split.",
            metavar="TRAIN VAL TEST",
            default=" ".join(map(str, _FRACTIONS)),
        ),
    ] = None
    folds: Annotated[int | None, Option("Columns fold_0 to fold_K-1 instead of one split; 3 to 20.", metavar="K")] = (
        None
    )
    seed: Annotated[int, Option("The same seed makes the same splits.")] = 0
    slides: SlidesFolder = None
    force: Annotated[bool, Option("Replace splits that the table has, and SPLIT.csv if it exists.")] = False

    def check(self) -> None:
        """Refuse options that do not go together."""
        if self.folds is not None and self.fractions is not None:
            raise InputError(
                "--folds and --fractions were both given.", hint="Folds have equal sizes: leave --fractions out."
            )


@verb(SplitOptions)
def split(options: SplitOptions, console: Console) -> CohortSplit:
    """Split a cohort by patient, balanced in labels and scan resolution, and write the table with its splits."""
    from tapfm.cohort.splitting import split_cohort

    return split_cohort(
        options.cohort,
        options.out,
        slides_folder=options.slides,
        targets=options.targets or None,
        fractions=options.fractions or _FRACTIONS,
        folds=options.folds,
        seed=options.seed,
        force=options.force,
        workers=count_workers(None),
        console=console,
    )
