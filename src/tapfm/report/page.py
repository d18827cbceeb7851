"""The page as one HTML file: nothing in it is fetched, and nothing in it runs but its own script."""

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
_GENERATOR = "tapfm report"  # marks a page of ours, which may be written over


def render(page: Page) -> bytes:
    """Write the page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawing = partial(html_figure, numbers=itertools.count(1))
    environment.globals |= {"absent": MISSING, "html_table": html_table, "html_figure": drawing}
    environment.filters |= {"number": format_number}
    style, script = (Markup((_TEMPLATES / name).read_text("utf-8")) for name in ("report.css", "report.js"))
    html = environment.get_template("report.html").render(
        page=page,
        sections=list(zip(_keys_of([section.title for section in page.sections]), page.sections, strict=True)),
        style=style,
        script=script,
        policy=_policy(style, script),
        generator=_GENERATOR,
    )
    return html.encode(errors="replace")  # names of files may hold what is no text


def _policy(style: str, script: str) -> str:
    """Forbid the browser everything but this style, this script and pictures that are in the page."""
    allowed = [f"style-src '{_digest(style)}'", f"script-src '{_digest(script)}'", "img-src data:"]
    return "; ".join(["default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"])


def _digest(text: str) -> str:
    """Name a style or script by its content."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _keys_of(titles: list[str]) -> list[str]:
    """Make an id of each title, all of them different."""
    keys: list[str] = []
    for title in titles:
        key = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
        numbered = (f"{key}-{number}" for number in itertools.count(2))
        keys.append(key if key not in keys else next(each for each in numbered if each not in keys))
    return keys


def is_ours(path: Path) -> bool:
    """Say whether a file is a page that `tapfm report` wrote."""
    with path.open("rb") as file:
        return f'<meta name="generator" content="{_GENERATOR}'.encode() in file.read(4096)
