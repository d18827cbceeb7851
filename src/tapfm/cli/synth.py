"""`tapfm synth`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.runtime.cohort_job import RESUME_HINT
from tapfm.runtime.messages import format_command
from tapfm.workflows import synth as workflow

if TYPE_CHECKING:
    from tapfm.synthetic.cohort_plan import CohortName

_SPLIT_ORDER = {"train": 0, "val": 1, "test": 2}


@command(workflow.SynthOptions, stop_message=RESUME_HINT)
def synth(options: workflow.SynthOptions) -> None:
    """Generate a cohort of synthetic H&E slides with a planted signal, to try tapfm without real slides.

    In positive slides, some tumour nests have nuclei that differ in size, shape,
    chromatin or arrangement. Colour, tissue, site and scanner are sampled
    independently of the label, and differ in the external cohort. The tiles with the signal are
    recorded as ground truth. Run the same command again to resume.

    \b
    Examples:
      tapfm synth synthetic
      tapfm synth small --slides 12 --external 6 --prevalence 0.4   # one minute
      tapfm synth lung --task luad4 --difficulty easy

    \b
    Output files:
      cohort.csv, external.csv   slides, patients, splits and labels
      slides/, external/         SVS files, 30% of them scanned at 40x
      contact-sheet.jpg          thumbnails of up to 40 slides
      truth/                     ground truth: tissue, signal regions, tiles.csv
    """
    _print_cohort(workflow.synth.run(options, stderr_console()), stdout_console())


def _print_cohort(cohort: workflow.SyntheticCohort, console: Console) -> None:
    from tapfm.slides.opening import CONTACT_SHEET
    from tapfm.synthetic.cohort_generation import COHORT_TABLES, README

    _print_table(cohort, console)
    for line in _describe_prevalence_changes(cohort):
        console.print(line)
    folder = cohort.folder
    print_line(console, f"Thumbnails: {folder / CONTACT_SHEET}. Description of the files: {folder / README}")
    slides = folder / COHORT_TABLES["development"]
    inspect, tile = format_command("inspect", slides), format_command("tile", slides, "--out", "tiles")
    print_line(console, f"Next: {inspect}; {tile}")


def _print_table(cohort: workflow.SyntheticCohort, console: Console) -> None:
    from tapfm.results.formatting import format_percentage
    from tapfm.results.table import Cell, Column, Table, table_row
    from tapfm.results.terminal import rich_table

    targets = [each.name for each in cohort.spec.targets]
    columns = [Column("cohort", text=True), Column("split", text=True), Column("slides"), Column("40x")]
    rows = []
    groups = {(each.cohort, each.split) for each in cohort.slides}
    for group in sorted(groups, key=lambda group: (group[0], _SPLIT_ORDER[group[1]])):
        slides = [each for each in cohort.slides if (each.cohort, each.split) == group]
        positives = [sum(each.labels[target] for each in slides) for target in targets]
        counts = [Cell(count, format_percentage(count, len(slides))) for count in positives]
        count_40x = sum(each.scanner.objective == 40 for each in slides)
        rows.append(table_row(*group, len(slides), count_40x, *counts))
    console.print(rich_table(Table([*columns, *(Column(f"{target} positive") for target in targets)], rows)))


def _describe_prevalence_changes(cohort: workflow.SyntheticCohort) -> list[str]:
    """Return a message for each target whose number of positive slides differs from its prevalence."""
    from tapfm.synthetic.cohort_plan import MIN_SLIDES_PER_CLASS_AND_SPLIT

    lines = []
    spec = cohort.spec
    slide_counts: dict[CohortName, int] = {"development": spec.slides, "external": spec.external}
    for name, slides in slide_counts.items():
        for target in spec.targets:
            prevalence = target.prevalence[name]
            expected = round(prevalence * slides)
            actual = sum(each.labels[target.name] for each in cohort.slides if each.cohort == name)
            if actual != expected:
                lines.append(
                    f"{target.name} in the {name} cohort: {actual} positive slides instead of {expected} "
                    f"({prevalence:.0%} of {slides}), so that every split that is large enough has at least "
                    f"{MIN_SLIDES_PER_CLASS_AND_SPLIT} slides of each class."
                )
    return lines
