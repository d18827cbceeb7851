"""`tapfm report`."""

from __future__ import annotations

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.workflows import report as workflow


@command(workflow.ReportOptions)
def report(options: workflow.ReportOptions) -> None:
    """Make one page about a run or a study, to read, send or print.

    \b
    tapfm report runs/first --out report.html
    tapfm report runs/first --predictions predictions/first --out report.html
    tapfm report studies/first --out study.html

    One HTML file that loads nothing else: slides and labels, curves, metrics
    with intervals, ROC, precision and calibration, every slide to sort and
    filter, heatmaps and tiles, failures, settings, licence.

    Evaluations and predictions by the same weights are found automatically
    inside the run folder, next to runs/, and in evaluations/ and predictions/
    next to it. The page names slides and patients: think before you send it.
    """
    made = workflow.make_report.run(options, stderr_console())
    from tapfm.results.formatting import format_bytes

    for note in made.notes:
        print_line(stderr_console(), note, "yellow")
    console = stdout_console()
    print_line(console, f"Written: {made.path} ({format_bytes(made.bytes)})")
    for line in made.found:
        print_line(console, f"  {line}")
