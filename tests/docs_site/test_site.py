"""The docs site: it builds without warnings, and its pages load nothing from other servers."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from browser import chromium, page  # noqa: F401

ROOT = Path(__file__).parents[2]
EXTERNAL_ADDRESS = re.compile(r"(https?:)?//")
# hosts in the theme's scripts: used only for mermaid diagrams or repository links, or named in comments of libraries
ALLOWED_HOSTS_IN_SCRIPTS = {"unpkg.com", "api.github.com", "clipboardjs.com", "lunrjs.com", "tartarus.org", "bit.ly"}


def build(folder, out):
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "site"
    return build(ROOT, out), out


@pytest.fixture(scope="module")
def site(built):
    result, out = built
    assert result.returncode == 0, result.stderr
    return out


class LoadedAddresses(HTMLParser):
    """Collects the addresses that a browser loads with a page; links are not included."""

    def __init__(self):
        super().__init__()
        self.addresses, self.classes = [], set()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.classes.update((attributes.get("class") or "").split())
        if tag != "a":
            names = ("src", "srcset", "href", "poster", "data")
            self.addresses += [attributes[name] for name in names if attributes.get(name)]


def read(path):
    parser = LoadedAddresses()
    parser.feed(path.read_text("utf-8"))
    return parser


def test_the_site_builds_without_warnings(built):
    result, out = built
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "WARNING" not in output
    assert "MkDocs 2" not in output
    assert (out / "index.html").is_file()


def test_pages_load_nothing_from_other_servers(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for path in pages:
        found = read(path)
        assert found.addresses
        assert not [each for each in found.addresses if EXTERNAL_ADDRESS.match(each)], path
        assert not found.classes & {"mermaid", "md-source"}, path  # the theme's script would load files for these


def test_styles_and_scripts_load_nothing_from_other_servers(site):
    for path in site.rglob("*.css"):
        text = path.read_text("utf-8")
        assert not re.search(r"""url\(\s*["']?(https?:)?//|@import""", text), path
    for path in site.rglob("*.js"):
        # skip the text of the pages, and tokenizers of other languages, which are not loaded for English
        if path.name != "search_index.js" and path.parent.name not in ("lunr", "min"):
            hosts = set(re.findall(r"https?://([\w.-]+\.\w+)", path.read_text("utf-8")))
            assert hosts <= ALLOWED_HOSTS_IN_SCRIPTS, path


def test_every_page_of_the_docs_is_in_the_navigation(site):
    home = (site / "index.html").read_text("utf-8")
    for path in (ROOT / "docs").rglob("*.md"):
        address = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert f'href="{address}"' in home, address


def test_contributing_is_a_page_with_rewritten_links(site):
    text = (site / "contributing.html").read_text("utf-8")
    assert 'href="how-to/add-an-aggregator.html"' in text
    assert "<code>src/tapfm/contracts.py</code>" in text
    assert "src/tapfm/contracts.py</code></a>" not in text


def test_less_than_in_formulas_is_not_a_tag(site):
    assert "sum_i &lt;z_i, g_zi&gt;" in (site / "explanation" / "paper-and-code.html").read_text("utf-8")


def test_search_works_without_a_server(site, page):  # noqa: F811
    page.goto(f"{(site / 'index.html').as_uri()}")
    page.click(".md-search__input")
    page.keyboard.type("tiles_per_slide")
    page.wait_for_selector(".md-search-result__item")
    assert "Configuration" in page.inner_text(".md-search-result__list")


@pytest.fixture
def small_site(tmp_path):
    """A docs folder with the same settings and two pages."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    settings["nav"] = ["index.md", "other.md", "contributing.md", "changelog.md"]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    for folder in ("javascripts", "stylesheets"):
        shutil.copytree(ROOT / "docs" / folder, tmp_path / "docs" / folder)
    (tmp_path / "tools").mkdir()
    shutil.copy2(ROOT / "tools" / "docs_hook.py", tmp_path / "tools")
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n\n[code](tools/docs_hook.py)\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[there](other.md#part)\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Part\n\n[rules](../CONTRIBUTING.md)\n")
    return tmp_path


def test_a_valid_site_builds(small_site):
    result = build(small_site, small_site / "site")
    assert result.returncode == 0, result.stderr
    assert 'href="contributing.html"' in (small_site / "site" / "other.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("page_name", "text", "message"),
    [
        ("other.md", "# Other\n\n## Another part\n", "does not contain an anchor '#part'"),
        ("other.md", "# Other\n\n## Part\n\n[gone](gone.md)\n", "gone.md"),
        ("other.md", "# Other\n\n## Part\n\n[gone](../tools/gone.py)\n", "gone.py"),
        ("other.md", "# Other\n\n## Part\n\n![gone](images/gone.png)\n", "gone.png"),
        ("forgotten.md", "# Forgotten\n", "forgotten.md"),
    ],
    ids=["anchor", "page", "file", "image", "not in the navigation"],
)
def test_broken_links_fail_the_build(small_site, page_name, text, message):
    (small_site / "docs" / page_name).write_text(text)
    result = build(small_site, small_site / "site")
    assert result.returncode != 0
    assert message in result.stderr
