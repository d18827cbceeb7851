"""Options that several commands share, with the same name, meaning and help text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tapfm.errors import InputError
from tapfm.runtime.options import Option

if TYPE_CHECKING:
    from tapfm.cohort.table_options import TableOptions
    from tapfm.tasks.label_columns import TargetRequest

Device = Annotated[
    str, Option("Device to compute on: auto (the GPU if there is one), cpu, cuda, or cuda:1 for the second GPU.")
]
Workers = Annotated[
    int | None,
    Option(
        "Number of worker processes. 0: do all work in the main process.",
        metavar="N",
        show_default="one per CPU core",
        at_least=0,
    ),
]
AllowFailures = Annotated[
    int, Option("Number of slides that may fail. If more fail, the exit code is 3.", metavar="N", at_least=0)
]
Only = Annotated[tuple[str, ...], Option("Process only the slide with this slide_id. Repeatable.", metavar="ID")]
SlidesFolder = Annotated[
    Path | None,
    Option("Folder to search for slides, if the cohort table has no paths or the slides were moved.", metavar="DIR"),
]
Compile = Annotated[
    bool | None,
    Option(
        "Compile the encoder with torch.compile: the start takes longer, then tiles are encoded faster.",
        flag="--compile/--no-compile",
        show_default="on a GPU, if there are enough tiles",
    ),
]
Resamples = Annotated[
    int, Option("Number of bootstrap resamples for the confidence intervals.", metavar="N", at_least=1)
]

Encoding = Annotated[
    str | None,
    Option(
        "Encoding of a table that is not UTF-8 or UTF-16, such as cp1252 (Windows) or latin-1.",
        metavar="NAME",
        show_default="UTF-8 or UTF-16",
    ),
]
PatientColumn = Annotated[
    str | None,
    Option(
        "Column with the patient of each slide.",
        metavar="NAME",
        show_default="recognised names, such as patient_id, Patient ID, case_id or bcr_patient_barcode",
    ),
]
SlidesArePatients = Annotated[
    bool, Option("Every slide is from another patient: do not warn that the table has no column of patients.")
]
Missing = Annotated[
    tuple[str, ...],
    Option(
        "Text that means a missing value, in addition to empty cells, NA, N/A, #N/A, nan, null, none, unknown and '.', "
        "in upper or lower case. Repeatable.",
        metavar="TEXT",
    ),
]
Positive = Annotated[
    tuple[str, ...],
    Option(
        "Positive class of a target whose labels are not 0 and 1, such as EGFR=MUT. The only other value is the "
        "negative class. Repeatable.",
        metavar="NAME=VALUE",
    ),
]
Negative = Annotated[
    tuple[str, ...],
    Option("Negative class of a target, if its column has several other values. Repeatable.", metavar="NAME=VALUE"),
]
Clini = Annotated[
    Path | None,
    Option(
        "Table of patients with labels, as STAMP's clini table. It is joined with the table of slides.", metavar="FILE"
    ),
]
SlideTable = Annotated[
    Path | None,
    Option("Table of slides to join with --clini, instead of the argument.", metavar="FILE"),
]
ClamSplits = Annotated[
    Path | None,
    Option("Splits of CLAM: splits_0.csv, or the folder with splits_0.csv, splits_1.csv, ...", metavar="PATH"),
]


def read_table_options(options: Any) -> TableOptions:
    """Return how to read the cohort table, from those of the options above that a command has."""
    from tapfm.cohort.table_options import MISSING_VALUES, TableOptions

    return TableOptions(
        slides=getattr(options, "slides", None),
        encoding=getattr(options, "encoding", None),
        patient_column=getattr(options, "patient_column", None) or "",
        slides_are_patients=getattr(options, "slides_are_patients", False),
        missing_values=(*MISSING_VALUES, *getattr(options, "missing", ())),
        clini=getattr(options, "clini", None),
        clam_splits=getattr(options, "splits", None),
    )


def read_target_request(options: Any) -> TargetRequest:
    """Return the targets of --target, --positive and --negative."""
    from tapfm.tasks.label_columns import parse_class_options

    return parse_class_options(options.target, options.positive, options.negative)


def choose_table(argument: Path | None, slide_table: Path | None, clini: Path | None, metavar: str) -> Path | None:
    """Return the table of slides: the argument or --slide-table. Raises InputError if both are given."""
    if slide_table is None:
        if argument is None and clini is not None:
            raise InputError("--clini needs a table of slides.", hint="Pass it too: --slide-table slide.csv")
        return argument
    if argument is not None:
        raise InputError(f"{metavar} and --slide-table are both given.", hint="Pass the table of slides once.")
    if clini is None:
        raise InputError("--slide-table needs a table of patients.", hint="Pass it too: --clini clini.csv")
    return slide_table


def print_table_notes(console: Console, notes: Sequence[str], warnings: Sequence[str]) -> None:
    """Print how a table was read, and warnings about its patients."""
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    for warning in warnings:
        console.print(f"WARNING: {warning}", style="bold yellow", markup=False, soft_wrap=True)
