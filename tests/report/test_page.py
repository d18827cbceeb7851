"""The page: whole, closed to the network, and deaf to what data may say."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

from tapfm.report.content import (
    Code,
    Collapsible,
    HeatmapGallery,
    Page,
    PageSection,
    Picture,
    SlideHeatmaps,
    SlideLine,
    SlidesBlock,
    TileGallery,
    TilePicture,
)
from tapfm.report.page import _digest as digest
from tapfm.report.page import _keys_of as keys_of
from tapfm.report.page import is_ours, render
from tapfm.results.document import Paragraph
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Axis, Figure, Line, Panel, Points
from tapfm.results.table import Cell, Column, Row, Table, table_row

EVIL = "<script>alert('1')</script>\"><img src=http://evil.example/x onerror=alert(2)>"
VOID = {"meta", "input", "img"}


class Reader(HTMLParser):
    """Checks that elements close in order, and remembers ids, texts and addresses."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.addresses, self.tags, self.text = [], [], [], Counter(), []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [
            (tag, value) for name, value in attrs if name in ("src", "href", "action", "data", "xlink:href")
        ]
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"], (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    assert not reader.open
    return reader


def a_page(**changes):
    picture = Picture("data:image/webp;base64,AA==", 2, 2, EVIL)
    line = SlideLine(EVIL, EVIL, EVIL, EVIL, 0.7, 0.5, EVIL, EVIL, EVIL, 12, EVIL)
    table = Table(
        [Column(EVIL), Column("b")], [Row(heading=EVIL), Row([Cell(EVIL, EVIL, EVIL), Cell("")])], EVIL, [EVIL]
    )
    drawn = Panel(EVIL, Axis(EVIL), Axis(EVIL), [Line([0, 1], [0, 1], label=EVIL), Points([1], [1], texts=[EVIL])])
    blocks = [
        table,
        Paragraph(EVIL),
        Code(EVIL),
        Collapsible(
            EVIL,
            [Figure(EVIL, [drawn, Panel("b", why_empty=EVIL)], EVIL)],
            EVIL,
        ),
        SlidesBlock([line, SlideLine("b", "p", "test", "T", 0.2, None, "", "", "", 3, "other")]),
        HeatmapGallery(
            [
                SlideHeatmaps(EVIL, EVIL, "false positive", [EVIL], [picture]),
                SlideHeatmaps("gone", "T", "", [], [], EVIL),
            ],
            [],
            EVIL,
        ),
        TileGallery(EVIL, [TilePicture(picture, EVIL, EVIL)], EVIL),
    ]
    sections = [
        PageSection(EVIL, blocks, EVIL),
        PageSection("Twice", [Paragraph("a")]),
        PageSection("Twice", [Paragraph("b")]),
    ]
    given = {"kicker": EVIL, "title": EVIL, "summary": [EVIL], "headline": table, "warnings": [EVIL], "made": EVIL}
    return Page(**{"sections": sections} | given | changes)


def test_what_data_say_is_text_everywhere():
    html = render(a_page()).decode()
    reader = read(html)
    assert reader.tags["script"] == reader.tags["style"] == 1
    assert reader.tags["img"] == 2
    assert "".join(reader.text).count("alert('1')") > 20


def test_ids_are_unique_and_links_lead_to_them():
    reader = read(render(a_page()).decode())
    assert [name for name, count in Counter(reader.ids).items() if count > 1] == []
    assert {"twice", "twice-2"} <= set(reader.ids)
    links = [address[1:] for tag, address in reader.addresses if tag == "a"]
    assert links
    assert set(links) <= set(reader.ids)


def test_nothing_is_fetched():
    reader = read(render(a_page()).decode())
    assert all(address.startswith(("#", "data:image/")) for _, address in reader.addresses)
    ours = render(a_page()).decode().replace("http://evil.example", "")
    assert re.findall(r"\w+://|url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", ours) == []


def test_the_policy_allows_this_style_and_this_script_alone():
    html = render(a_page()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html).group(1).replace("&#39;", "'")
    script, style = (re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL).group(1) for tag in ("script", "style"))
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src '{digest(script)}'" in policy
    assert f"style-src '{digest(style)}'" in policy
    assert "unsafe" not in policy


def test_names_of_files_that_are_no_text_do_not_stop_the_page():
    assert "<h1>f?x</h1>" in render(a_page(title="f\udcffx")).decode()


def test_columns_in_which_every_line_is_the_same_are_left_out():
    def heads(*lines):
        html = render(replace(a_page(), sections=[PageSection("Slides", [SlidesBlock(lines)])])).decode()
        return re.findall(r'data-by="\w+"[^>]*>(Model|Set|Target)</th>', html), html.count("<select")

    line = SlideLine("a", "p", "test", "T", 0.2, None, "", "", "", 3, "m")
    assert heads(line, line) == ([], 0)
    assert heads(line, replace(line, where="x.csv", target="U", model="n")) == (["Model", "Set", "Target"], 3)


def test_a_page_of_ours_is_known_again(tmp_path):
    (tmp_path / "ours.html").write_bytes(render(a_page()))
    (tmp_path / "theirs.html").write_text("<!doctype html><title>mine</title>")
    assert is_ours(tmp_path / "ours.html")
    assert not is_ours(tmp_path / "theirs.html")


def test_keys_are_made_of_titles_and_differ():
    assert keys_of(["A b", "A, b", "a-b-2", "·"]) == ["a-b", "a-b-2", "a-b-2-2", "section"]


def test_why_something_is_missing_is_told_once_below():
    row = table_row(*(Estimate(None, reason="no positive slide among 4") for _ in range(2)))
    html = render(a_page(headline=Table([Column("a"), Column("b")], [row]))).decode()
    header = html[html.index('class="headline"') : html.index('class="made"')]
    assert header.count("<li>no positive slide among 4</li>") == 1
    assert header.count('<sup class="reason">1</sup>') == 2


def test_wrong_calls_are_marked():
    lines = [
        SlideLine(outcome, "p", "test", "T", 0.5, 0.5, "positive", "negative", outcome, 3)
        for outcome in ("correct", "false positive", "")
    ]
    html = render(a_page(sections=[PageSection("Slides", [SlidesBlock(lines)])])).decode()
    assert re.findall(r'data-wrong><th scope="row">([^<]*)', html) == ["false positive"]
