"""`tapfm embed`."""

from __future__ import annotations

import shlex

import typer
from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_failures, print_line, stderr_console, stdout_console
from tapfm.runtime.cohort_job import FAILURES, RESUME_HINT, SUMMARY
from tapfm.workflows import embed as workflow


@command(workflow.EmbedOptions, stopped=RESUME_HINT)
def embed(options: workflow.EmbedOptions) -> None:
    """Store the features of every tile and the encoder's raw attention to it. Training on stored features is fast.

    \b
    tapfm embed cohort.csv --encoder uni --out features
    tapfm embed cohort.csv --encoder uni --out features --only case-17
    tapfm embed cohort.csv --encoder uni --tiles 20x_256px_0px_overlap --out f

    The second is for one slide, after fixing it; the third takes tiles of
    TRIDENT. A command that was stopped resumes where it was. A slide fails when
    more than 5% of its tiles cannot be read. Exit code 3 when slides failed; the
    others are finished.

    \b
    ID.h5          features, raw attention, positions: TRIDENT's layout
    summary.csv    one row per slide
    failures.csv   what failed, why, and what to do
    """
    result = workflow.embed.run(options, stderr_console())
    _print_embedded(result, stdout_console())
    raise typer.Exit(result.slides.exit_code(options.only or None, options.allow_failures))


def _print_embedded(result: workflow.EmbedResult, console: Console) -> None:
    table = result.slides
    tiles = sum(record.tiles for record in table.finished)
    print_line(
        console,
        f"Embedded {len(table.finished):,} of {len(table.ordered):,} slides: {tiles:,} tiles of "
        f"{result.feature_size:,} features, by {result.encoder} in {result.precision}.",
    )
    incomplete = [record for record in table.finished if record.tiles_failed]
    if incomplete:
        missing = sum(record.tiles_failed or 0 for record in incomplete)
        print_line(
            console,
            f"{missing:,} tiles on {len(incomplete):,} slides could not be read: {table.folder / SUMMARY}",
            "yellow",
        )
    print_failures(console, [(each.slide_id, each.hint) for each in table.failed], table.folder / FAILURES)
    if table.finished:
        fixed = f"--set adaptation.method=fixed --set tiles.features={shlex.quote(str(table.folder))}"
        print_line(console, f"Next: tapfm train RUN.toml --out runs/fixed {fixed}")
