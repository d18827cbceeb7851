"""Render a report as a single HTML file that loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tapfm.report.content import Page
from tapfm.results.formatting import MISSING, format_number
from tapfm.results.html import html_figure, html_table

_TEMPLATES = Path(__file__).parent / "templates"
_GENERATOR = "tapfm report"  # identifies reports, which may be overwritten


def render_page(page: Page) -> bytes:
    """Return the page as HTML in UTF-8."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbered_figure = partial(html_figure, unique_numbers=itertools.count(1))
    environment.globals |= {"missing": MISSING, "html_table": html_table, "html_figure": numbered_figure}
    environment.filters |= {"number": format_number}
    style, script = (Markup((_TEMPLATES / name).read_text("utf-8")) for name in ("report.css", "report.js"))
    html = environment.get_template("report.html").render(
        page=page,
        sections=list(zip(_make_ids([section.title for section in page.sections]), page.sections, strict=True)),
        style=style,
        script=script,
        policy=_content_security_policy(style, script),
        generator=_GENERATOR,
    )
    return html.encode(errors="replace")  # file names may contain invalid Unicode


def _content_security_policy(style: str, script: str) -> str:
    """Return a policy that allows only this style, this script and embedded images."""
    allowed = [f"style-src '{_sha256_source(style)}'", f"script-src '{_sha256_source(script)}'", "img-src data:"]
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def _sha256_source(text: str) -> str:
    """Return the hash source of a Content-Security-Policy for an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _make_ids(titles: list[str]) -> list[str]:
    """Return a unique HTML id for each title."""
    ids: list[str] = []
    for title in titles:
        base = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        numbered = (f"{base}-{number}" for number in itertools.count(2))
        ids.append(base if base not in ids else next(each for each in numbered if each not in ids))
    return ids


def is_report_file(path: Path) -> bool:
    """Return whether a file was written by `tapfm report`."""
    with path.open("rb") as file:
        return f'<meta name="generator" content="{_GENERATOR}'.encode() in file.read(4096)
