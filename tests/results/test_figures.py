"""Figures: the same PNG each time, and SVG that obeys a page's theme and its Content-Security-Policy."""

import io
import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tapfm.errors import InputError
from tapfm.results.document import Paragraph, Section, read_sections, write_sections
from tapfm.results.estimate import Estimate
from tapfm.results.figure import SERIES, Axis, Band, Bars, Figure, Line, Panel, Points, Rule
from tapfm.results.figure_drawing import _COLOURS as COLOURS
from tapfm.results.figure_drawing import _draw_png as draw_png
from tapfm.results.figure_drawing import draw_svg
from tapfm.results.html import html_figure
from tapfm.results.markdown import markdown_sections
from tapfm.results.table import Cell, Column, Table, table_row

PANEL = Panel(
    "curve <1>",
    Axis("x & y", 0, 1),
    Axis("count", integer=True),
    [
        Band([0, 1], [0, 1], [1, 2], label="band"),
        Bars([0, 0.5, 1], [3, 4], "other", "bars", [1, 0]),
        Line([0, 0.5, 1], [0, 2, 1], "series-3", "line", dash="dashed", steps=True),
        Points([0.5], [1], "series-4", sizes=[1.0], texts=["12"]),
        Rule(0.3, "rule"),
        Rule(2, horizontal=True, dash="dotted"),
    ],
)
FIGURE = Figure("A figure", [PANEL, Panel("nothing", why_empty="no positive slide among 12")])


def pixels(figure):
    with Image.open(io.BytesIO(draw_png(figure))) as picture:
        return np.asarray(picture.convert("RGB"))


def test_the_same_figure_gives_the_same_bytes():
    assert draw_png(FIGURE) == draw_png(FIGURE)
    assert draw_svg(FIGURE) == draw_svg(FIGURE)


def test_every_mark_is_drawn_in_its_colour():
    drawn = {tuple(colour) for colour in pixels(Figure("", [PANEL])).reshape(-1, 3)}
    for name in ("series-3", "series-4", "grey"):
        assert tuple(bytes.fromhex(COLOURS[name][1:])) in drawn


def test_an_empty_panel_has_no_axes_but_a_reason():
    svg = draw_svg(Figure("", [FIGURE.panels[1]]))
    assert "no positive slide among 12" in "".join(ElementTree.fromstring(svg).itertext())
    assert "<use" not in svg  # ticks


def test_colours_have_different_values_since_the_theme_tells_them_by_value():
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert set(SERIES) <= set(COLOURS)


def test_svg_has_no_styles_and_takes_its_colours_from_the_page():
    root = ElementTree.fromstring(draw_svg(Figure("An & title", [PANEL])))
    assert root.get("aria-label") == "An & title"
    elements = list(root.iter())
    assert not [each for each in elements if each.get("style") or each.tag.endswith("style")]
    colours = {each.get(name) for each in elements for name in ("fill", "stroke")} - {None, "none"}
    assert colours
    assert all(re.fullmatch(r"var\(--[a-z0-9-]+\)", colour) for colour in colours)
    texts = "".join(root.itertext())
    assert all(text in texts for text in ("x & y", "count", "line", "12"))


def test_equal_drawings_of_a_page_do_not_share_ids():
    html = html_figure(Figure("", [PANEL, PANEL]), itertools.count())
    ids = re.findall(r'id="([^"]*)"', html)
    assert ids
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("entries", [0, 3, 14])
def test_a_legend_does_not_shrink_the_axes(entries):
    lines = [Line([0, 1], [0, 1], label=f"method {i} with a name of some length, finetuned") for i in range(entries)]
    figure = Figure("", [Panel("", Axis("x", 0, 1), Axis("y", 0, 1), [Line([0, 1], [0, 1], "series-5"), *lines])])
    drawn = np.argwhere((pixels(figure) == list(bytes.fromhex(COLOURS["series-5"][1:]))).all(axis=2))
    if entries:  # other lines lie above it
        drawn = np.argwhere((pixels(figure) == list(bytes.fromhex(COLOURS["model"][1:]))).all(axis=2))
        drawn = drawn[drawn[:, 0] < 140 * 3.2]  # not the legend
    height_px, width_px = np.ptp(drawn, axis=0)
    assert height_px > 140 * 2.3
    assert width_px > 140 * 2.3


