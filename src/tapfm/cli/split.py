"""`tapfm split`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tapfm.cli.command import command
from tapfm.cli.console import messages, print_line, terminal
from tapfm.runtime.messages import command as command_text
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
    _print_split(workflow.split.run(options, messages()), terminal())


def _print_split(result: workflow.SplitResult, console: Console) -> None:
    made = result.split
    table = Table(box=None, pad_edge=False, header_style="bold")
    has_folds = "split" not in made.splits
    fold = ["fold"] if has_folds else []
    for name in (*fold, "split", "patients", "slides", "40x", *(f"{target} positive" for target in result.labels)):
        table.add_column(Text(name), justify="left" if name in ("fold", "split") else "right")
    for column, of_slide in made.splits.items():
        for name in made.split_names:
            rows = [row for row in made.cohort.rows if of_slide[row.slide_id] == name]
            scans = [made.resolutions[row.slide_id] for row in rows if row.slide_id in made.resolutions]
            table.add_row(
                *([column] if has_folds else []),
                name,
                f"{len({row.patient_id for row in rows}):,}",
                f"{len(rows):,}",
                _share(sum(scan == "40x" for scan in scans), len(scans)),
                *(
                    _share(*kind.count_labels(result.labels_in(target, of_slide, name)))
                    for target, kind in result.targets.items()
                ),
            )
    console.print(table)
    for note in workflow.split_notes(result):
        print_line(console, note, "yellow")
    following = command_text("config", "--cohort", result.out, "--out", "run.toml")
    print_line(console, f"Written: {result.out}. Next: {following}")
    if has_folds:
        print_line(
            console,
            "This trains fold 0; the others: tapfm train run.toml --out runs/fold-1 --set cohort.fold=1, ...",
        )


def _share(part: int | None, whole: int) -> str:
    if part is None:
        return f"{whole:,}"
    return f"{part:,}/{whole:,} ({part / whole:.0%})" if whole else "-"
