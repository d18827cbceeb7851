"""Figures as data: panels with lines, bands, points and bars. `figure_drawing.py` draws them as PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Dash = Literal["solid", "dashed", "dotted"]
# "primary" is for the model, positives and validation; "secondary" for negatives and training; "grey" for reference
# lines and the baseline; "series-N" for methods or runs in the same panel.
Colour = Literal["primary", "secondary", "grey", "series-1", "series-2", "series-3", "series-4", "series-5", "series-6"]
SERIES: tuple[Colour, ...] = ("series-1", "series-2", "series-3", "series-4", "series-5", "series-6")


@dataclass(frozen=True)
class Axis:
    """An axis. Limits and ticks that are None are computed from the data."""

    label: str = ""
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] | None = None
    tick_labels: Sequence[str] | None = None
    integer: bool = False


@dataclass(frozen=True)
class Line:
    """A line through points. With `steps`, it is horizontal up to the next point."""

    x: Sequence[float]
    y: Sequence[float]
    colour: Colour = "primary"
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
    colour: Colour = "primary"
    label: str = ""
    kind: Literal["band"] = "band"


@dataclass(frozen=True)
class Points:
    """Points of a scatter plot, optionally with a size and a text for each."""

    x: Sequence[float]
    y: Sequence[float]
    colour: Colour = "primary"
    label: str = ""
    sizes: Sequence[float] = ()  # area of each point relative to the largest, 0 to 1
    texts: Sequence[str] = ()
    kind: Literal["points"] = "points"


@dataclass(frozen=True)
class Bars:
    """Adjacent bars. `edges` has one value more than `heights`; `floors` are the lower ends, 0 by default."""

    edges: Sequence[float]
    heights: Sequence[float]
    colour: Colour = "primary"
    label: str = ""
    floors: Sequence[float] = ()
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True)
class ReferenceLine:
    """A vertical or horizontal reference line across the whole panel."""

    value: float
    label: str = ""
    colour: Colour = "grey"
    dash: Dash = "dashed"
    horizontal: bool = False
    kind: Literal["reference_line"] = "reference_line"


Mark = Line | Band | Points | Bars | ReferenceLine


@dataclass(frozen=True)
class Panel:
    """Axes with marks, which are drawn in the order of `marks`. If `why_empty` is not empty, it is shown instead."""

    title: str
    x: Axis = Axis()
    y: Axis = Axis()
    marks: Sequence[Mark] = ()
    square: bool = False  # x and y have the same scale
    why_empty: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure with panels side by side."""

    title: str
    panels: Sequence[Panel]
    caption: str = ""
    panel_width_in: float = 3.7
    panel_height_in: float = 3.4  # without the legend
    kind: Literal["figure"] = "figure"
