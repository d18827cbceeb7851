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
    from tapfm.evaluation.method_comparison import Comparison


@command(workflow.CompareOptions)
def compare(options: workflow.CompareOptions) -> None:
    """Compare models on the same patients.

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
    differences.png              the differences as a plot
    excluded.csv                 patients that not all of them have
    """
    compared = workflow.compare.run(options, stderr_console())
    _print_comparison(compared, options.out, stdout_console(), stderr_console())


def _print_comparison(compared: Comparison, folder: Path, console: Console, stderr_console: Console) -> None:
    from tapfm.evaluation.comparison_tables import auc_table, differences_table
    from tapfm.results.terminal import rich_table

    console.print(rich_table(auc_table(compared)))
    console.print()
    console.print(rich_table(differences_table(compared)))
    print_line(stderr_console, f"On {format_count(compared.patients, 'patient')} that all of them have.")
    if count := sum(len(patients) for patients in compared.excluded.values()):
        print_line(stderr_console, f"Left out: {format_count(count, 'patient')} ({folder / 'excluded.csv'})")
    print_line(stderr_console, f"Results: {folder / 'comparison.md'} and {folder / 'differences.png'}")
