"""Fixtures for tests in Chromium, controlled by playwright.

    from browser import chromium, page  # noqa: F401

    def test_page(page: Page) -> None:
        page.goto(...)

The test fails if the page writes an error or a warning to the console, throws an exception, requests a missing file, or
sends a request to another machine. Tests are skipped if Chromium is not installed. For other page options (phone, dark
theme, several pages), use `open_checked_page(chromium, viewport=...)`.
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

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
# Containers have neither a sandbox nor a GPU, and the browser itself must not use the network.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def find_chromium() -> Path | None:
    """Return the path of the browser, or None if it is not in PATH."""
    found = next((path for path in map(shutil.which, EXECUTABLES) if path), None)
    return Path(found) if found else None


@contextmanager
def launch_browser() -> Iterator[Browser]:
    """Run headless Chromium, or skip the test if it is not installed."""
    path = find_chromium()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(EXECUTABLES)} is in PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield started
        finally:
            started.close()


@contextmanager
def open_checked_page(chromium: Browser, *, expected: tuple[str, ...] = (), **options: Any) -> Iterator[Page]:
    """Open a page that can only reach this machine, and fail at the end if any errors occurred.

    options: those of playwright's `new_context` (viewport, color_scheme, ...).
    expected: errors that contain one of these texts are ignored.
    """
    errors: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            errors.append(f"console {message.type}: {message.text} ({message.location.get('url')})")

    def on_response(response: Response) -> None:
        if response.status >= 400:
            errors.append(f"{response.status} for {response.url}")

    def on_failed_request(request: Request) -> None:
        # the page cancels requests for images that it no longer needs, for example after zooming
        if request.failure != "net::ERR_ABORTED":
            errors.append(f"request failed ({request.failure}): {request.url}")

    def block_other_hosts(route: Route) -> None:
        parts = urlsplit(route.request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in LOCAL_HOSTS:
            errors.append(f"request to another machine: {route.request.url}")
            route.abort()
        else:
            route.continue_()

    context = chromium.new_context(**options)
    try:
        opened = context.new_page()
        opened.set_default_timeout(20_000)
        opened.on("console", on_console)
        opened.on("pageerror", lambda error: errors.append(f"uncaught exception: {error}"))
        opened.on("response", on_response)
        opened.on("requestfailed", on_failed_request)
        opened.route("**/*", block_other_hosts)
        yield opened
        opened.unroute_all(behavior="wait")
    finally:
        context.close()
    unexpected = [error for error in errors if not any(text in error for text in expected)]
    assert not unexpected, "\n".join(unexpected)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all tests of a file."""
    with launch_browser() as started:
        yield started


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page with the size of a desktop screen."""
    with open_checked_page(chromium, viewport={"width": 1280, "height": 900}) as opened:
        yield opened
