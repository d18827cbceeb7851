"""Charts as SVG that stands in the page: lines, bands, dots, bars. Colours are classes of the style sheet, so that one
chart is right by day, by night and on paper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup, escape

from tapfm.prediction.wording import tick_texts

_WIDTH, _HEIGHT = 280.0, 226.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 12.0, 16.0, 38.0
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_CLOSE = 0.5  # to the last point of a line, in its units: nobody sees one that is closer

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From where to where, and what."""

    title: str
    low: float
    high: float
    ticks: Sequence[float]

    def place(self, value: float) -> float:
        """Give a value its place from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Line:
    """Points that are joined; `steps`: by steps that fall or rise where the next point begins."""

    style: str
    points: Sequence[Point]
    steps: bool = False


@dataclass(frozen=True)
class Band:
    """What lies between two lines."""

    style: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """A point with a text beside it."""

    style: str
    x: float
    y: float
    radius: float = 3.0
    text: str = ""


@dataclass(frozen=True)
class Bar:
    """A rectangle from the floor up."""

    style: str
    low: float
    high: float
    top: float
    floor: float = 0.0


@dataclass(frozen=True)
class Rule:
    """An upright line through the whole chart, with a text at its head."""

    style: str
    x: float
    text: str = ""


ChartMark = Line | Band | Dot | Bar | Rule


@dataclass(frozen=True)
class Chart:
    """Axes and marks; later marks lie above earlier ones."""

    said: str  # for those who do not see it
    x: Axis
    y: Axis
    marks: Sequence[ChartMark] = field(default_factory=list)


def share_axis(title: str) -> Axis:
    """Make an axis from 0 to 1."""
    return Axis(title, 0.0, 1.0, (0, 0.25, 0.5, 0.75, 1))


def axis_of(title: str, values: Sequence[float], *, whole: bool = False, floor: float | None = None) -> Axis:
    """Make an axis that holds the values, with round numbers at its ends."""
    low, high = min(values), max(values)
    low = low if floor is None else min(low, floor)
    if not high > low:
        low, high = (low - 0.5, high + 0.5) if whole else (low - 0.1 * (abs(low) or 1), high + 0.1 * (abs(high) or 1))
    step = _round_step((high - low) / 4)
    step = max(1.0, math.ceil(step)) if whole else step
    if whole:  # counts and epochs: the data's own ends
        first = math.ceil(low / step) * step
        return Axis(title, low, high, [float(tick) for tick in np.arange(first, high + step / 1e6, step)])
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(title, low, high, [low + step * number for number in range(round((high - low) / step) + 1)])


def _round_step(step: float) -> float:
    """Find a round number that is no smaller."""
    scale = 10.0 ** math.floor(math.log10(step))
    return next(scale * each for each in _STEPS if scale * each >= step * (1 - 1e-9))


def draw(chart: Chart) -> Markup:
    """Draw it."""
    parts = [_frame(chart)]
    parts += [_mark_of(chart, mark) for mark in chart.marks]
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _number(_WIDTH), _number(_HEIGHT), chart.said, Markup("").join(parts)
    )


def _across(chart: Chart, value: float) -> float:
    """Find the place of a value from the left, inside the frame."""
    return _LEFT + min(max(chart.x.place(value), -0.05), 1.05) * (_WIDTH - _LEFT - _RIGHT)


def _down(chart: Chart, value: float) -> float:
    """Find the place of a value from above, inside the frame."""
    return _HEIGHT - _BOTTOM - min(max(chart.y.place(value), -0.05), 1.05) * (_HEIGHT - _TOP - _BOTTOM)


def _frame(chart: Chart) -> Markup:
    """Draw axes, ticks and titles."""
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [Markup('<path class="axis" d="M{} {}H{}"/>').format(_number(_LEFT), _number(floor), _number(right))]
    for tick, words in zip(chart.y.ticks, tick_texts(chart.y.ticks), strict=True):
        y = _down(chart, tick)
        parts.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(_number(_LEFT), _number(y), _number(right)))
        parts.append(_text_at(_LEFT - 7, y + 3.5, words, "tick end"))
    for tick, words in zip(chart.x.ticks, tick_texts(chart.x.ticks), strict=True):
        parts.append(_text_at(_across(chart, tick), floor + 15, words, "tick middle"))
    parts.append(_text_at((_LEFT + right) / 2, _HEIGHT - 6, chart.x.title, "title middle"))
    middle = (_TOP + floor) / 2
    parts.append(
        Markup('<text class="title middle" transform="translate(10 {}) rotate(-90)">{}</text>').format(
            _number(middle), chart.y.title
        )
    )
    return Markup("").join(parts)


def _mark_of(chart: Chart, mark: ChartMark) -> Markup:
    """Draw one mark."""
    if isinstance(mark, Line):
        return _line_of(chart, mark)
    if isinstance(mark, Band):
        upper = [(x, y) for x, y in zip(mark.x, mark.high, strict=True)]
        lower = [(x, y) for x, y in zip(mark.x, mark.low, strict=True)]
        outline = [*upper, *reversed(lower)]
        return Markup('<path class="band {}" d="{}Z"/>').format(mark.style, path_of(chart, outline))
    if isinstance(mark, Bar):
        left, right = _across(chart, mark.low), _across(chart, mark.high)
        top, floor = _down(chart, mark.top), _down(chart, mark.floor)
        return Markup('<rect class="bar {}" x="{}" y="{}" width="{}" height="{}"/>').format(
            mark.style, _number(left), _number(top), _number(max(0.0, right - left)), _number(max(0.0, floor - top))
        )
    if isinstance(mark, Rule):
        x = _across(chart, mark.x)
        line = Markup('<path class="rule {}" d="M{} {}V{}"/>').format(
            mark.style, _number(x), _number(_TOP), _number(_HEIGHT - _BOTTOM)
        )
        place = chart.x.place(mark.x)
        anchor = "tick end" if place > 0.8 else "tick" if place < 0.2 else "tick middle"
        return line + _text_at(x, _TOP - 4, mark.text, anchor)  # above the frame, where no line is
    dot = Markup('<circle class="dot {}" cx="{}" cy="{}" r="{}"/>').format(
        mark.style, _number(_across(chart, mark.x)), _number(_down(chart, mark.y)), _number(mark.radius)
    )
    above = _down(chart, mark.y) - mark.radius - 4
    return dot + _text_at(_across(chart, mark.x), above, mark.text, "tick middle")


def _line_of(chart: Chart, line: Line) -> Markup:
    """Draw a line; one of a single point is a dot."""
    if len(line.points) == 1:
        return _mark_of(chart, Dot(line.style, *line.points[0]))
    points = list(line.points)
    if line.steps:
        points = [
            points[0],
            *(corner for a, b in itertools.pairwise(points) for corner in ((a[0], b[1]), b)),
        ]
    return Markup('<path class="line {}" d="{}"/>').format(line.style, path_of(chart, points))


def thinned(places: Sequence[Point]) -> list[Point]:
    """Leave out what no screen shows; the ends stay, and so do steep steps between many points."""
    kept = list(places[:1])
    for x, y in places[1:-1]:
        if max(abs(x - kept[-1][0]), abs(y - kept[-1][1])) >= _CLOSE:
            kept.append((x, y))
    return [*kept, *places[1:][-1:]]


def path_of(chart: Chart, points: Sequence[Point]) -> str:
    """Write a path."""
    places = thinned([(_across(chart, x), _down(chart, y)) for x, y in points])
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in places)


def _text_at(x: float, y: float, text: str, style: str) -> Markup:
    """Write a text; nothing where there is none."""
    if not text:
        return Markup("")
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(style, _number(x), _number(y), text)


def _number(value: float) -> str:
    """Write a place: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


