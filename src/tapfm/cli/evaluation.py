"""Commands about what models are worth. What they need is imported when they run, so that help comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tapfm.cli.options import AllowFailures, Device, ReadingWorkers
from tapfm.errors import InputError

RESAMPLES = Annotated[
    int, typer.Option("--resamples", metavar="N", help="Resamples of patients that intervals come from.")
]


def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|EXPORT|ENSEMBLE", help="Folder of a run, an export or an ensemble.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for figures, such as evaluations/first.")],
    cohort: Annotated[
        Path | None,
        typer.Option("--cohort", metavar="CSV", help="Another cohort's table.", show_default="the run's own"),
    ] = None,
    slides: Annotated[
        Path | None, typer.Option("--slides", metavar="DIR", help="Where to look for slides that moved.")
    ] = None,
    tiles: Annotated[
        Path | None, typer.Option("--tiles", metavar="DIR", help="What `tapfm tile` wrote.", show_default="the run's")
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option("--features", metavar="DIR", help="What `tapfm embed` wrote, for method fixed."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="test, val, train or all.", show_default="test; of another cohort: all"),
    ] = None,
    unit: Annotated[
        str | None, typer.Option("--unit", help="What counts once: slide or patient.", show_default="as in training")
    ] = None,
    sensitivity: Annotated[
        float, typer.Option("--sensitivity", metavar="S", help="Also a threshold that has it on validation.")
    ] = 0.9,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="COLUMN", help="Subgroups, such as scanner or mpp; repeatable."),
    ] = None,
    resamples: RESAMPLES = 2000,
    colours: Annotated[
        Path | None,
        typer.Option(
            "--colours", metavar="FILE", help="Keep colours here, for several evaluations.", show_default="in --out"
        ),
    ] = None,
    device: Device = "auto",
    workers: ReadingWorkers = None,
    allow_failures: AllowFailures = 0,
    allow_overlap: Annotated[
        bool, typer.Option("--allow-overlap", help="Another cohort may have patient_ids of the training slides.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the evaluation in the folder.")] = False,
) -> None:
    """Say how well a model does on held-out slides, or on another cohort.

    \b
    tapfm evaluate runs/first --out evaluations/first
    tapfm evaluate runs/first --by scanner --unit patient --out evaluations/by
    tapfm evaluate runs/first --cohort external.csv --tiles tiles-external \\
        --out evaluations/external

    All tiles of each slide; 95% intervals by resampling patients, and DeLong's.
    Thresholds come from validation slides, never from what is evaluated. A
    baseline of colours and tile count stands beside the model, so that
    shortcuts show.

    \b
    predictions.csv                 each slide and target; -baseline: by colours
    metrics.md, .csv, .json         figures with intervals; on a page, tidy, whole
    roc.png, pr.png, reliability.png, scores.png
    failures.csv                    what could not be read
    evaluation.json                 which weights, on which table

    Exit code 3 when more slides failed than may; the others are evaluated.
    """
    from tapfm.runs.ensemble import member_folders
    from tapfm.runtime.workers import available_cores

    member_folders(model)  # what is no model is told before torch is waited for
    if cohort is not None and not cohort.is_file():
        wrong = f"{cohort} is a folder." if cohort.is_dir() else f"There is no file {cohort}."
        raise InputError(wrong, hint="--cohort is a table of slides with labels.")
    if out.is_file():
        raise InputError(f"{out} is a file.", hint="Give a folder to --out.")
    from tapfm.cli.console import terminal
    from tapfm.errors import Interrupted
    from tapfm.evaluation.results import settings_of
    from tapfm.runs.evaluation_data import Choice
    from tapfm.workflows import evaluate as evaluate_model

    messages = Console(stderr=True, highlight=False)
    try:
        evaluation = evaluate_model.evaluate(
            model,
            Choice(cohort, slides, tiles, features, split, allow_overlap),
            settings_of(unit, sensitivity, by or (), resamples),
            out,
            device=device,
            workers=available_cores() if workers is None else workers,
            colours=colours,
            resume=resume,
            console=messages,
        )
    except Interrupted as stopped:
        raise typer.Exit(128 + stopped.signal_number) from None
    evaluate_model.show(evaluation, terminal(), messages)
    if len(evaluation.failed) > allow_failures:
        raise typer.Exit(3)


def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]PATH...", help="Folders of evaluations or runs, or CSVs of predictions."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables and picture.")],
    unit: Annotated[str, typer.Option("--unit", help="What counts once: slide or patient.")] = "slide",
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAME", help="Only differences to this one.", show_default="all pairs"),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Of runs: test or val.")] = "test",
    resamples: RESAMPLES = 2000,
) -> None:
    """Say which model is better, on the same patients.

    \b
    tapfm compare runs/first runs/second --out comparison
    tapfm compare tapfm=evaluations/a abmil=evaluations/b --out comparison
    tapfm compare ours=runs/first theirs.csv --against ours --out comparison

    Paired: differences of AUC by resampling patients and by DeLong's test,
    corrected for their number by Holm's method. Only patients that all of
    them have count; the others are listed. A CSV needs the columns
    patient_id, slide_id, target, label and probability.

    \b
    comparison.md, .csv, .json   AUCs, differences with intervals and p values
    differences.png              the same as a picture
    left_out.csv                 patients that not all of them have
    """
    from tapfm.cli.console import terminal
    from tapfm.workflows import compare as compare_models

    messages = Console(stderr=True, highlight=False)
    compared = compare_models.compare_models(
        models,
        out,
        unit=unit,
        against=against,
        split=split,
        resamples=resamples,
        warn=lambda note: messages.print(note, style="bold yellow", markup=False, soft_wrap=True),
    )
    compare_models.show(compared, out, terminal(), messages)
