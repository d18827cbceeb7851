"""Draw figures with matplotlib: PNG for folders, SVG for pages, whose colours follow the page's light or dark theme."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tapfm.results.figure import Axis, Band, Bars, Colour, Dash, Figure, Line, Mark, Panel, Points, Rule
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
_MAX_TEXT = 60  # characters
_DPI = 140
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
    return _draw(figure, titled=True, format="png", dpi=_DPI, metadata={"Software": None})


def draw_svg(figure: Figure) -> str:
    """Draw a figure as SVG for an HTML page, without titles.

    Colours are CSS variables of the page (--model, --ink, ...). There are no style attributes, which a strict
    Content-Security-Policy would ignore.
    """
    salt = hashlib.sha256(repr(figure).encode()).hexdigest()[:12]  # ids differ between the figures of a page
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    svg = _draw(figure, titled=False, salt=salt, format="svg", metadata=metadata, transparent=True)
    return _adapt_svg(svg, figure.title)


def _draw(figure: Figure, *, titled: bool, salt: str = "", **saved: Any) -> bytes:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_STYLE | {"svg.hashsalt": salt or None}), warnings.catch_warnings():
        # names in a script that the font lacks, or longer than a panel
        warnings.filterwarnings("ignore", category=UserWarning, module="matplotlib|tapfm")
        across = min(len(figure.panels), _MAX_COLUMNS)
        down = -(-len(figure.panels) // across)
        size = max(figure.panel_width_in * across, 4.2 if titled else 0.0), figure.panel_height_in * down
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        grid = canvas.subfigures(down, across, squeeze=False).ravel()
        for part, panel in zip(grid, figure.panels, strict=False):
            _draw_panel(part, panel, titled=titled)
        if titled and figure.title:
            canvas.suptitle(_plain(figure.title), fontsize=10)
        buffer = io.BytesIO()
        canvas.savefig(buffer, **saved)
    return buffer.getvalue()


def _draw_panel(part: Any, panel: Panel, *, titled: bool) -> None:
    axes = part.subplots()
    if titled:
        axes.set_title(_plain(panel.title), fontsize=9.5)
    if panel.why_empty:
        axes.text(0.5, 0.5, _plain(panel.why_empty), ha="center", va="center", transform=axes.transAxes, wrap=True)
        axes.set_axis_off()
        return
    axes.grid(visible=True, axis="y", lw=0.6)
    axes.set_axisbelow(True)
    for mark in panel.marks:
        _draw_mark(axes, mark)
    _set_axis(axes, "x", panel.x)
    _set_axis(axes, "y", panel.y)
    if panel.square:
        axes.set_aspect("equal")
    if axes.get_legend_handles_labels()[1]:
        part.legend(loc="outside lower left", fontsize=8, alignment="left")


def _set_axis(axes: Any, name: str, axis: Axis) -> None:
    of_axis = axes.xaxis if name == "x" else axes.yaxis
    of_axis.set_label_text(_plain(axis.label))
    if axis.integer:
        of_axis.get_major_locator().set_params(integer=True)
    if axis.ticks is not None:
        of_axis.set_ticks(list(axis.ticks), None if axis.tick_labels is None else [*map(_plain, axis.tick_labels)])
    if axis.low is not None or axis.high is not None:
        (axes.set_xlim if name == "x" else axes.set_ylim)(axis.low, axis.high)


def _draw_mark(axes: Any, mark: Mark) -> None:
    colour, label = _COLOURS[mark.colour], _plain(mark.label) or None
    if isinstance(mark, Line):
        look = {"color": colour, "label": label, "ls": _DASHES[mark.dash], "alpha": 0.55 if mark.faint else 1.0}
        look["lw"] = 1.2 if mark.faint or mark.dash != "solid" else 1.8
        look["marker"] = "o" if mark.markers or len(mark.x) == 1 else None
        look["ms"] = 3.5
        if mark.steps:
            axes.step(mark.x, mark.y, where="post", **look)
        else:
            axes.plot(mark.x, mark.y, **look)
    elif isinstance(mark, Band):
        axes.fill_between(mark.x, mark.low, mark.high, color=colour, alpha=0.18, lw=0, label=label)
    elif isinstance(mark, Points):
        sizes = [18 + 110 * size for size in mark.sizes] if mark.sizes else 30
        axes.scatter(mark.x, mark.y, s=sizes, color=colour, zorder=3, lw=0, label=label)
        for x, y, text in zip(mark.x, mark.y, mark.texts, strict=False):
            axes.annotate(_plain(text), (x, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=7)
    elif isinstance(mark, Bars):
        widths = [high - low for low, high in zip(mark.edges[:-1], mark.edges[1:], strict=True)]
        floors = mark.floors or [0.0] * len(widths)
        axes.bar(mark.edges[:-1], mark.heights, widths, floors, align="edge", color=colour, alpha=0.8, label=label)
    elif isinstance(mark, Rule):
        look = {"color": colour, "lw": 1.1, "ls": _DASHES[mark.dash], "label": label}
        axes.axhline(mark.value, **look) if mark.horizontal else axes.axvline(mark.value, **look)


def _plain(text: str) -> str:
    """Return a text that is not too long, in which $ does not start a formula."""
    shortened = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}\N{HORIZONTAL ELLIPSIS}"
    return shortened.replace("$", r"\$")


def _adapt_svg(svg: bytes, title: str) -> str:
    """Turn styles into attributes and colours into CSS variables, and name the drawing for screen readers."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local_name(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local_name(element.tag)  # HTML needs no namespaces
        attributes = {_local_name(name): value for name, value in element.attrib.items()}
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
