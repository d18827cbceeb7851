"""`tapfm predict`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_command, format_count, group_hints
from tapfm.workflows import predict as workflow

if TYPE_CHECKING:
    from tapfm.prediction.cohort_prediction import Predictions

_SHOWN = 20  # slides in the table


@command(workflow.PredictOptions, stopped="What is finished is kept; the same command with --resume continues.")
def predict(options: workflow.PredictOptions) -> None:
    """Predict whole slides: probabilities, calls, and the contribution of each tile.

    \b
    tapfm predict --model runs/first slide.svs --out predicted --heatmaps
    tapfm predict --model runs/first slides/ --out predicted
    tapfm predict --model exported cohort.csv --out predicted --geojson

    All tiles of each slide, read once, in bounded memory. When a slide cannot be
    read, the others are predicted. After a stop, --resume continues: finished
    slides are kept, also when --heatmaps is added later.

    \b
    predictions.csv                   a line for each slide and target
    failures.csv                      what failed, why, and what to do
    per-slide/ID/tiles.parquet        x, y, attention, weight, contributions
    per-slide/ID/heatmap-*.png, .tif  heatmaps, with their unit; for QuPath too
    per-slide/ID/gallery-*.png        the most influential tiles, for and against
    per-slide/ID/tiles.geojson        for QuPath
    tiles/                            tiles that were made here: see index.html

    float8 is for GPUs that have it; it is refused where it changes a probability
    of the first slide by more than 0.01.

    Exit code 3 when more slides failed than allowed; the others are predicted.
    """
    predictions = workflow.predict.run(options, stderr_console())
    _print_predictions(predictions, stdout_console(), stderr_console())
    if len(predictions.failed) > options.allow_failures:
        raise typer.Exit(3)


def _print_predictions(predictions: Predictions, console: Console, stderr_console: Console) -> None:
    from tapfm.prediction.folder import PREDICTIONS_CSV
    from tapfm.results.formatting import MISSING
    from tapfm.results.table import Column, Table, table_row
    from tapfm.results.terminal import rich_table

    columns = [Column("slide", text=True), Column("target", text=True), Column("probability")]
    columns += [Column("call", text=True), Column("tiles"), Column("seconds", form=".1f")]
    rows = []
    for slide in predictions.slides[:_SHOWN]:
        for number, (target, prediction) in enumerate(slide.targets.items()):
            call = MISSING if prediction.call is None else slide.kinds[target].describe_label(prediction.call)
            slide_id, tiles, seconds = (slide.slide_id, slide.tiles, slide.seconds) if number == 0 else (None,) * 3
            rows.append(table_row(slide_id, target, prediction.probability, call, tiles, seconds))
    console.print(rich_table(Table(columns, rows)))
    if len(predictions.slides) > _SHOWN:
        console.print(f"... and {len(predictions.slides) - _SHOWN:,} more")
    folder = predictions.folder.path
    print_line(
        stderr_console, f"Predicted {format_count(len(predictions.slides), 'slide')}: {folder / PREDICTIONS_CSV}"
    )
    if predictions.failed:
        failed = format_count(len(predictions.failed), "slide")
        print_line(stderr_console, f"{failed} failed: {folder / 'failures.csv'}")
        for line in group_hints((slide_id, each.hint) for slide_id, each in predictions.failed.items()):
            print_line(stderr_console, f"  {line}")
    print_line(stderr_console, f"Next, view them: {format_command('view', folder)}")
