"""Draw figures with matplotlib: PNG files, and SVG for HTML pages, whose colours follow the light or dark theme."""

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
    "primary": "#c8553d",
    "secondary": "#4a6fa5",
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
_MAX_COLUMNS = 4  # maximum number of panels side by side
_CHARACTER_IN = 0.069  # mean width of a character of 9 points
_LEGEND_PT = 7.5
_TITLE_IN, _MIN_WIDTH_IN = 0.35, 4.2  # for figures with titles
_MARGIN_IN = 0.1  # to the left of the axis labels
_INVALID_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # forbidden in XML
_EXTRA_DECIMALS = re.compile(r"(\.\d\d)\d+")
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
    "svg.fonttype": "none",  # keep text as text
}


def write_png(path: Path, figure: Figure) -> None:
    """Draw a figure to a PNG file. Equal figures result in identical files."""
    write_atomically(path, _draw_png(figure))


def _draw_png(figure: Figure) -> bytes:
    """Return a figure as PNG, with its title and panel titles."""
    return _draw(figure, titled=True, format="png", dpi="figure", metadata={"Software": None})


def draw_svg(figure: Figure, number: int = 0) -> str:
    """Return a figure as SVG for an HTML page, without titles.

    Colours are CSS variables of the page (--primary, --ink, ...). There are no style attributes, because a strict
    Content-Security-Policy blocks them. Each figure of a page needs a different number, which makes its ids unique.
    """
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    options = {"format": "svg", "metadata": metadata, "transparent": True}
    return _adapt_svg(_draw(figure, titled=False, svg_hashsalt=f"figure {number}", **options), figure.title)


