"""`tapfm view`."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

import typer

from tapfm.cli.command import command
from tapfm.cli.console import print_line, stderr_console
from tapfm.runtime.messages import format_count
from tapfm.workflows import view as workflow


@command(workflow.ViewOptions)
def view(options: workflow.ViewOptions) -> None:
    """View slides and predictions in a browser.

    \b
    tapfm view predicted
    tapfm view predicted --slides /mnt/new/place --port 8080
    tapfm view case-17.svs more-slides/

    Slides at full resolution, a heatmap for each target over them, the numbers
    of each tile; ? on the page lists the keys. Only these slides are served,
    to this machine only, and nothing is fetched from elsewhere. From another
    machine: ssh -L 8000:localhost:8000 HOST, then open the same address there.
    --host 0.0.0.0 lets others in who have the token of the printed address;
    what they see travels unencrypted.

    Ctrl-C stops it.
    """
    console = stderr_console()
    viewer = workflow.view.run(options, console)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if viewer.missing_slides:
        print_line(
            console,
            f"{format_count(viewer.missing_slides, 'slide')} not found: only their numbers are shown. "
            "Pass --slides DIR to say where they are now.",
            "bold yellow",
        )
    with suppress(KeyboardInterrupt):  # the way to stop it: not a failure
        print_line(console, f"{format_count(viewer.slides, 'slide')}. Press Ctrl-C to stop. Open:")
        typer.echo(viewer.address)
        sys.stdout.flush()  # for a program that reads it from a pipe
        if viewer.is_public:
            print_line(console, "Anyone who has this address can view the slides; the connection is not encrypted.")
        if viewer.open_browser:
            typer.launch(viewer.address)
        viewer.serve()
