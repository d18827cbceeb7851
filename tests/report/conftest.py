"""Pages in a browser, for the tests of a report."""

from browser import chromium, page  # noqa: F401
