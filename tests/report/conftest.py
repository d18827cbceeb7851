"""Browser fixtures for the tests of reports."""

from browser import chromium, page  # noqa: F401
