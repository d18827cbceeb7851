"""Links that lead out of the docs, on the site."""

import pytest
from docs_hook import mended


@pytest.fixture
def mend(tmp_path):
    """Mend the text of docs/how-to/page.md in a small repository, or of another page."""
    for name in ("src/code.py", "docs/how-to/page.md", "docs/other.md", "docs/decisions/0001.md", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "CONTRIBUTING.md").touch()
    pages = {"how-to/page.md", "other.md", "decisions/0001.md", "contributing.md", "index.md"}

    def run(text, source="docs/how-to/page.md", uri="how-to/page.md"):
        return mended(text, tmp_path / source, uri, tmp_path / "docs", pages.__contains__)

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
def test_what_the_site_does_not_have_becomes_text_or_its_own_page(mend, written, shown):
    assert mend(written) == shown


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
        '<div class="doors" markdown>\n\n</div>\n<!-- a comment -->',
    ],
)
def test_the_rest_is_left_as_it_is(mend, text):
    assert mend(text) == text


def test_links_of_a_page_from_outside_start_at_its_place_on_the_site(mend):
    text = "[page](docs/how-to/page.md#part), [`code.py`](src/code.py), ![picture](docs/other.md)"
    shown = mend(text, "CONTRIBUTING.md", "contributing.md")
    assert shown == "[page](how-to/page.md#part), `code.py`, ![picture](other.md)"


def test_links_after_code_and_in_one_line_are_all_mended(mend):
    text = "`x` [a](../../src/code.py), [b `c`](../../src/code.py)\n\n```\n`\n```\n\n[d](../../src/code.py)"
    shown = "`x` a (`src/code.py`), b `c` (`src/code.py`)\n\n```\n`\n```\n\nd (`src/code.py`)"
    assert mend(text) == shown


def test_a_sign_that_begins_no_tag_is_shown(mend):
    assert mend("sum_i <z_i, g_i> < 3, [`a<b`](../../src/code.py)") == "sum_i &lt;z_i, g_i> &lt; 3, `a<b`"


def test_a_lonely_backtick_hides_no_link_of_the_next_paragraph(mend):
    assert mend("a ` b\n\n[c](../../src/code.py) `d`") == "a ` b\n\nc (`src/code.py`) `d`"
