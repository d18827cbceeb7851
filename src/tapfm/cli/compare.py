"""`tapfm compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_count
from tapfm.workflows import compare as workflow

if TYPE_CHECKING:
    from tapfm.evaluation.model_comparison import Comparison


@command(workflow.CompareOptions)
def compare(options: workflow.CompareOptions) -> None:
    """Compare the AUCs of two or more models on the same patients, with paired tests.

    Differences are tested with a paired patient bootstrap and with DeLong's
    test. The p values are corrected for multiple testing with Holm's method.
    Patients that some models have not predicted are excluded and listed. CSV
    files need the columns patient_id, slide_id, target, label and probability.

    \b
    Examples:
      tapfm compare runs/first runs/second --out comparison
      tapfm compare tapfm=evaluations/a abmil=evaluations/b --out comparison
      tapfm compare ours=runs/first theirs.csv --against ours --out comparison

    \b
    Output files:
      comparison.md, .csv, .json   AUCs, differences, intervals and p values
      differences.png              plot of the differences
      excluded.csv                 excluded patients and slides
    """
    comparison = workflow.compare.run(options, stderr_console())
    _print_comparison(comparison, options.out, stdout_console(), stderr_console())


def _print_comparison(comparison: Comparison, folder: Path, console: Console, stderr: Console) -> None:
    from tapfm.evaluation.comparison_tables import build_auc_table, build_differences_table
    from tapfm.results.terminal import rich_table

    console.print(rich_table(build_auc_table(comparison)))
    console.print()
    console.print(rich_table(build_differences_table(comparison)))
    print_line(stderr, f"Compared on {format_count(comparison.patient_count, 'patient')}.")
    if count := len({each for excluded in comparison.excluded.values() for each in excluded}):
        noun = "patient or slide" if count == 1 else "patients or slides"
        print_line(stderr, f"Excluded {count:,} {noun} that some models have not predicted: {folder / 'excluded.csv'}")
    print_line(stderr, f"Results: {folder / 'comparison.md'} and {folder / 'differences.png'}")
