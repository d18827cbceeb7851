"""Listening socket, address and event loop of the viewer."""

from __future__ import annotations

import socket

import uvicorn
from starlette.types import ASGIApp

from tapfm.errors import InputError
from tapfm.viewer.access_control import TOKEN_PARAMETER, AccessPolicy

_FIRST_PORT = 8000
_PORTS_TO_TRY = 50
_SHUTDOWN_TIMEOUT_S = 2  # for responses in progress


def open_socket(host: str, port: int | None) -> socket.socket:
    """Listen on a port (0: any free port). Without a port, use the first free one from 8000."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or too long part of a host name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"Cannot listen on --host {host}: it cannot be resolved to an IP address ({reason}).",
            hint="Use --host 127.0.0.1 for this machine only, or --host 0.0.0.0 to allow other machines.",
        ) from error
    ports = [port] if port is not None else [*range(_FIRST_PORT, _FIRST_PORT + _PORTS_TO_TRY), 0]
    last_error: OSError | None = None
    for candidate in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], candidate))
            listener.listen(128)
        except (OSError, OverflowError) as error:
            listener.close()
            last_error = error if isinstance(error, OSError) else OSError(0, str(error))
        else:
            return listener
    raise InputError(
        f"Cannot listen on {host}{'' if port is None else f', port {port}'} ({last_error and last_error.strerror}).",
        hint="Pass another --host or --port. Without --port, the first free port from 8000 is used.",
    )


def viewer_url(host: str, port: int, policy: AccessPolicy) -> str:
    """Return the URL to open in a browser, with the token if one is required."""
    name = host
    if host in ("0.0.0.0", "::"):  # all addresses of this machine: other machines can use its host name
        name = socket.gethostname()
    if ":" in name:
        name = f"[{name}]"
    query = f"?{TOKEN_PARAMETER}={policy.token}" if policy.token is not None else ""
    return f"http://{name}:{port}/{query}"


def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serve requests until SIGINT or SIGTERM. The signal is raised again after the shutdown."""
    config = uvicorn.Config(
        app,
        log_config=None,  # uvicorn must not configure logging: Ctrl-C during that would break its locks
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
    )
    with listener:
        uvicorn.Server(config).run(sockets=[listener])
