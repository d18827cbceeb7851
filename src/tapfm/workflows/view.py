"""`tapfm view`: slides and predictions in a browser."""

from __future__ import annotations

import os
import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from tapfm.runtime.options import Argument, Option, command_function, options

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp


@options
class ViewOptions:
    """Options of `tapfm view`."""

    sources: Annotated[
        tuple[Path, ...], Argument("Output of tapfm predict; folders of slides; slides.", metavar="DIR|SLIDE...")
    ]
    _: KW_ONLY
    slides: Annotated[
        Path | None, Option("Where to look for slides that moved since their prediction.", metavar="DIR")
    ] = None
    port: Annotated[
        int | None,
        Option(
            "Port; 0 takes any free one.", metavar="N", default="the next free from 8000", at_least=0, at_most=65535
        ),
    ] = None
    host: Annotated[str, Option("An address that other machines can reach needs a token.", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    browser: Annotated[
        bool | None, Option("Open the page.", flags="--open/--no-browser", default="where there is a desktop")
    ] = None


@dataclass(frozen=True)
class Viewer:
    """A viewer that listens already; it answers within `serve`."""

    address: str  # with the token, where one is needed
    slides: int
    missing_slides: int  # only their numbers are shown
    is_public: bool  # other machines can reach it
    open_browser: bool
    _server: ASGIApp
    _listener: socket.socket

    def serve(self) -> None:
        """Answer requests until Ctrl-C or SIGTERM."""
        from tapfm.viewer.serving import serve

        serve(self._server, self._listener)


@command_function(ViewOptions)
def view(options: ViewOptions, console: Console) -> Viewer:  # noqa: ARG001 - every verb has a console
    """Prepare a viewer of slides and predictions: open its `address` while its `serve()` runs."""
    from tapfm.viewer.assets import read_assets
    from tapfm.viewer.collection import collect_viewed_slides

    assets = read_assets()
    collection = collect_viewed_slides(options.sources, options.slides)

    from tapfm.viewer.gate import Admission, is_loopback
    from tapfm.viewer.server import make_server
    from tapfm.viewer.serving import address_of, open_socket

    listener = open_socket(options.host, options.port)
    port = listener.getsockname()[1]
    admission = Admission.of(options.host, port)
    return Viewer(
        address_of(options.host, port, admission),
        slides=len(collection.slides),
        missing_slides=len(collection.lost),
        is_public=not is_loopback(options.host),
        open_browser=_has_desktop() if options.browser is None else options.browser,
        _server=make_server(collection, assets, admission),
        _listener=listener,
    )


def _has_desktop() -> bool:
    """Return whether somebody sits in front of this machine, not at the far end of a connection."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
