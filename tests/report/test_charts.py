"""Axes, marks and the little charts of tables."""

import re
from html.parser import HTMLParser

import pytest

from tapfm.report.charts import (
    Axis,
    Band,
    Bar,
    Chart,
    Dot,
    Line,
    Rule,
    axis_of,
    draw,
    path_of,
    share_axis,
    thinned,
    whisker,
)


@pytest.mark.parametrize(
    ("values", "whole", "ends", "ticks"),
    [
        ([0.652, 0.732], False, (0.64, 0.74), [0.64, 0.66, 0.68, 0.7, 0.72, 0.74]),
        ([-2.2, 7.9], False, (-5, 10), [-5, 0, 5, 10]),
        ([0.5], False, (0.45, 0.55), [0.45, 0.475, 0.5, 0.525, 0.55]),
        ([0.0, 0.0], False, (-0.1, 0.1), [-0.1, -0.05, 0, 0.05, 0.1]),
        ([1, 20], True, (1, 20), [5, 10, 15, 20]),
        ([1, 2], True, (1, 2), [1, 2]),
        ([3], True, (2.5, 3.5), [3]),
    ],
)
def test_an_axis_holds_its_values_between_round_numbers(values, whole, ends, ticks):
    axis = axis_of("x", values, whole=whole)
    assert (axis.low, axis.high) == pytest.approx(ends)
    assert list(axis.ticks) == pytest.approx(ticks)


def test_ticks_have_the_digits_they_need():
    chart = draw(Chart("", Axis("", -0.5, 0.5, (-0.5, 0, 0.5)), Axis("", 0, 1000, (0, 1000))))
    assert re.findall(r'<text class="tick \w+"[^>]*>([^<]*)<', chart) == ["0", "1,000", "−0.5", "0.0", "0.5"]


def test_places_are_those_of_the_values():
    chart = Chart("c", share_axis("x"), share_axis("y"), [Line("model", [(0, 0), (1, 1)])])
    path = re.search(r'class="line model" d="M(\S+) (\S+)L(\S+) (\S+)"', draw(chart))
    assert [float(each) for each in path.groups()] == [50, 188, 268, 16]


def test_steps_turn_at_right_angles():
    chart = Chart("c", share_axis("x"), share_axis("y"), [Line("model", [(0, 1), (1, 0)], steps=True)])
    path = re.search(r'class="line model" d="M(\S+) (\S+)L(\S+) (\S+)L(\S+) (\S+)"', draw(chart))
    x0, y0, x1, y1, x2, y2 = (float(each) for each in path.groups())
    assert (x0, y1) == (x1, y2)
    assert x2 > x0
    assert y2 > y0


def test_every_mark_is_drawn_and_names_are_escaped():
    marks = [
        Band("model", [0, 1], [0, 0.5], [0.5, 1]),
        Bar("positive", 0.1, 0.2, 0.5),
        Rule("kept", 0.5, "<here>"),
        Dot("model", 0.5, 0.5, text="&"),
        Line("model", [(0.2, 0.2)]),
    ]
    svg = draw(Chart('a "chart" <b>', share_axis("<x>"), share_axis("y"), marks))
    assert svg.count("<circle") == 2  # a line of a single point is a dot
    assert 'aria-label="a &#34;chart&#34; &lt;b&gt;"' in svg
    assert "&lt;here&gt;" in svg
    assert "&lt;x&gt;" in svg
    HTMLParser().feed(svg)


def test_long_lines_keep_their_ends_and_leave_out_what_nobody_sees():
    points = [(i / 100, i / 100) for i in range(10_000)]
    assert len(thinned(points)) < 250
    assert thinned(points)[0] == points[0]
    assert thinned(points)[-1] == points[-1]
    assert thinned(points[:1]) == points[:1]


def test_steps_between_thousands_of_points_are_drawn_where_they_are():
    # fifty positives come first: a curve of precision has all of its shape in one point of a hundred
    points = [(i / 50, 1.0) for i in range(51)] + [(1.0, 50 / (50 + i)) for i in range(1, 5000)]
    chart = Chart("c", share_axis("x"), share_axis("y"))
    places = [tuple(map(float, place.split())) for place in path_of(chart, points)[1:].split("L")]
    assert len(places) < 500
    assert min(abs(x - 268) + abs(y - 16) for x, y in places) < 1  # the corner


def test_a_whisker_without_interval_is_a_dot_and_without_value_nothing():
    assert "span" in whisker(0.5, 0.2, 0.9, "AUC")
    assert "span" not in whisker(0.5, None, None, "AUC")
    assert whisker(None, None, None, "AUC") == ""
