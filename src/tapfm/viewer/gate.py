"""Who may ask: every request passes here before anything else looks at it, and every answer on its way out.

A page of another site, open in the same browser, could ask a server on this machine; a name that is made to point here
(DNS rebinding) would even let it read the answers. So only names of this machine are answered, requests that come from
other sites are not, and nothing is shared across origins. Bound to more than this machine, a token is needed.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import socket
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
TOKEN = "token"  # in the address of the first page
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Admission:
    """Which names of the host are answered, and the token that is needed, if one is."""

    hosts: frozenset[str] = _LOOPBACK
    any_address: bool = False  # numbers cannot be rebound; a machine may have several
    token: str | None = None
    cookie: str = "tapfm-view"

    @classmethod
    def of(cls, host: str, port: int) -> Admission:
        """Decide by the address that is bound: this machine alone, or others too."""
        if is_loopback(host):
            return cls(_LOOPBACK | {host.lower()})
        names = {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        # the port is in the cookie's name, as cookies are shared between the ports of a host
        return cls(_LOOPBACK | names, True, secrets.token_urlsafe(24), f"tapfm-view-{port}")

    def knows(self, host: str) -> bool:
        """Say whether a Host header names this machine. The port is not compared: it may be forwarded by ssh."""
        numbered = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d+)?", host.lower())
        if numbered is None:
            return False
        name = numbered[1] or numbered[2]
        return name in self.hosts or (self.any_address and _is_address(name))

    def opens(self, given: str | None) -> bool:
        """Compare a token, in a time that does not tell how much of it is right."""
        return self.token is None or (given is not None and secrets.compare_digest(given.encode(), self.token.encode()))


def is_loopback(host: str) -> bool:
    """Say whether an address is this machine's own."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(text: str) -> bool:
    """Tell an address from a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class Gate:
    """Stands around the application."""

    def __init__(self, application: ASGIApp, admission: Admission) -> None:
        self.application, self.admission = application, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
        elif scope["type"] == "http":
            await self.ask(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        headers = Headers(scope=scope)
        by_address = self.token_of_address(scope)
        if not self.admission.knows(headers.get("host", "")):
            await _refuse(send, 421, "This server does not answer for that host.")
        elif scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, "Only GET is answered.")
        elif _comes_from_elsewhere(headers):
            await _refuse(send, 403, "Requests of other pages are not answered.")
        elif not self.admission.opens(by_address or self.token_of_cookie(headers)):
            await _refuse(send, 401, "A token is needed: open the address that tapfm view has printed.")
        else:
            # HEAD is answered as GET; the server leaves the body out
            await self.application({**scope, "method": "GET"}, receive, self.outward(send, by_address))

    def token_of_address(self, scope: Scope) -> str | None:
        """Read the token from the address of the first page; nothing else takes it from there."""
        if scope["path"] != "/":
            return None
        return parse_qs(scope.get("query_string", b"").decode("latin-1")).get(TOKEN, [None])[0]

    def token_of_cookie(self, headers: Headers) -> str | None:
        """Read the token that an earlier answer left in the browser."""
        # leniently: other servers of this host, at other ports, may have left cookies that are not well formed
        return cookie_parser(headers.get("cookie", "")).get(self.admission.cookie)

    def outward(self, send: Send, by_address: str | None) -> Send:
        """Add the headers of every answer, and the cookie where the token came with the address."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if self.admission.token is not None and by_address is not None:
                    # not a redirect: after a link from elsewhere, a strict cookie is not sent along with one
                    morsel = f"{self.admission.cookie}={self.admission.token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("set-cookie", morsel)
            await send(message)

        return send_with_headers


def _comes_from_elsewhere(headers: Headers) -> bool:
    """Say whether another page asks. A link that leads here is none; a browser too old to say so is trusted."""
    origin, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
    return origin not in ("none", "same-origin") and mode != "navigate"


async def _refuse(send: Send, status: int, reason: str) -> None:
    """Answer a request that may not come in."""
    body = json.dumps({"error": reason}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Cache-Control": "no-store"}
    every = [(name.lower().encode(), value.encode()) for name, value in {**_HEADERS, **headers}.items()]
    await send({"type": "http.response.start", "status": status, "headers": every})
    await send({"type": "http.response.body", "body": body})
