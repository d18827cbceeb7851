"""A figure as a value: panels of lines, bands, points and bars. `drawing.py` draws it as PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Dash = Literal["solid", "dashed", "dotted"]
# model, other and grey have a meaning in all figures: the model or positive, its counterpart, and reference lines
Colour = Literal["model", "other", "grey", "series-1", "series-2", "series-3", "series-4", "series-5", "series-6"]
SERIES: tuple[Colour, ...] = ("series-1", "series-2", "series-3", "series-4", "series-5", "series-6")


@dataclass(frozen=True)
class Axis:
    """An axis; limits and ticks that are None are chosen from the data."""

    label: str = ""
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] | None = None
    tick_labels: Sequence[str] | None = None
    integer: bool = False


@dataclass(frozen=True)
class Line:
    """Points that are connected; with `steps`, horizontally up to the next point."""

    x: Sequence[float]
    y: Sequence[float]
    colour: Colour = "model"
    label: str = ""
    dash: Dash = "solid"
    steps: bool = False
    markers: bool = False
    faint: bool = False
    kind: Literal["line"] = "line"


@dataclass(frozen=True)
class Band:
    """The area between two curves."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: Colour = "model"
    label: str = ""
    kind: Literal["band"] = "band"


@dataclass(frozen=True)
class Points:
    """Points with an area and a text each, where given."""

    x: Sequence[float]
    y: Sequence[float]
    colour: Colour = "model"
    label: str = ""
    sizes: Sequence[float] = ()  # areas relative to the largest, 0 to 1
    texts: Sequence[str] = ()
    kind: Literal["points"] = "points"


@dataclass(frozen=True)
class Bars:
    """Adjacent bars between edges, each from its floor upwards."""

    edges: Sequence[float]
    heights: Sequence[float]
    colour: Colour = "model"
    label: str = ""
    floors: Sequence[float] = ()
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True)
class Rule:
    """A vertical line through the whole panel, or a horizontal one."""

    value: float
    label: str = ""
    colour: Colour = "grey"
    dash: Dash = "dashed"
    horizontal: bool = False
    kind: Literal["rule"] = "rule"


Mark = Line | Band | Points | Bars | Rule


@dataclass(frozen=True)
class Panel:
    """A pair of axes with marks, later marks above earlier ones; or the reason why it is empty."""

    title: str
    x: Axis = Axis()
    y: Axis = Axis()
    marks: Sequence[Mark] = ()
    square: bool = False  # x and y have the same scale
    why_empty: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels side by side."""

    title: str
    panels: Sequence[Panel]
    caption: str = ""
    panel_width_in: float = 3.7
    panel_height_in: float = 3.4  # without the legend
    kind: Literal["figure"] = "figure"
