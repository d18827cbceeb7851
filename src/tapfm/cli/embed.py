"""`tapfm embed`."""

from __future__ import annotations

import shlex

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_failures, print_line, stderr_console, stdout_console
from tapfm.runtime.cohort_job import FAILURES_FILE, RESUME_HINT, SUMMARY_FILE
from tapfm.runtime.messages import format_count
from tapfm.workflows import embed as workflow


@command(workflow.EmbedOptions, stop_message=RESUME_HINT)
def embed(options: workflow.EmbedOptions) -> None:
    """Encode all tiles of a cohort, and store their features and raw attention for method fixed.

    Training on stored features (method fixed) is fast, because the encoder
    stays frozen. Slides that are already encoded with the same settings are
    skipped, so run the same command again to resume. A slide fails if more than
    5% of its tiles cannot be read.

    \b
    Examples:
      tapfm embed cohort.csv --encoder uni --out features
      tapfm embed cohort.csv --encoder uni --out features --only case-17
      tapfm embed cohort.csv --encoder uni --tiles 20x_256px_0px_overlap \\
          --out features              # tiles of TRIDENT

    \b
    Output files:
      ID.h5          features, raw attention and coordinates, as in TRIDENT
      summary.csv    one row per slide
      failures.csv   failed slides, with reason and hint

    Exit code 3 if more slides failed than --allow-failures; the others are
    encoded.
    """
    result = workflow.embed.run(options, stderr_console())
    _print_result(result, stdout_console())
    raise typer.Exit(result.slides.exit_code(options.only or None, options.allow_failures))


def _print_result(result: workflow.EmbedResult, console: Console) -> None:
    table = result.slides
    tiles = sum(record.tiles for record in table.finished)
    print_line(
        console,
        f"Encoded {len(table.finished):,} of {len(table.records_in_cohort_order):,} slides with {result.encoder} in "
        f"{result.precision}: {tiles:,} tiles, feature size {result.feature_size:,}.",
    )
    incomplete = [record for record in table.finished if record.tiles_failed]
    if incomplete:
        missing = sum(record.tiles_failed or 0 for record in incomplete)
        print_line(
            console,
            f"{format_count(missing, 'tile')} of {format_count(len(incomplete), 'slide')} could not be read; "
            f"see the column tiles_failed of {table.folder / SUMMARY_FILE}",
            "yellow",
        )
    print_failures(console, [(each.slide_id, each.hint) for each in table.failed], table.folder / FAILURES_FILE)
    if table.finished:
        fixed = f"--set adaptation.method=fixed --set tiles.features={shlex.quote(str(table.folder))}"
        print_line(console, f"Next: tapfm train RUN.toml --out runs/fixed {fixed}")
