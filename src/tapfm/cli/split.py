"""Commands about cohorts. What they need is imported when they run, so that help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def split(
    cohort: Annotated[
        Path, typer.Argument(metavar="COHORT.csv", help="A table with slides, patients and labels (0, 1 or empty).")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="SPLIT.csv", help="The table to write, with splits.")],
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--targets",
            metavar="NAME",
            help="Label column to balance; may be repeated.",
            show_default="all that hold both 0 and 1",
        ),
    ] = None,
    fractions: Annotated[
        tuple[float, float, float] | None,
        typer.Option(
            "--fractions",
            metavar="TRAIN VAL TEST",
            help="Share of the patients in each split.",
            show_default="0.8 0.1 0.1",
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option("--folds", metavar="K", help="Columns fold_0 to fold_K-1 instead of one split; 3 to 20."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same splits.")] = 0,
    slides: Annotated[
        Path | None, typer.Option("--slides", help="Where to look for slides that the table names without their path.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace splits that the table has, and SPLIT.csv if it is there.")
    ] = False,
) -> None:
    """Split a cohort by patient into training, validation and test, alike in labels and scan resolution.

    \b
    tapfm split cohort.csv --out split.csv
    tapfm split cohort.csv --out split.csv --fractions 0.7 0.1 0.2 --seed 1
    tapfm split cohort.csv --out folds.csv --folds 5   for cross-validation
    tapfm split cohort.csv --out split.csv --targets EGFR --targets KRAS

    All other columns are kept. Splits that the table has already are checked: a
    patient in two of them is an error that names the patient. They are replaced
    with --force only.
    """
    from tapfm.cli.console import terminal
    from tapfm.errors import InputError
    from tapfm.runtime.workers import available_cores
    from tapfm.workflows import split as split_cohort

    if folds is not None and fractions is not None:
        raise InputError(
            "--folds and --fractions were both given.", hint="Folds are of equal size: leave --fractions out."
        )
    messages = Console(stderr=True, highlight=False)
    try:
        made = split_cohort.split_cohort(
            cohort,
            out,
            slides_folder=slides,
            targets=targets,
            fractions=fractions or (0.8, 0.1, 0.1),
            folds=folds,
            seed=seed,
            force=force,
            workers=available_cores(),
            console=messages,
        )
    except KeyboardInterrupt:
        messages.print("Stopped. Nothing was written.")
        raise typer.Exit(130) from None
    split_cohort.show(made, terminal())
