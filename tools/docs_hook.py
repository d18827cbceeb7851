"""mkdocs hook: adds pages from outside docs/, and rewrites links that leave docs/.

Pages link to files of the repository, which a code-hosting site shows but the docs site does not contain. Such a link
becomes plain text. CONTRIBUTING.md and CHANGELOG.md become pages. A broken link stays unchanged, and mkdocs reports it.
A `<` is escaped, as in <z, g>, unless it starts a <div>, an HTML comment or a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HOME = "index.md"
# files of the repository that become pages, with their names on the site
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# files of the repository that have a corresponding page on the site
SITE_PAGES = PAGES | {"README.md": HOME}

# Matches code (left unchanged), links (whose text may contain code), and `<` that does not start a div, comment or URL.
_SPAN = re.compile(
    r"^(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^(?P=fence)[`~]*[ ]*$"
    r"|^ {4}[^\n]*$"
    r"|(?P<ticks>`+)(?!`)(?:(?!\n\n).)*?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<link>(?P<image>!?)\[(?P<text>(?:[^\[\]`]|`[^`]*`|!\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^()\s]+)\))"
    r"|(?P<less_than><)(?!/?div\b|!--|https?://)",
    re.MULTILINE | re.DOTALL,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    root = _repository_root(config)
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(root / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    docs, uri = Path(config.docs_dir), page.file.src_uri
    if uri == HOME:
        page.meta["hide"] = ["navigation", "toc"]  # set here, because code-hosting sites would show it on the page
    outside_name = next((name for name, page_uri in PAGES.items() if page_uri == uri), None)
    source = docs / uri if outside_name is None else _repository_root(config) / outside_name
    return rewrite_links(markdown, source, uri, docs, lambda each: files.get_file_from_path(each) is not None)


def _repository_root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def rewrite_links(markdown: str, source: Path, uri: str, docs: Path, is_page: Callable[[str], bool]) -> str:
    """Return a page with its links rewritten. `source` is its file, `uri` its name on the site."""

    def rewrite(match: re.Match[str]) -> str:
        if match["less_than"] is not None:
            return "&lt;"
        if match["link"] is None:
            return match[0]
        return _rewrite_link(match, source, uri, docs, is_page)

    return _SPAN.sub(rewrite, markdown)


def _rewrite_link(match: re.Match[str], source: Path, uri: str, docs: Path, is_page: Callable[[str], bool]) -> str:
    """Return a link to the corresponding page of the site, or plain text if there is none."""
    address, hash_sign, anchor = match["target"].partition("#")
    if not address or re.match(r"[a-z][a-z0-9+.-]*:|/", address, re.IGNORECASE):
        return match[0]
    root = docs.parent
    target = Path(os.path.normpath(source.parent / unquote(address)))
    if not target.exists() or not target.is_relative_to(root):
        return match[0]  # mkdocs reports the broken link
    repository_path = target.relative_to(root).as_posix()
    site_page = SITE_PAGES.get(repository_path) or (
        target.relative_to(docs).as_posix() if target.is_relative_to(docs) else None
    )
    if site_page is not None and is_page(site_page):
        relative = os.path.relpath(site_page, Path(uri).parent)
        return f"{match['image']}[{match['text']}]({relative}{hash_sign}{anchor})"
    text = match["text"]
    return text if text.startswith("`") and text.endswith("`") else f"{text} (`{repository_path}`)"
