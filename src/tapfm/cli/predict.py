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

_MAX_SLIDES = 20  # in the printed table


@command(
    workflow.PredictOptions, stop_message="Finished slides are saved. To resume, run the same command with --resume."
)
def predict(options: workflow.PredictOptions) -> None:
    """Predict slides with a trained model, with the contribution of each tile and optional heatmaps.

    Uses all tiles of each slide, with bounded memory. Slides are tiled first,
    unless --tiles is given. If a slide cannot be read, the others are still
    predicted. With --precision float8, the first slide is also predicted
    without float8, and a difference above 0.01 in a probability is an error.

    \b
    Examples:
      tapfm predict --model runs/first slide.svs --out predicted --heatmaps
      tapfm predict --model runs/first slides/ --out predicted
      tapfm predict --model exported cohort.csv --out predicted --geojson

    \b
    Output files:
      predictions.csv                   one row per slide and target
      failures.csv                      failed slides, with reason and hint
      per-slide/ID/tiles.parquet        x, y, attention, weight, contributions
      per-slide/ID/heatmap-*.png, .tif  heatmaps (--heatmaps)
      per-slide/ID/gallery-*.png        highest and lowest tiles (--heatmaps)
      per-slide/ID/tiles.geojson        tiles for QuPath (--geojson)
      tiles/                            tiles of the slides, without --tiles

    Exit code 3 if more slides failed than --allow-failures; the others are
    predicted.
    """
    predictions = workflow.predict.run(options, stderr_console())
    _print_predictions(predictions, stdout_console(), stderr_console())
    if len(predictions.failed) > options.allow_failures:
        raise typer.Exit(3)


def _print_predictions(predictions: Predictions, console: Console, stderr: Console) -> None:
    from tapfm.evaluation.predictions import describe_few_tiles
    from tapfm.prediction.folder import PREDICTIONS_CSV
    from tapfm.results.formatting import MISSING
    from tapfm.results.table import Cell, Column, Table, table_row
    from tapfm.results.terminal import rich_table

    columns = [Column("slide", text=True), Column("target", text=True), Column("probability")]
    columns += [Column("call", text=True), Column("tiles"), Column("seconds", float_format=".1f")]
    rows = []
    for slide in predictions.slides[:_MAX_SLIDES]:
        for number, (target, prediction) in enumerate(slide.targets.items()):
            call = MISSING if prediction.call is None else slide.kinds[target].describe_label(prediction.call)
            slide_id, tiles, seconds = (slide.slide_id, slide.tiles, slide.seconds) if number == 0 else (None,) * 3
            call_cell = Cell(call, detail=slide.warning)
            rows.append(table_row(slide_id, target, prediction.probability, call_cell, tiles, seconds))
    console.print(rich_table(Table(columns, rows)))
    if len(predictions.slides) > _MAX_SLIDES:
        console.print(f"... and {format_count(len(predictions.slides) - _MAX_SLIDES, 'more slide')}")
    folder = predictions.folder.path
    print_line(stderr, f"Predicted {format_count(len(predictions.slides), 'slide')}: {folder / PREDICTIONS_CSV}")
    if few := sum(bool(slide.warning) for slide in predictions.slides):
        stderr.print(describe_few_tiles(few), style="bold yellow", markup=False, soft_wrap=True)
    if predictions.failed:
        failed = format_count(len(predictions.failed), "slide")
        print_line(stderr, f"{failed} failed. Reasons: {folder / 'failures.csv'}")
        for line in group_hints((slide_id, each.hint) for slide_id, each in predictions.failed.items()):
            print_line(stderr, f"  {line}")
    print_line(stderr, f"To view them: {format_command('view', folder)}")
