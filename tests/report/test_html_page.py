"""The HTML page is valid, loads nothing from the network, and escapes all texts."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

from tapfm.report.content import (
    Code,
    Collapsible,
    EmbeddedImage,
    HeatmapGallery,
    Page,
    PageSection,
    PredictionRow,
    PredictionTable,
    SlideHeatmap,
    TileGallery,
    TileImage,
)
from tapfm.report.html_page import _make_ids as make_ids
from tapfm.report.html_page import _sha256_source as sha256_source
from tapfm.report.html_page import is_report_file, render_page
from tapfm.results.document import Paragraph
from tapfm.results.estimate import Estimate
from tapfm.results.figure import Axis, Figure, Line, Panel, Points
from tapfm.results.table import Cell, Column, Row, Table, table_row

EVIL = "<script>alert('1')</script>\"><img src=http://evil.example/x onerror=alert(2)>"
VOID = {"meta", "input", "img"}


class PageParser(HTMLParser):
    """Checks that elements are closed in order, and collects ids, texts and URLs."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.urls, self.tags, self.text = [], [], [], Counter(), []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.ids += [value for name, value in attrs if name == "id"]
        self.urls += [(tag, value) for name, value in attrs if name in ("src", "href", "action", "data", "xlink:href")]
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


def parse(html):
    parser = PageParser()
    parser.feed(html)
    assert not parser.open
    return parser


def make_page(**changes):
    image = EmbeddedImage("data:image/webp;base64,AA==", 2, 2, EVIL)
    row = PredictionRow(EVIL, EVIL, EVIL, EVIL, 0.7, 0.5, EVIL, EVIL, EVIL, 12, EVIL)
    table = Table(
        [Column(EVIL), Column("b")], [Row(heading=EVIL), Row([Cell(EVIL, EVIL, EVIL), Cell("")])], EVIL, [EVIL]
    )
    panel = Panel(EVIL, Axis(EVIL), Axis(EVIL), [Line([0, 1], [0, 1], label=EVIL), Points([1], [1], texts=[EVIL])])
    blocks = [
        table,
        Paragraph(EVIL),
        Code(EVIL),
        Collapsible(
            EVIL,
            [Figure(EVIL, [panel, Panel("b", why_empty=EVIL)], EVIL)],
            EVIL,
        ),
        PredictionTable([row, PredictionRow("b", "p", "test", "T", 0.2, None, "", "", "", 3, "other")]),
        HeatmapGallery(
            [
                SlideHeatmap(EVIL, EVIL, "false positive", [EVIL], [image]),
                SlideHeatmap("missing", "T", "", [], [], EVIL),
            ],
            [],
            EVIL,
        ),
        TileGallery(EVIL, [TileImage(image, EVIL, EVIL)], EVIL),
    ]
    sections = [
        PageSection(EVIL, blocks, EVIL),
        PageSection("Twice", [Paragraph("a")]),
        PageSection("Twice", [Paragraph("b")]),
    ]
    texts = {"subject": EVIL, "title": EVIL, "summary": [EVIL], "warnings": [EVIL], "created": EVIL}
    return Page(**{"sections": sections, "headline": table} | texts | changes)


def test_all_texts_are_escaped():
    parsed = parse(render_page(make_page()).decode())
    assert parsed.tags["script"] == parsed.tags["style"] == 1
    assert parsed.tags["img"] == 2
    assert "".join(parsed.text).count("alert('1')") > 20


def test_ids_are_unique_and_links_point_to_them():
    parsed = parse(render_page(make_page()).decode())
    assert [name for name, count in Counter(parsed.ids).items() if count > 1] == []
    assert {"twice", "twice-2"} <= set(parsed.ids)
    links = [url[1:] for tag, url in parsed.urls if tag == "a"]
    assert links
    assert set(links) <= set(parsed.ids)


def test_page_loads_nothing_from_the_network():
    parsed = parse(render_page(make_page()).decode())
    assert all(url.startswith(("#", "data:image/")) for _, url in parsed.urls)
    html = render_page(make_page()).decode().replace("http://evil.example", "")
    assert re.findall(r"\w+://|url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(", html) == []


def test_security_policy_allows_only_the_style_and_script_of_the_page():
    html = render_page(make_page()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html).group(1).replace("&#39;", "'")
    script, style = (re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL).group(1) for tag in ("script", "style"))
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src '{sha256_source(script)}'" in policy
    assert f"style-src '{sha256_source(style)}'" in policy
    assert "unsafe" not in policy


def test_invalid_unicode_in_file_names_is_replaced():
    assert "<h1>f?x</h1>" in render_page(make_page(title="f\udcffx")).decode()


def test_columns_with_the_same_value_in_all_rows_are_not_shown():
    def optional_columns(*rows):
        html = render_page(replace(make_page(), sections=[PageSection("Slides", [PredictionTable(rows)])])).decode()
        return re.findall(r'data-sort="\w+"[^>]*>(Model|Set|Target)</th>', html), html.count("<select")

    row = PredictionRow("a", "p", "test", "T", 0.2, None, "", "", "", 3, "m")
    assert optional_columns(row, row) == ([], 0)
    assert optional_columns(row, replace(row, slide_set="x.csv", target="U", model="n")) == (
        ["Model", "Set", "Target"],
        3,
    )


def test_report_files_are_recognised(tmp_path):
    (tmp_path / "report.html").write_bytes(render_page(make_page()))
    (tmp_path / "other.html").write_text("<!doctype html><title>Another page</title>")
    assert is_report_file(tmp_path / "report.html")
    assert not is_report_file(tmp_path / "other.html")


def test_section_ids_are_unique():
    assert make_ids(["A b", "A, b", "a-b-2", "·"]) == ["a-b", "a-b-2", "a-b-2-2", "section"]


def test_reason_for_missing_values_is_one_footnote():
    row = table_row(*(Estimate(None, reason="no positive slide among 4") for _ in range(2)))
    html = render_page(make_page(headline=Table([Column("a"), Column("b")], [row]))).decode()
    header = html[html.index('class="headline"') : html.index('class="created"')]
    assert header.count("<li>no positive slide among 4</li>") == 1
    assert header.count('<sup class="reason">1</sup>') == 2


def test_wrong_calls_are_marked():
    rows = [
        PredictionRow(outcome, "p", "test", "T", 0.5, 0.5, "positive", "negative", outcome, 3)
        for outcome in ("correct", "false positive", "")
    ]
    html = render_page(make_page(sections=[PageSection("Slides", [PredictionTable(rows)])])).decode()
    assert re.findall(r'data-wrong><th scope="row">([^<]*)', html) == ["false positive"]
