"""Figures: reproducible PNG, and SVG that follows the theme and the Content-Security-Policy of a page."""

import io
import itertools
import re
from importlib import resources
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tapfm.errors import InputError
from tapfm.results.document import Paragraph, Section, read_sections_json, write_sections_json
from tapfm.results.estimate import Estimate
from tapfm.results.figure import SERIES, Axis, Band, Bars, Figure, Line, Panel, Points, ReferenceLine
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
        Bars([0, 0.5, 1], [3, 4], "secondary", "bars", [1, 0]),
        Line([0, 0.5, 1], [0, 2, 1], "series-3", "line", dash="dashed", steps=True),
        Points([0.5], [1], "series-4", sizes=[1.0], texts=["12"]),
        ReferenceLine(0.3, "reference line"),
        ReferenceLine(2, horizontal=True, dash="dotted"),
    ],
)
FIGURE = Figure("A figure", [PANEL, Panel("empty panel", why_empty="no positive slide among 12")])


def pixels(figure):
    with Image.open(io.BytesIO(draw_png(figure))) as image:
        return np.asarray(image.convert("RGB"))


def test_drawing_is_reproducible():
    assert draw_png(FIGURE) == draw_png(FIGURE)
    assert draw_svg(FIGURE) == draw_svg(FIGURE)


def test_marks_are_drawn_in_their_colours():
    drawn = {tuple(colour) for colour in pixels(Figure("", [PANEL])).reshape(-1, 3)}
    for name in ("series-3", "series-4", "grey"):
        assert tuple(bytes.fromhex(COLOURS[name][1:])) in drawn


def test_empty_panel_shows_its_reason_and_no_axes():
    svg = draw_svg(Figure("", [FIGURE.panels[1]]))
    assert "no positive slide among 12" in "".join(ElementTree.fromstring(svg).itertext())
    assert "<use" not in svg  # ticks


def test_colours_are_distinct_so_that_themes_can_replace_them():
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert set(SERIES) <= set(COLOURS)


def test_svg_has_no_style_attributes_and_uses_css_variables():
    root = ElementTree.fromstring(draw_svg(Figure("An & title", [PANEL])))
    assert root.get("aria-label") == "An & title"
    elements = list(root.iter())
    assert not [each for each in elements if each.get("style") or each.tag.endswith("style")]
    colours = {each.get(name) for each in elements for name in ("fill", "stroke")} - {None, "none"}
    assert colours
    assert all(re.fullmatch(r"var\(--[a-z0-9-]+\)", colour) for colour in colours)
    texts = "".join(root.itertext())
    assert all(text in texts for text in ("x & y", "count", "line", "12"))


def test_report_defines_every_colour_of_figures():
    css = (resources.files("tapfm.report") / "templates" / "report.css").read_text()
    drawn = draw_svg(Figure("", [Panel("", marks=[Line([0, 1], [0, 1], colour) for colour in COLOURS])]))
    variables = set(re.findall(r"var\((--[a-z0-9-]+)\)", drawn))
    assert {f"--{colour}" for colour in COLOURS} <= variables
    assert all(re.search(rf"{variable}:", css) for variable in variables)


def test_equal_drawings_on_a_page_have_different_ids():
    html = html_figure(Figure("", [PANEL, PANEL]), itertools.count())
    ids = re.findall(r'id="([^"]*)"', html)
    assert ids
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("entries", [0, 3, 14])
def test_legend_does_not_shrink_the_axes(entries):
    lines = [Line([0, 1], [0, 1], label=f"method {i} with a name of some length, finetuned") for i in range(entries)]
    figure = Figure("", [Panel("", Axis("x", 0, 1), Axis("y", 0, 1), [Line([0, 1], [0, 1], "series-5"), *lines])])
    drawn = np.argwhere((pixels(figure) == list(bytes.fromhex(COLOURS["series-5"][1:]))).all(axis=2))
    if entries:  # other lines cover the first one
        drawn = np.argwhere((pixels(figure) == list(bytes.fromhex(COLOURS["primary"][1:]))).all(axis=2))
        drawn = drawn[drawn[:, 0] < 140 * 3.2]  # not the legend
    height_px, width_px = np.ptp(drawn, axis=0)
    assert height_px > 140 * 2.3
    assert width_px > 140 * 2.3


