"""A socket that is really ours, and a server on it that ends quietly."""

from __future__ import annotations

import socket

import uvicorn
from starlette.types import ASGIApp

from tapfm.errors import InputError
from tapfm.viewer.gate import TOKEN, Admission

_FIRST_PORT = 8000
_PORTS_TRIED = 50
_GRACE_S = 2  # for answers that are under way when the server is stopped


def open_socket(host: str, port: int | None) -> socket.socket:
    """Listen at the port that was asked for (0: any), or at the first free one from 8000 on."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(
            f"{host} is no address of this machine ({error.strerror}).", hint="--host 127.0.0.1 is this machine alone."
        ) from error
    tried = [port] if port is not None else [*range(_FIRST_PORT, _FIRST_PORT + _PORTS_TRIED), 0]
    reason: OSError | None = None
    for each in tried:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], each))
            listener.listen(128)
        except (OSError, OverflowError) as error:
            listener.close()
            reason = error if isinstance(error, OSError) else OSError(0, str(error))
        else:
            return listener
    raise InputError(
        f"Port {port} of {host} cannot be used ({reason and reason.strerror}).",
        hint="Leave --port out to take the next free one.",
    )


def address_of(host: str, port: int, admission: Admission) -> str:
    """Write the address to open; with the token, where one is needed."""
    name = host
    if host in ("0.0.0.0", "::"):  # every address of this machine: its name is what others can type
        name = socket.gethostname()
    if ":" in name:
        name = f"[{name}]"
    token = f"?{TOKEN}={admission.token}" if admission.token is not None else ""
    return f"http://{name}:{port}/{token}"


def serve(application: ASGIApp, listener: socket.socket) -> None:
    """Answer until a signal; it is raised again when all is closed."""
    config = uvicorn.Config(
        application,
        log_config=None,  # logging is configured already, and Ctrl-C while it is configured again breaks its locks
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_GRACE_S,
    )
    with listener:
        uvicorn.Server(config).run(sockets=[listener])