def _draw(figure: Figure, *, titled: bool, svg_hashsalt: str | None = None, **save_options: Any) -> bytes:
    """Return an image file of a figure, with or without titles.

    svg_hashsalt: text that makes the ids in an SVG unique; different for each SVG of a page.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MplFigure

    columns = max(1, min(len(figure.panels), _MAX_COLUMNS))
    rows = max(1, -(-len(figure.panels) // columns))
    legend_in = max((_legend_height_in(panel, figure.panel_width_in) for panel in figure.panels), default=0.0)
    height_in = figure.panel_height_in + legend_in
    title_in = _TITLE_IN if titled else 0.0
    size_in = max(figure.panel_width_in * columns, _MIN_WIDTH_IN if titled else 0.0), height_in * rows + title_in
    with mpl.rc_context(_STYLE | {"svg.hashsalt": svg_hashsalt}), warnings.catch_warnings():
        # the font may lack characters of names
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        # labels are measured at the resolution at which they are drawn
        mpl_figure = MplFigure(figsize=size_in, dpi=_DPI if save_options["format"] == "png" else _SVG_DPI)
        FigureCanvasAgg(mpl_figure)
        for number, panel in enumerate(figure.panels):
            left_in = number % columns * figure.panel_width_in
            bottom_in = size_in[1] - title_in - (number // columns + 1) * height_in
            box = _PanelBox(left_in, bottom_in, figure.panel_width_in, height_in, legend_in)
            _draw_panel(mpl_figure, panel, box, titled=titled)
        if titled and figure.title:
            title = _escape_and_wrap(figure.title, size_in[0] / _CHARACTER_IN)
            mpl_figure.suptitle(title, fontsize=10, y=1 - _TITLE_IN / 3 / size_in[1], va="top")
        buffer = io.BytesIO()
        mpl_figure.savefig(buffer, **save_options)
    return buffer.getvalue()


class _PanelBox(NamedTuple):
    """Position and size of a panel in inches, from the lower left corner of the figure."""

    left: float
    bottom: float
    width: float
    height: float
    legend: float  # height below the axes


def _draw_panel(mpl_figure: Any, panel: Panel, box: _PanelBox, *, titled: bool) -> None:
    axes = mpl_figure.add_axes((0, 0, 1, 1))
    top_margin_in = 0.32 if titled and panel.title else 0.1
    _place_axes(mpl_figure, axes, box, _MARGIN_IN, top_margin_in)
    if titled:
        axes.set_title(_escape_and_wrap(panel.title, box.width / _CHARACTER_IN), fontsize=9.5)
    if panel.why_empty:
        reason = _escape_and_wrap(panel.why_empty, box.width / _CHARACTER_IN)
        axes.text(0.5, 0.5, reason, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    axes.grid(visible=True, axis="y", lw=0.6)
    axes.set_axisbelow(True)
    drawn = {mark.label: _draw_mark(axes, mark) for mark in panel.marks}
    _set_axis(axes, "x", panel.x)
    _set_axis(axes, "y", panel.y)
    labels_left_in = axes.yaxis.get_tightbbox(mpl_figure.canvas.get_renderer()).x0 / mpl_figure.dpi
    _place_axes(mpl_figure, axes, box, _MARGIN_IN + box.left + _MARGIN_IN - labels_left_in, top_margin_in)
    if panel.square:
        axes.set_aspect("equal", anchor="N")
    if labelled := {label: artist for label, artist in drawn.items() if label}:
        labels = [_escape_and_wrap(label, _legend_characters(box.width)) for label in labelled]
        width_in, height_in = mpl_figure.get_size_inches()
        corner = (box.left + 0.06) / width_in, (box.bottom + 0.04) / height_in
        position = {"loc": "lower left", "bbox_to_anchor": corner, "borderaxespad": 0}
        mpl_figure.legend(list(labelled.values()), labels, fontsize=_LEGEND_PT, **position)


def _place_axes(mpl_figure: Any, axes: Any, box: _PanelBox, left_margin_in: float, top_margin_in: float) -> None:
    """Place axes in a box, with margins for the labels on the left and the title above."""
    bottom_margin_in, right_margin_in = 0.48 + box.legend, 0.14
    width_in, height_in = mpl_figure.get_size_inches()
    axes.set_position(
        (
            (box.left + left_margin_in) / width_in,
            (box.bottom + bottom_margin_in) / height_in,
            max(box.width - left_margin_in - right_margin_in, 0.5) / width_in,
            max(box.height - top_margin_in - bottom_margin_in, 0.5) / height_in,
        )
    )


def _legend_characters(panel_width_in: float) -> float:
    return (panel_width_in - 0.5) / (_CHARACTER_IN * _LEGEND_PT / 9)


def _legend_height_in(panel: Panel, panel_width_in: float) -> float:
    labels = dict.fromkeys(mark.label for mark in panel.marks if mark.label)
    lines = sum(_escape_and_wrap(label, _legend_characters(panel_width_in)).count("\n") + 1 for label in labels)
    return 0.0 if panel.why_empty or not lines else 0.1 + 0.155 * lines


def _set_axis(axes: Any, name: str, axis: Axis) -> None:
    matplotlib_axis = axes.xaxis if name == "x" else axes.yaxis
    matplotlib_axis.set_label_text(_escape_and_wrap(axis.label))
    matplotlib_axis.set_tick_params(labelsize=8)
    if axis.integer:
        matplotlib_axis.get_major_locator().set_params(integer=True)
    if axis.ticks is not None:
        labels = None if axis.tick_labels is None else [_escape_and_wrap(label) for label in axis.tick_labels]
        matplotlib_axis.set_ticks(list(axis.ticks), labels)
    if axis.low is not None or axis.high is not None:
        (axes.set_xlim if name == "x" else axes.set_ylim)(axis.low, axis.high)


def _draw_mark(axes: Any, mark: Mark) -> Any:
    """Draw a mark and return its artist for the legend."""
    colour = _COLOURS[mark.colour]
    if isinstance(mark, Line):
        style = {"color": colour, "ls": _DASHES[mark.dash], "alpha": 0.55 if mark.faint else 1.0, "ms": 3.5}
        style["lw"] = 1.2 if mark.faint or mark.dash != "solid" else 1.8
        style["marker"] = "o" if mark.markers or len(mark.x) == 1 else None
        (line,) = axes.plot(mark.x, mark.y, drawstyle="steps-post" if mark.steps else "default", **style)
        return line
    if isinstance(mark, Band):
        return axes.fill_between(mark.x, mark.low, mark.high, color=colour, alpha=0.18, lw=0)
    if isinstance(mark, Points):
        sizes = [18 + 110 * size for size in mark.sizes] if mark.sizes else 30
        for x, y, text in zip(mark.x, mark.y, mark.texts, strict=False):
            axes.annotate(
                _escape_and_wrap(text), (x, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=7
            )
        return axes.scatter(mark.x, mark.y, s=sizes, color=colour, zorder=3, lw=0)
    if isinstance(mark, Bars):
        widths = [high - low for low, high in zip(mark.edges[:-1], mark.edges[1:], strict=True)]
        floors = mark.floors or [0.0] * len(widths)
        return axes.bar(mark.edges[:-1], mark.heights, widths, floors, align="edge", color=colour, alpha=0.8)
    draw = axes.axhline if mark.horizontal else axes.axvline
    return draw(mark.value, color=colour, lw=1.1, ls=_DASHES[mark.dash])


def _escape_and_wrap(text: str, max_characters: float | None = None) -> str:
    """Escape dollar signs, which start formulas, replace invalid XML characters, and wrap lines."""
    printable = _INVALID_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text)
    lines = printable if max_characters is None else "\n".join(textwrap.wrap(printable, max(10, int(max_characters))))
    return lines.replace("$", r"\$")


def _adapt_svg(svg: bytes, title: str) -> str:
    """Convert styles to attributes and colours to CSS variables, and set the title for screen readers."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local_name(child.tag) in ("metadata", "style"):
                parent.remove(child)
            child.tail = None  # removes the indentation
    for element in root.iter():
        element.tag = _local_name(element.tag)  # namespaces are not needed in HTML
        attributes = {_local_name(name): _EXTRA_DECIMALS.sub(r"\1", value) for name, value in element.attrib.items()}
        if element.tag not in ("text", "tspan"):
            element.text = None
        for declaration in filter(str.strip, attributes.pop("style", "").split(";")):
            name, value = (part.strip() for part in declaration.split(":", 1))
            if name == "font":  # shorthand: keep only the size; the page sets the family
                name, value = "font-size", next(part for part in value.split() if part[0].isdigit())
            attributes[name] = value
        if element.tag == "g":
            attributes.pop("id", None)  # not unique on the page
        if element.tag == "text":
            attributes.pop("font-family", None)
            attributes.setdefault("fill", _INK)
        for name in ("fill", "stroke"):
            if (variable := _CSS_VARIABLES.get(attributes.get(name, "").lower())) is not None:
                attributes[name] = f"var(--{variable})"
        element.attrib.clear()
        element.attrib.update(attributes)
    for name in ("width", "height"):
        root.attrib.pop(name, None)  # the viewBox keeps the aspect ratio
    root.attrib |= {"class": "chart", "role": "img", "aria-label": title, "stroke-linejoin": "round"}
    return ElementTree.tostring(root, encoding="unicode")


def _local_name(name: str) -> str:
    return name.rpartition("}")[2]
