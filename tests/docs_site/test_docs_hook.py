"""Rewriting of links that leave docs/."""

import pytest
from docs_hook import rewrite_links


@pytest.fixture
def rewrite(tmp_path):
    """A function that rewrites the links of docs/how-to/page.md, or of another page, in a small repository."""
    for name in ("src/code.py", "docs/how-to/page.md", "docs/other.md", "docs/decisions/0001.md", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "CONTRIBUTING.md").touch()
    pages = {"how-to/page.md", "other.md", "decisions/0001.md", "contributing.md", "index.md"}

    def run(text, source="docs/how-to/page.md", uri="how-to/page.md"):
        return rewrite_links(text, tmp_path / source, uri, tmp_path / "docs", pages.__contains__)

    return run


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[`code.py`](../../src/code.py)", "`code.py`"),
        ("[the code](../../src/code.py)", "the code (`src/code.py`)"),
        ("[the code](../../src/code.py#L3) and so on", "the code (`src/code.py`) and so on"),
        ("[all](../../src)", "all (`src`)"),
        ("[decisions](../decisions)", "decisions (`docs/decisions`)"),
        ("[rules](../../CONTRIBUTING.md#rules)", "[rules](../contributing.md#rules)"),
        ("[front](../../README.md)", "[front](../index.md)"),
    ],
)
def test_links_outside_docs_become_text_or_lead_to_the_page_of_the_site(rewrite, written, shown):
    assert rewrite(written) == shown


@pytest.mark.parametrize(
    "text",
    [
        "[other](../other.md#part)",
        "[elsewhere](https://example.org/src/code.py)",
        "[mail](mailto:someone@example.org)",
        "[here](#part)",
        "[gone](../../src/gone.py)",
        "[outside](../../../secret.txt)",
        "`[the code](../../src/code.py)`",
        "``a ` and [the code](../../src/code.py)``",
        "```text\n[the code](../../src/code.py)\n```",
        "~~~\n[the code](../../src/code.py)\n~~~",
        "So:\n\n    [the code](../../src/code.py) <z>\n",
        "`<z, g>` and <https://example.org>",
        '<div class="sections" markdown>\n\n</div>\n<!-- a comment -->',
    ],
)
def test_other_links_and_code_stay_unchanged(rewrite, text):
    assert rewrite(text) == text


def test_links_of_contributing_are_relative_to_its_page_on_the_site(rewrite):
    text = "[page](docs/how-to/page.md#part), [`code.py`](src/code.py), ![picture](docs/other.md)"
    shown = rewrite(text, "CONTRIBUTING.md", "contributing.md")
    assert shown == "[page](how-to/page.md#part), `code.py`, ![picture](other.md)"


def test_all_links_after_code_and_on_one_line_are_rewritten(rewrite):
    text = "`x` [a](../../src/code.py), [b `c`](../../src/code.py)\n\n```\n`\n```\n\n[d](../../src/code.py)"
    shown = "`x` a (`src/code.py`), b `c` (`src/code.py`)\n\n```\n`\n```\n\nd (`src/code.py`)"
    assert rewrite(text) == shown


def test_less_than_that_starts_no_tag_is_escaped(rewrite):
    assert rewrite("sum_i <z_i, g_i> < 3, [`a<b`](../../src/code.py)") == "sum_i &lt;z_i, g_i> &lt; 3, `a<b`"


def test_an_unpaired_backtick_does_not_affect_the_next_paragraph(rewrite):
    assert rewrite("a ` b\n\n[c](../../src/code.py) `d`") == "a ` b\n\nc (`src/code.py`) `d`"
