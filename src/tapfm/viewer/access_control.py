"""Access control of the viewer: checks every request and adds security headers to every response.

A page of another site that is open in the same browser can send requests to a server on this machine. With DNS
rebinding, a host name that is made to resolve to this machine, it could even read the responses. Therefore the server
answers only requests for its own host names, rejects requests from other sites, and sends no CORS headers. If other
machines can connect, a token is required.
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

_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
TOKEN_PARAMETER = "token"  # query parameter of the printed address
_SECURITY_HEADERS = {
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
class AccessPolicy:
    """The accepted host names, and the token if one is required."""

    hosts: frozenset[str] = _LOOPBACK_HOSTS
    allow_ip_addresses: bool = False  # accept any IP address as host; DNS rebinding needs a host name
    token: str | None = None
    cookie_name: str = "tapfm-view"

    @classmethod
    def for_host(cls, host: str, port: int) -> AccessPolicy:
        """Return the policy of a server that listens on `host`: with a token unless it is a loopback address."""
        if is_loopback(host):
            return cls(_LOOPBACK_HOSTS | {host.lower()})
        names = {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        # Browsers share cookies between the ports of a host, so the name contains the port.
        return cls(_LOOPBACK_HOSTS | names, True, secrets.token_urlsafe(24), f"tapfm-view-{port}")

    def accepts_host(self, header: str) -> bool:
        """Return whether a Host header has an accepted host name, or any IP address if `allow_ip_addresses`.

        Ports are ignored, because ssh may forward a different one.
        """
        match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::\d+)?", header.lower())
        if match is None:
            return False
        host = match[1] or match[2]
        return host in self.hosts or (self.allow_ip_addresses and _is_ip_address(host))

    def accepts_token(self, token: str | None) -> bool:
        """Return whether a token is correct or none is required. Compares in constant time."""
        return self.token is None or (token is not None and secrets.compare_digest(token.encode(), self.token.encode()))


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached only from this machine."""
    return host.lower() == "localhost" or (_is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class AccessControlMiddleware:
    """ASGI middleware that enforces an access policy."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self.app, self.policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HTTP requests and reject WebSockets."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._handle_http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        url_token = _token_from_url(scope)
        if not self.policy.accepts_host(headers.get("host", "")):
            await _send_error(send, 421, "This server does not accept requests for this host name.")
        elif scope["method"] not in ("GET", "HEAD"):
            await _send_error(send, 405, "Only GET and HEAD requests are allowed.")
        elif _is_cross_site(headers):
            await _send_error(send, 403, "Requests from other sites are not allowed.")
        elif not self.policy.accepts_token(url_token or self._token_from_cookie(headers)):
            await _send_error(
                send, 401, "The token is missing or wrong. Open the full address that tapfm view printed."
            )
        else:
            # A HEAD request is handled as GET; the server omits the body.
            await self.app({**scope, "method": "GET"}, receive, self._add_headers(send, url_token))

    def _token_from_cookie(self, headers: Headers) -> str | None:
        # Starlette's parser tolerates malformed cookies, which other servers on this host may have set.
        return cookie_parser(headers.get("cookie", "")).get(self.policy.cookie_name)

    def _add_headers(self, send: Send, url_token: str | None) -> Send:
        """Return a `send` that adds the security headers, and the token cookie if the URL contained the token."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_SECURITY_HEADERS)
                if self.policy.token is not None and url_token is not None:
                    # Set without a redirect: browsers would not send a SameSite=Strict cookie to its target if the
                    # user came from a link on another site.
                    cookie = f"{self.policy.cookie_name}={self.policy.token}; Path=/; HttpOnly; SameSite=Strict"
                    headers.append("set-cookie", cookie)
            await send(message)

        return send_with_headers


def _token_from_url(scope: Scope) -> str | None:
    """Return the token in the URL of the index page. Other URLs cannot carry it."""
    if scope["path"] != "/":
        return None
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get(TOKEN_PARAMETER, [None])[0]


def _is_cross_site(headers: Headers) -> bool:
    """Return whether a page of another site sent the request.

    Following a link to the viewer is allowed. Old browsers that do not send Sec-Fetch headers are trusted.
    """
    site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
    return site not in ("none", "same-origin") and mode != "navigate"


async def _send_error(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Cache-Control": "no-store"}
    encoded = [(name.lower().encode(), value.encode()) for name, value in {**_SECURITY_HEADERS, **headers}.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