@pytest.mark.parametrize("label", ["", "a label of the axis"])
def test_labels_of_an_axis_stay_inside_the_picture(label):
    wide = Panel("", Axis("x"), Axis(label), [Line([0, 1], [-123456.75, -123456.25])])
    names = Panel(
        "", Axis("x"), Axis(label, ticks=[0, 1], tick_labels=["a name of forty characters, or nearly so" * 2, "b"])
    )
    for panel in (wide, names):
        assert (pixels(Figure("", [panel], panel_width_in=8.0))[:, :4] == 255).all()
        both = pixels(Figure("", [panel, panel], panel_width_in=8.0))
        assert (both[:, 8 * 140 - 4 : 8 * 140 + 4] == 255).all()  # between the panels


def test_names_in_a_legend_may_start_with_an_underscore_and_are_wrapped():
    panel = Panel("", marks=[Line([0, 1], [0, 1], label="_hidden"), Line([0, 1], [1, 0], label="word " * 30)])
    texts = [element.text for element in ElementTree.fromstring(draw_svg(Figure("", [panel]))).iter("text")]
    assert "_hidden" in texts
    assert " ".join(text for text in texts if text.startswith("word")) == ("word " * 30).strip()


def test_a_figure_without_panels_is_an_empty_picture():
    assert draw_png(Figure("title", []))


def test_long_curves_are_simplified():
    x = np.linspace(0, 1, 20_000)
    assert len(draw_svg(Figure("", [Panel("", marks=[Line(x.tolist(), (x**2).tolist())])]))) < 60_000


@pytest.mark.parametrize(
    "name", ["a$b$", "$\\frac{1}$", "\N{CJK UNIFIED IDEOGRAPH-6F22}", "x" * 500, "\\", "a\x0bb", "f\udcffx"]
)
def test_names_are_text_whatever_they_hold(name):
    panel = Panel(name, Axis(name, ticks=[0], tick_labels=[name]), Axis(name), [Line([0, 1], [0, 1], label=name)])
    assert draw_png(Figure(name, [panel, Panel("b", why_empty=name)]))
    texts = "".join("".join(ElementTree.fromstring(draw_svg(Figure("t", [panel]))).itertext()).split())
    assert re.sub("[\x0b\udcff]", "\N{REPLACEMENT CHARACTER}", name) in texts


def test_html_names_panels_and_says_why_one_is_empty():
    html = html_figure(FIGURE, itertools.count())
    assert "curve &lt;1&gt;" in html
    assert '<p class="empty">no positive slide among 12</p>' in html
    assert html.count("<svg") == 1


def test_sections_come_back_from_their_file(tmp_path):
    table = Table(
        [Column("a", text=True), Column("b")], [table_row("x", Cell(Estimate(0.5, reason="few"), "p 0.1", rank=1))]
    )
    sections = [Section("One", (Paragraph("text", warning=True), table, FIGURE)), Section("", ())]
    write_sections(tmp_path / "sections.json", sections)
    again = read_sections(tmp_path / "sections.json", hint="")
    files = {FIGURE.title: "figure.png"}
    assert markdown_sections("T", again, files) == markdown_sections("T", sections, files)
    assert draw_png(again[0].blocks[2]) == draw_png(FIGURE)
    assert "**text**" in markdown_sections("T", again, files)
    unknown = [
        Section("", [Table([Column("a")], [table_row(float("nan")), table_row(Estimate(0.5, float("-inf"), 1.0))])])
    ]
    write_sections(tmp_path / "nan.json", unknown)
    first, second = read_sections(tmp_path / "nan.json", hint="")[0].blocks[0].rows
    assert (first.cells[0].value, second.cells[0].value.low) == (None, None)
    (tmp_path / "sections.json").write_text("[{}]")
    with pytest.raises(InputError, match="is damaged"):
        read_sections(tmp_path / "sections.json", hint="")
