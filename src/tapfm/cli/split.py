"""`tapfm split`."""

from __future__ import annotations

from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.workflows import split as workflow


@command(workflow.SplitOptions, stop_message="No file was written.")
def split(options: workflow.SplitOptions) -> None:
    """Split a cohort by patient into train, validation and test, stratified by labels and scan resolution.

    Writes a copy of the table with a new column split, or with columns fold_0,
    fold_1, ... for cross-validation. If the table already has splits, the
    command ends with exit code 2 and says whether a patient is in two splits.
    --force replaces them without this check.

    \b
    Examples:
      tapfm split cohort.csv --out split.csv
      tapfm split cohort.csv --out split.csv --fractions 0.7 0.1 0.2 --seed 1
      tapfm split cohort.csv --out folds.csv --folds 5   # cross-validation
      tapfm split cohort.csv --out split.csv --target EGFR --target KRAS
      tapfm split cohort.xlsx --out split.csv --positive EGFR=MUT   # MUT / WT
      tapfm split slide.csv --clini clini.csv --target EGFR --out split.csv
      tapfm split cohort.csv --out clam --layout clam --folds 10
    """
    _print_split(workflow.split.run(options, stderr_console()), stdout_console())


def _print_split(result: workflow.SplitResult, console: Console) -> None:
    from tapfm.results.formatting import format_percentage
    from tapfm.results.table import Cell, Column, Table, table_row
    from tapfm.results.terminal import rich_table
    from tapfm.tasks.labels import label_count_columns

    cohort_split, has_folds = result.split, "split" not in result.split.splits
    columns = [
        Column("fold", text=True, shown=has_folds),
        Column("split", text=True),
        *map(Column, ("patients", "slides", "40x")),
    ]
    columns += label_count_columns(result.targets)
    rows = []
    resolutions = cohort_split.resolutions
    for column, split_of_slide in cohort_split.splits.items():
        for name in cohort_split.split_names:
            slides = [row for row in cohort_split.cohort.rows if split_of_slide[row.slide_id] == name]
            known = [resolutions[row.slide_id] for row in slides if row.slide_id in resolutions]
            count_40x = known.count("40x")
            fraction_40x = Cell("-")
            if known:
                fraction_40x = Cell(f"{count_40x:,} of {len(known):,}", format_percentage(count_40x, len(known)))
            label_counts = [
                kind.label_count_cell(result.labels_of_split(target, split_of_slide, name))
                for target, kind in result.targets.items()
            ]
            patients = len({row.patient_id for row in slides})
            rows.append(table_row(column, name, patients, len(slides), fraction_40x, *label_counts))
    console.print(rich_table(Table(columns, rows)))
    for warning in workflow.split_warnings(result):
        print_line(console, warning, "yellow")
    print_line(console, f"Wrote {', '.join(map(str, result.files))}.")
    if result.config_command:
        print_line(console, f"Next: {result.config_command}")
        if has_folds:
            print_line(
                console, f"Then train all folds: tapfm train run.toml --folds {len(cohort_split.splits)} --out runs/cv"
            )