def whisker_scale() -> Markup:
    """Draw what stands above whiskers."""
    ends = ((10, "0"), (80, "chance"), (150, "1"))
    texts = [Markup('<text x="{}" y="12" text-anchor="middle">{}</text>').format(x, text) for x, text in ends]
    return Markup(
        '<svg class="whisker scale" viewBox="0 0 160 16" role="img" aria-label="from 0 to 1">{}</svg>'
    ).format(Markup("").join(texts))


def whisker(value: float | None, low: float | None, high: float | None, said: str) -> Markup:
    """Draw a value from 0 to 1 with its interval, for a cell of a table; the line in the middle is chance."""
    if value is None:
        return Markup("")
    parts = [Markup('<path class="grid" d="M10 12H150"/><path class="chance" d="M80 3V21"/>')]
    if low is not None and high is not None:
        parts.append(
            Markup('<path class="span" d="M{} 12H{}"/>').format(_number(10 + 140 * low), _number(10 + 140 * high))
        )
    parts.append(Markup('<circle class="dot model" cx="{}" cy="12" r="4.5"/>').format(_number(10 + 140 * value)))
    return Markup('<svg class="whisker" viewBox="0 0 160 24" role="img" aria-label="{}">{}</svg>').format(
        escape(said), Markup("").join(parts)
    )
