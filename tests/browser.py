"""Pages in a real browser: Chromium through playwright.

    from browser import chromium, page  # noqa: F401

    def test_of_a_page(page: Page) -> None:
        page.goto(...)

`page` fails its test where the page wrote an error or a warning to the console, threw, asked for something that was not
there, or asked for anything that is not on this machine. Without Chromium these tests are skipped and say why. A test
that needs a page of its own kind (a phone, a dark one, two at once) opens it by `watched_page(chromium, viewport=...)`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, Route, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HERE = {"127.0.0.1", "localhost", "::1"}
# In a container there is neither a sandbox to enter nor a GPU; and nothing of the browser's own may go out.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def chromium_path() -> Path | None:
    """Find the browser in PATH."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    return Path(found) if found else None


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium without a window; end it."""
    path = chromium_path()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is in PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield started
        finally:
            started.close()


@contextmanager
def watched_page(chromium: Browser, *, expected: tuple[str, ...] = (), **options: Any) -> Iterator[Page]:
    """Open a page that may only ask this machine, and fail at the end with what went wrong on it.

    `options` are those of playwright's `new_context` (viewport, color_scheme, ...). What contains one of `expected` is
    no failure: a test of refused requests says so by it.
    """
    wrong: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"console {message.type}: {message.text} ({message.location.get('url')})")

    def on_response(response: Response) -> None:
        if response.status >= 400:
            wrong.append(f"{response.status} for {response.url}")

    def on_failed_request(request: Request) -> None:
        # a picture that is no longer wanted is given up by the page itself, as when a viewer zooms on
        if request.failure != "net::ERR_ABORTED":
            wrong.append(f"no answer ({request.failure}): {request.url}")

    def guard(route: Route) -> None:
        parts = urlsplit(route.request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in HERE:
            wrong.append(f"a request that leaves this machine: {route.request.url}")
            route.abort()
        else:
            route.continue_()

    context = chromium.new_context(**options)
    try:
        opened = context.new_page()
        opened.set_default_timeout(20_000)
        opened.on("console", on_console)
        opened.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
        opened.on("response", on_response)
        opened.on("requestfailed", on_failed_request)
        opened.route("**/*", guard)
        yield opened
        opened.unroute_all(behavior="wait")
    finally:
        context.close()
    unexpected = [each for each in wrong if not any(part in each for part in expected)]
    assert not unexpected, "\n".join(unexpected)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Give one browser to the tests of a file: each page has a context of its own."""
    with browser() as started:
        yield started


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """Give a page on a desk."""
    with watched_page(chromium, viewport={"width": 1280, "height": 900}) as opened:
        yield opened
