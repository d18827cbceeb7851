"""What mkdocs is told besides mkdocs.yml: pages that lie outside docs/, and links that lead out of it.

Pages link to files of the repository, which a code-hosting page shows and the site does not have. Such a link becomes
text. CONTRIBUTING.md and CHANGELOG.md become pages. A link to what is not there at all is left as it is: mkdocs
refuses it. In words such as <z, g> a code-hosting page sees no tag, and the site is told that there is none.
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
# files of the repository that are pages of the site, by their names there
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# the site's own form of a file that it does not show
INSTEAD = PAGES | {"README.md": HOME}

# code is left as it is; of a link, the text may hold code; a sign that begins no tag of ours is a sign
SPAN = re.compile(
    r"^(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^(?P=fence)[`~]*[ ]*$"
    r"|^ {4}[^\n]*$"
    r"|(?P<ticks>`+)(?!`)(?:(?!\n\n).)*?(?<!`)(?P=ticks)(?!`)"
    r"|(?P<link>(?P<picture>!?)\[(?P<text>(?:[^\[\]`]|`[^`]*`|!\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^()\s]+)\))"
    r"|(?P<sign><)(?!/?div\b|!--|https?://)",
    re.MULTILINE | re.DOTALL,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    root = root_of(config)
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(root / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mend the links of a page."""
    docs, uri = Path(config.docs_dir), page.file.src_uri
    if uri == HOME:
        page.meta["hide"] = ["navigation", "toc"]  # here and not on the page, where a code-hosting page would show it
    outside = next((name for name, of_site in PAGES.items() if of_site == uri), None)
    source = docs / uri if outside is None else root_of(config) / outside
    return mended(markdown, source, uri, docs, lambda each: files.get_file_from_path(each) is not None)


def root_of(config: MkDocsConfig) -> Path:
    """Say where the repository is: where mkdocs.yml lies."""
    return Path(config.config_file_path).parent


def mended(markdown: str, source: Path, uri: str, docs: Path, is_page: Callable[[str], bool]) -> str:
    """Mend the links of a page that lies at `source` and is `uri` on the site."""

    def mend(found: re.Match[str]) -> str:
        if found["sign"] is not None:
            return "&lt;"
        if found["link"] is None:
            return found[0]
        return mended_link(found, source, uri, docs, is_page)

    return SPAN.sub(mend, markdown)


def mended_link(found: re.Match[str], source: Path, uri: str, docs: Path, is_page: Callable[[str], bool]) -> str:
    """Lead a link to the page that the site has instead, or take its words where it has none."""
    address, hash_sign, anchor = found["target"].partition("#")
    if not address or re.match(r"[a-z][a-z0-9+.-]*:|/", address, re.IGNORECASE):
        return found[0]
    root = docs.parent
    target = Path(os.path.normpath(source.parent / unquote(address)))
    if not target.exists() or not target.is_relative_to(root):
        return found[0]  # mkdocs says what is wrong with it
    in_root = target.relative_to(root).as_posix()
    of_site = INSTEAD.get(in_root) or (target.relative_to(docs).as_posix() if target.is_relative_to(docs) else None)
    if of_site is not None and is_page(of_site):
        there = os.path.relpath(of_site, Path(uri).parent)
        return f"{found['picture']}[{found['text']}]({there}{hash_sign}{anchor})"
    text = found["text"]
    return text if text.startswith("`") and text.endswith("`") else f"{text} (`{in_root}`)"
