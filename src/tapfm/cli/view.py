"""The command that shows slides. What it needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def view(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="DIR|SLIDE...", help="What `tapfm predict` wrote; folders of slides; slides."),
    ],
    slides: Annotated[
        Path | None,
        typer.Option("--slides", metavar="DIR", help="Where to look for slides that moved since their prediction."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", min=0, max=65535, help="0: any.", show_default="the next free from 8000"),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Another one than this machine's own needs a token.")
    ] = "127.0.0.1",
    browser: Annotated[
        bool | None,
        typer.Option("--open/--no-browser", help="Open the page.", show_default="where there is a desktop"),
    ] = None,
) -> None:
    """Look at slides and at what a model made of them, in a browser.

    \b
    tapfm view predicted
    tapfm view predicted --slides /mnt/new/place --port 8080
    tapfm view case-17.svs more-slides/

    Slides at their own resolution, a map for each target over them, the numbers
    of each tile; ? on the page lists the keys. Only these slides are served,
    to this machine only, and nothing is fetched from elsewhere. From another
    machine: ssh -L 8000:localhost:8000 HOST, then open the same address there.
    --host 0.0.0.0 lets others in who have the token of the printed address;
    what they see travels unencrypted.

    Ctrl-C ends it.
    """
    from tapfm.viewer.assets import read_assets
    from tapfm.viewer.collection import collect

    assets = read_assets()
    collection = collect(sources, slides)
    from tapfm.runtime.messages import counted
    from tapfm.viewer.gate import Admission, is_loopback
    from tapfm.viewer.server import make_server
    from tapfm.viewer.serving import address_of, open_socket, serve

    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    listener = open_socket(host, port)
    bound_port = listener.getsockname()[1]
    admission = Admission.of(host, bound_port)
    address = address_of(host, bound_port, admission)
    server = make_server(collection, assets, admission)
    if collection.lost:
        messages.print(
            f"{counted(len(collection.lost), 'slide')} not where they were: only their numbers are shown. "
            "--slides DIR says where they are now.",
            style="bold yellow",
            markup=False,
        )
    with suppress(KeyboardInterrupt):  # the way to end it: no failure
        messages.print(f"{counted(len(collection.slides), 'slide')}. Ctrl-C ends it. Open:", markup=False)
        typer.echo(address)
        sys.stdout.flush()  # for whoever waits for it in a pipe
        if not is_loopback(host):
            messages.print("Whoever has this address can look; what is sent is not encrypted.", markup=False)
        if has_desktop() if browser is None else browser:
            typer.launch(address)
        serve(server, listener)


def has_desktop() -> bool:
    """Say whether somebody sits in front of this machine, not at the far end of a connection."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
