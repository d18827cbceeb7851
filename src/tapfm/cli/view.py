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

    Starts a web server that shows slides at full resolution, the heatmap of
    each target, and the values of each tile. Press ? on the page for keyboard
    shortcuts. Only the given slides are served, and by default only to this
    machine; no network is needed. Press Ctrl-C to stop the server.

    To view slides of a remote machine, forward the port with
    `ssh -L 8000:localhost:8000 HOST` and open the same address. With --host
    0.0.0.0, everyone who has the printed address with its token can connect;
    the connection is not encrypted.

    \b
    Examples:
      tapfm view predicted
      tapfm view predicted --slides /mnt/new/place --port 8080
      tapfm view case-17.svs more-slides/
    """
    console = stderr_console()
    viewer = workflow.view.run(options, console)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if viewer.missing_slides:
        print_line(
            console,
            f"{format_count(viewer.missing_slides, 'slide')} not found; only the predictions are shown. "
            "If the slides were moved, pass their folder with --slides DIR.",
            "bold yellow",
        )
    with suppress(KeyboardInterrupt):  # the normal way to stop it
        print_line(console, f"Serving {format_count(viewer.slides, 'slide')}. Press Ctrl-C to stop. Open:")
        typer.echo(viewer.address)
        sys.stdout.flush()  # for a program that reads it from a pipe
        if viewer.is_public:
            print_line(console, "Anyone who has this address can view the slides; the connection is not encrypted.")
        if viewer.open_browser:
            typer.launch(viewer.address)
        viewer.serve()
