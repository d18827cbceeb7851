"""`tapfm compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import messages, print_line, terminal
from tapfm.runtime.messages import counted
from tapfm.workflows import compare as workflow

if TYPE_CHECKING:
    from tapfm.evaluation.comparing import Comparison


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
    left_out.csv                 patients that not all of them have
    """
    compared = workflow.compare.run(options, messages())
    _print_comparison(compared, options.out, terminal(), messages())


def _print_comparison(compared: Comparison, folder: Path, console: Console, messages: Console) -> None:
    from tapfm.evaluation.comparison_tables import auc_table, differences_table
    from tapfm.results.terminal import rich_table

    console.print(rich_table(auc_table(compared)))
    console.print()
    console.print(rich_table(differences_table(compared)))
    print_line(messages, f"On {counted(compared.patients, 'patient')} that all of them have.")
    if count := sum(len(patients) for patients in compared.left_out.values()):
        print_line(messages, f"Left out: {counted(count, 'patient')} ({folder / 'left_out.csv'})")
    print_line(messages, f"Results: {folder / 'comparison.md'} and {folder / 'differences.png'}")