@pytest.mark.parametrize("label", ["", "a label of the axis"])
def test_axis_labels_stay_inside_the_image(label):
    wide = Panel("", Axis("x"), Axis(label), [Line([0, 1], [-123456.75, -123456.25])])
    names = Panel(
        "", Axis("x"), Axis(label, ticks=[0, 1], tick_labels=["a name of forty characters, or nearly so" * 2, "b"])
    )
    for panel in (wide, names):
        assert (pixels(Figure("", [panel], panel_width_in=8.0))[:, :4] == 255).all()
        both = pixels(Figure("", [panel, panel], panel_width_in=8.0))
        assert (both[:, 8 * 140 - 4 : 8 * 140 + 4] == 255).all()  # between the panels


def test_legend_labels_may_start_with_an_underscore_and_are_wrapped():
    panel = Panel("", marks=[Line([0, 1], [0, 1], label="_hidden"), Line([0, 1], [1, 0], label="word " * 30)])
    texts = [element.text for element in ElementTree.fromstring(draw_svg(Figure("", [panel]))).iter("text")]
    assert "_hidden" in texts
    assert " ".join(text for text in texts if text.startswith("word")) == ("word " * 30).strip()


def test_figure_without_panels_can_be_drawn():
    assert draw_png(Figure("title", []))


def test_long_curves_are_simplified():
    x = np.linspace(0, 1, 20_000)
    assert len(draw_svg(Figure("", [Panel("", marks=[Line(x.tolist(), (x**2).tolist())])]))) < 60_000


@pytest.mark.parametrize(
    "name", ["a$b$", "$\\frac{1}$", "\N{CJK UNIFIED IDEOGRAPH-6F22}", "x" * 500, "\\", "a\x0bb", "f\udcffx"]
)
def test_special_characters_in_names_are_drawn_as_text(name):
    panel = Panel(name, Axis(name, ticks=[0], tick_labels=[name]), Axis(name), [Line([0, 1], [0, 1], label=name)])
    assert draw_png(Figure(name, [panel, Panel("b", why_empty=name)]))
    texts = "".join("".join(ElementTree.fromstring(draw_svg(Figure("t", [panel]))).itertext()).split())
    assert re.sub("[\x0b\udcff]", "\N{REPLACEMENT CHARACTER}", name) in texts


def test_html_figure_has_panel_titles_and_reasons():
    html = html_figure(FIGURE, itertools.count())
    assert "curve &lt;1&gt;" in html
    assert '<p class="empty">no positive slide among 12</p>' in html
    assert html.count("<svg") == 1


def test_sections_are_read_back_from_json(tmp_path):
    table = Table(
        [Column("a", text=True), Column("b")], [table_row("x", Cell(Estimate(0.5, reason="few"), "p 0.1", rank=1))]
    )
    sections = [Section("One", (Paragraph("text", warning=True), table, FIGURE)), Section("", ())]
    write_sections_json(tmp_path / "sections.json", sections)
    sections_read = read_sections_json(tmp_path / "sections.json", hint="")
    files = {FIGURE.title: "figure.png"}
    assert markdown_sections("T", sections_read, files) == markdown_sections("T", sections, files)
    assert draw_png(sections_read[0].blocks[2]) == draw_png(FIGURE)
    assert "**text**" in markdown_sections("T", sections_read, files)
    not_finite = [
        Section("", [Table([Column("a")], [table_row(float("nan")), table_row(Estimate(0.5, float("-inf"), 1.0))])])
    ]
    write_sections_json(tmp_path / "nan.json", not_finite)
    first, second = read_sections_json(tmp_path / "nan.json", hint="")[0].blocks[0].rows
    assert (first.cells[0].value, second.cells[0].value.low) == (None, None)
    (tmp_path / "sections.json").write_text("[{}]")
    with pytest.raises(InputError, match="is damaged"):
        read_sections_json(tmp_path / "sections.json", hint="")
