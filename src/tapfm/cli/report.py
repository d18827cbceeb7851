"""`tapfm report`."""

from __future__ import annotations

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console, stdout_console
from tapfm.workflows import report as workflow


@command(workflow.ReportOptions)
def report(options: workflow.ReportOptions) -> None:
    """Write an HTML report of one or more runs, or of a study.

    The report is a single file that needs no network: cohort, training curves,
    metrics with confidence intervals, ROC, precision-recall and calibration
    plots, a table of all slides, heatmaps, tiles, failures, settings and
    licence. Evaluations and predictions of the same weights are found
    automatically in the run folder, in the folder that contains runs/, and in
    its subfolders evaluations/ and predictions/. The report contains slide and
    patient ids: check whether you may share them.

    \b
    Examples:
      tapfm report runs/first --out report.html
      tapfm report runs/first --predictions predictions/first --out report.html
      tapfm report studies/first --out study.html
    """
    result = workflow.make_report.run(options, stderr_console())
    from tapfm.results.formatting import format_bytes

    for note in result.notes:
        print_line(stderr_console(), note, "yellow")
    console = stdout_console()
    print_line(console, f"Wrote {result.path} ({format_bytes(result.bytes)}).")
    print_line(console, "Sources:")
    for line in result.sources:
        print_line(console, f"  {line}")
