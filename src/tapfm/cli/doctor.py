"""`tapfm doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tapfm.cli.command import command
from tapfm.cli.console import print_json, stderr_console, stdout_console
from tapfm.workflows import doctor as workflow

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "broken": "[bold red]broken[/]"}


@command(workflow.DoctorOptions)
def doctor(
    options: workflow.DoctorOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check the installation and this machine, and print how to fix problems.

    Checks Python, packages, GPU, OpenSlide, the viewer, the Hugging Face token
    and which gated encoders it gives access to, the SHA-256 of cached weights,
    and free disk space.

    \b
    Examples:
      tapfm doctor
      tapfm doctor --offline   # without contacting the Hugging Face Hub

    Exit code 1 if something required does not work.
    """
    findings = workflow.doctor.run(options, stderr_console())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print_findings(findings, stdout_console())
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: Sequence[workflow.Finding], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("advice", overflow="fold")
    for finding in findings:
        table.add_row(_MARKS[finding.status], finding.subject, finding.found, finding.advice)
    console.print(table)
    broken = [finding.subject for finding in findings if finding.status == "broken"]
    if broken:
        console.print(f"\n[bold red]Broken:[/] {', '.join(broken)}. Follow the advice, then run again: tapfm doctor")
    else:
        console.print("\nEverything required works.")
