"""`tapfm view`: view slides and predictions in a browser."""

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
        tuple[Path, ...],
        Argument(
            "Output folders of `tapfm predict`, slide files, folders of slides or cohort tables.",
            metavar="DIR|SLIDE|COHORT.csv...",
        ),
    ]
    _: KW_ONLY
    slides: Annotated[
        Path | None,
        Option(
            "Folder to search for the slides of a cohort table, or for slides that were moved after their prediction.",
            metavar="DIR",
        ),
    ] = None
    port: Annotated[
        int | None,
        Option(
            "TCP port to listen on. 0: any free port.",
            metavar="N",
            show_default="the first free port from 8000",
            at_least=0,
            at_most=65535,
        ),
    ] = None
    host: Annotated[
        str,
        Option(
            "Address to listen on. With 0.0.0.0, other machines can connect; the printed address then contains a "
            "token that they need.",
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1"
    browser: Annotated[
        bool | None,
        Option(
            "Open the page in a browser, or only print its address.",
            flag="--open/--no-browser",
            show_default="open, if this machine has a desktop",
        ),
    ] = None


@dataclass(frozen=True)
class Viewer:
    """A viewer with an open socket. Requests are answered while `serve` runs."""

    address: str  # includes the token if one is needed
    slides: int
    missing_slides: int  # slides whose file was not found; only their predictions are shown
    is_public: bool  # other machines can connect
    open_browser: bool
    _app: ASGIApp
    _listener: socket.socket

    def serve(self) -> None:
        """Answer requests until Ctrl-C or SIGTERM."""
        from tapfm.viewer.server import serve

        serve(self._app, self._listener)


@command_function(ViewOptions)
def view(options: ViewOptions, console: Console) -> Viewer:  # noqa: ARG001 - required by command_function
    """Return a viewer of slides and predictions. Open its `address` while its `serve()` runs."""
    from tapfm.viewer.assets import read_assets
    from tapfm.viewer.collection import collect_slides

    assets = read_assets()
    collection = collect_slides(options.sources, options.slides)

    from tapfm.viewer.access_control import AccessPolicy, is_loopback
    from tapfm.viewer.app import create_app
    from tapfm.viewer.server import open_socket, viewer_url

    listener = open_socket(options.host, options.port)
    port = listener.getsockname()[1]
    policy = AccessPolicy.for_host(options.host, port)
    return Viewer(
        viewer_url(options.host, port, policy),
        slides=len(collection.slides),
        missing_slides=len(collection.missing_slide_ids),
        is_public=not is_loopback(options.host),
        open_browser=_has_desktop() if options.browser is None else options.browser,
        _app=create_app(collection, assets, policy),
        _listener=listener,
    )


def _has_desktop() -> bool:
    """Return whether to open a browser by default: in a terminal of a local session with a display."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))
