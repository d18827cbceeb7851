"""Draw figures with matplotlib: PNG for folders, SVG for pages, whose colours follow the page's light or dark theme."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tapfm.results.figure import Axis, Band, Bars, Colour, Dash, Figure, Line, Mark, Panel, Points
from tapfm.runtime.files import write_atomically

_COLOURS: Mapping[Colour, str] = {
    "model": "#c8553d",
    "other": "#4a6fa5",
    "grey": "#8a8a8a",
    "series-1": "#4a6fa6",
    "series-2": "#c8553e",
    "series-3": "#5b8e4d",
    "series-4": "#8a5aa0",
    "series-5": "#b8860b",
    "series-6": "#3b8686",
}
_INK, _SOFT, _LINE = "#2b2b2b", "#5c5c5c", "#d9d9d9"
_CSS_VARIABLES = {_INK: "ink", _SOFT: "soft", _LINE: "line", **{value: name for name, value in _COLOURS.items()}}
_DASHES: Mapping[Dash, Any] = {"solid": "-", "dashed": (0, (4, 2.5)), "dotted": (0, (1.2, 2.2))}
_MAX_COLUMNS = 4  # panels side by side
_CHARACTER_IN = 0.069  # mean width of a character of 9 points
_LEGEND_PT = 7.5
_TITLE_IN, _MIN_WIDTH_IN = 0.35, 4.2  # of figures with titles
_MARGIN_IN = 0.1  # on the left of the labels of a panel
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # in XML
_DIGITS = re.compile(r"(\.\d\d)\d+")
_DPI, _SVG_DPI = 140, 72
_STYLE = {
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _SOFT,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "grid.color": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
}


def write_png(path: Path, figure: Figure) -> None:
    """Draw a figure into a PNG file; the same figure gives the same bytes."""
    write_atomically(path, _draw_png(figure))


def _draw_png(figure: Figure) -> bytes:
    """Draw a figure as PNG, with its title and the titles of its panels."""
    return _draw(figure, titled=True, format="png", dpi="figure", metadata={"Software": None})


def draw_svg(figure: Figure, number: int = 0) -> str:
    """Draw a figure as SVG for an HTML page, without titles.

    Colours are CSS variables of the page (--model, --ink, ...). There are no style attributes, which a strict
    Content-Security-Policy would ignore. Figures of one page need different numbers, from which ids are made.
    """
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    saved = {"format": "svg", "metadata": metadata, "transparent": True}
    return _adapt_svg(_draw(figure, titled=False, salt=f"figure {number}", **saved), figure.title)


def _draw(figure: Figure, *, titled: bool, salt: str | None = None, **saved: Any) -> bytes:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    across = max(1, min(len(figure.panels), _MAX_COLUMNS))
    down = max(1, -(-len(figure.panels) // across))
    legend_in = max((_legend_height_in(panel, figure.panel_width_in) for panel in figure.panels), default=0.0)
    height_in = figure.panel_height_in + legend_in
    title_in = _TITLE_IN if titled else 0.0
    size_in = max(figure.panel_width_in * across, _MIN_WIDTH_IN if titled else 0.0), height_in * down + title_in
    with mpl.rc_context(_STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # names in a script the font lacks
        # labels are measured in the resolution in which they are drawn
        canvas = Canvas(figsize=size_in, dpi=_DPI if saved["format"] == "png" else _SVG_DPI)
        FigureCanvasAgg(canvas)
        for number, panel in enumerate(figure.panels):
            left_in = number % across * figure.panel_width_in
            bottom_in = size_in[1] - title_in - (number // across + 1) * height_in
            box = _Box(left_in, bottom_in, figure.panel_width_in, height_in, legend_in)
            _draw_panel(canvas, panel, box, titled=titled)
        if titled and figure.title:
            title = _plain(figure.title, size_in[0] / _CHARACTER_IN)
            canvas.suptitle(title, fontsize=10, y=1 - _TITLE_IN / 3 / size_in[1], va="top")
        buffer = io.BytesIO()
        canvas.savefig(buffer, **saved)
    return buffer.getvalue()


class _Box(NamedTuple):
    """Where a panel is drawn, in inches from the lower left corner of the figure."""

    left: float
    bottom: float
    width: float
    height: float
    legend: float  # height below the axes


def _draw_panel(canvas: Any, panel: Panel, box: _Box, *, titled: bool) -> None:
    axes = canvas.add_axes((0, 0, 1, 1))
    top_in = 0.32 if titled and panel.title else 0.1
    _place_axes(canvas, axes, box, _MARGIN_IN, top_in)
    if titled:
        axes.set_title(_plain(panel.title, box.width / _CHARACTER_IN), fontsize=9.5)
    if panel.why_empty:
        why = _plain(panel.why_empty, box.width / _CHARACTER_IN)
        axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    axes.grid(visible=True, axis="y", lw=0.6)
    axes.set_axisbelow(True)
    drawn = {mark.label: _draw_mark(axes, mark) for mark in panel.marks}
    _set_axis(axes, "x", panel.x)
    _set_axis(axes, "y", panel.y)
    labels_left_in = axes.yaxis.get_tightbbox(canvas.canvas.get_renderer()).x0 / canvas.dpi
    _place_axes(canvas, axes, box, _MARGIN_IN + box.left + _MARGIN_IN - labels_left_in, top_in)
    if panel.square:
        axes.set_aspect("equal", anchor="N")
    if labelled := {label: artist for label, artist in drawn.items() if label}:
        labels = [_plain(label, _legend_characters(box.width)) for label in labelled]
        width_in, height_in = canvas.get_size_inches()
        corner = (box.left + 0.06) / width_in, (box.bottom + 0.04) / height_in
        position = {"loc": "lower left", "bbox_to_anchor": corner, "borderaxespad": 0}
        canvas.legend(list(labelled.values()), labels, fontsize=_LEGEND_PT, **position)


def _place_axes(canvas: Any, axes: Any, box: _Box, left_in: float, top_in: float) -> None:
    """Place axes in a box, with margins for the labels on their left and the title above them."""
    bottom_in, right_in = 0.48 + box.legend, 0.14
    width_in, height_in = canvas.get_size_inches()
    axes.set_position(
        (
            (box.left + left_in) / width_in,
            (box.bottom + bottom_in) / height_in,
            max(box.width - left_in - right_in, 0.5) / width_in,
            max(box.height - top_in - bottom_in, 0.5) / height_in,
        )
    )


def _legend_characters(panel_width_in: float) -> float:
    return (panel_width_in - 0.5) / (_CHARACTER_IN * _LEGEND_PT / 9)


def _legend_height_in(panel: Panel, panel_width_in: float) -> float:
    labels = dict.fromkeys(mark.label for mark in panel.marks if mark.label)
    lines = sum(_plain(label, _legend_characters(panel_width_in)).count("\n") + 1 for label in labels)
    return 0.0 if panel.why_empty or not lines else 0.1 + 0.155 * lines


def _set_axis(axes: Any, name: str, axis: Axis) -> None:
    of_axis = axes.xaxis if name == "x" else axes.yaxis
    of_axis.set_label_text(_plain(axis.label))
    of_axis.set_tick_params(labelsize=8)
    if axis.integer:
        of_axis.get_major_locator().set_params(integer=True)
    if axis.ticks is not None:
        of_axis.set_ticks(list(axis.ticks), None if axis.tick_labels is None else [*map(_plain, axis.tick_labels)])
    if axis.low is not None or axis.high is not None:
        (axes.set_xlim if name == "x" else axes.set_ylim)(axis.low, axis.high)


def _draw_mark(axes: Any, mark: Mark) -> Any:
    """Draw a mark, and return what a legend shows of it."""
    colour = _COLOURS[mark.colour]
    if isinstance(mark, Line):
        look = {"color": colour, "ls": _DASHES[mark.dash], "alpha": 0.55 if mark.faint else 1.0, "ms": 3.5}
        look["lw"] = 1.2 if mark.faint or mark.dash != "solid" else 1.8
        look["marker"] = "o" if mark.markers or len(mark.x) == 1 else None
        (line,) = axes.plot(mark.x, mark.y, drawstyle="steps-post" if mark.steps else "default", **look)
        return line
    if isinstance(mark, Band):
        return axes.fill_between(mark.x, mark.low, mark.high, color=colour, alpha=0.18, lw=0)
    if isinstance(mark, Points):
        sizes = [18 + 110 * size for size in mark.sizes] if mark.sizes else 30
        for x, y, text in zip(mark.x, mark.y, mark.texts, strict=False):
            axes.annotate(_plain(text), (x, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=7)
        return axes.scatter(mark.x, mark.y, s=sizes, color=colour, zorder=3, lw=0)
    if isinstance(mark, Bars):
        widths = [high - low for low, high in zip(mark.edges[:-1], mark.edges[1:], strict=True)]
        floors = mark.floors or [0.0] * len(widths)
        return axes.bar(mark.edges[:-1], mark.heights, widths, floors, align="edge", color=colour, alpha=0.8)
    draw = axes.axhline if mark.horizontal else axes.axvline
    return draw(mark.value, color=colour, lw=1.1, ls=_DASHES[mark.dash])


def _plain(text: str, width: float | None = None) -> str:
    """Return a text without formulas and without characters that SVG forbids, in lines of so many characters."""
    printable = _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
    lines = printable if width is None else "\n".join(textwrap.wrap(printable, max(10, int(width))))
    return lines.replace("$", r"\$")


def _adapt_svg(svg: bytes, title: str) -> str:
    """Turn styles into attributes and colours into CSS variables, and name the drawing for screen readers."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local_name(child.tag) in ("metadata", "style"):
                parent.remove(child)
            child.tail = None  # indentation
    for element in root.iter():
        element.tag = _local_name(element.tag)  # HTML needs no namespaces
        attributes = {_local_name(name): _DIGITS.sub(r"\1", value) for name, value in element.attrib.items()}
        if element.tag not in ("text", "tspan"):
            element.text = None
        for declaration in filter(str.strip, attributes.pop("style", "").split(";")):
            name, value = (part.strip() for part in declaration.split(":", 1))
            if name == "font":  # the shorthand: its size; the family is the page's
                name, value = "font-size", next(part for part in value.split() if part[0].isdigit())
            attributes[name] = value
        if element.tag == "g":
            attributes.pop("id", None)  # the same in every drawing
        if element.tag == "text":
            attributes.pop("font-family", None)
            attributes.setdefault("fill", _INK)
        for name in ("fill", "stroke"):
            if (variable := _CSS_VARIABLES.get(attributes.get(name, "").lower())) is not None:
                attributes[name] = f"var(--{variable})"
        element.attrib.clear()
        element.attrib.update(attributes)
    for name in ("width", "height"):
        root.attrib.pop(name, None)  # the view box keeps the proportions
    root.attrib |= {"class": "chart", "role": "img", "aria-label": title, "stroke-linejoin": "round"}
    return ElementTree.tostring(root, encoding="unicode")


def _local_name(name: str) -> str:
    return name.rpartition("}")[2]
