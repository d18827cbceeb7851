"""`tapfm split`."""

from __future__ import annotations

from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.messages import format_command
from tapfm.workflows import split as workflow


@command(workflow.SplitOptions, stopped="Nothing was written.")
def split(options: workflow.SplitOptions) -> None:
    """Split a cohort by patient into training, validation and test, balanced in labels and scan resolution.

    \b
    tapfm split cohort.csv --out split.csv
    tapfm split cohort.csv --out split.csv --fractions 0.7 0.1 0.2 --seed 1
    tapfm split cohort.csv --out folds.csv --folds 5   for cross-validation
    tapfm split cohort.csv --out split.csv --targets EGFR --targets KRAS

    All other columns are kept. Splits that the table already has are checked: a
    patient in two of them is an error that names the patient. They are replaced
    only with --force.
    """
    _print_split(workflow.split.run(options, stderr_console()), stdout_console())


def _print_split(result: workflow.SplitResult, console: Console) -> None:
    from tapfm.results.formatting import format_percentage
    from tapfm.results.table import Cell, Column, Table, table_row
    from tapfm.results.terminal import rich_table
    from tapfm.tasks.labels import label_count_columns

    made, has_folds = result.split, "split" not in result.split.splits
    columns = [
        Column("fold", text=True, shown=has_folds),
        Column("split", text=True),
        *map(Column, ("patients", "slides", "40x")),
    ]
    columns += label_count_columns(result.targets)
    rows = []
    for column, of_slide in made.splits.items():
        for name in made.split_names:
            slides = [row for row in made.cohort.rows if of_slide[row.slide_id] == name]
            scans = [made.resolutions[row.slide_id] for row in slides if row.slide_id in made.resolutions]
            of_40x = scans.count("40x")
            share = Cell(f"{of_40x:,} of {len(scans):,}", format_percentage(of_40x, len(scans))) if scans else Cell("-")
            counts = [
                kind.count_cell(result.labels_in(target, of_slide, name)) for target, kind in result.targets.items()
            ]
            patients = len({row.patient_id for row in slides})
            rows.append(table_row(column, name, patients, len(slides), share, *counts))
    console.print(rich_table(Table(columns, rows)))
    for note in workflow.split_notes(result):
        print_line(console, note, "yellow")
    following = format_command("config", "--cohort", result.out, "--out", "run.toml")
    print_line(console, f"Written: {result.out}. Next: {following}")
    if has_folds:
        print_line(
            console,
            "This trains fold 0; the others: tapfm train run.toml --out runs/fold-1 --set cohort.fold=1, ...",
        )
