"""Layers: colours of values, and ticks of the colour bar."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapfm.prediction.layers import (
    _PERCENTILE_UNIT as PERCENTILE_UNIT,
)
from tapfm.prediction.layers import (
    _SEQUENTIAL as SEQUENTIAL,
)
from tapfm.prediction.layers import (
    UNITS,
    ColourScale,
    Layer,
    layer_values,
    list_layers,
    main_layers,
    palette,
    percentiles,
)
from tapfm.prediction.layers import (
    _slug as slug,
)


def test_contributions_always_have_a_scale_centred_at_zero():
    for values in ([-1.0, 3.0], [2.0, 3.0], [-3.0, -2.0], [0.0, 0.0]):
        _, scale = layer_values(np.array(values), "contribution")
        assert scale.diverging
        assert scale.low == -scale.high
        assert scale.unit == UNITS["contribution"]
        assert np.ptp(scale.colours(np.zeros(1))) <= 4  # grey


def test_outliers_do_not_use_up_the_colour_scale():
    values = np.concatenate([np.linspace(0, 1, 999), [1000.0]])
    _, scale = layer_values(values, "attention")
    assert scale.high < 1.01
    np.testing.assert_array_equal(scale.colours(np.array([1000.0])), [SEQUENTIAL[-1]])


@pytest.mark.parametrize("values", [[], [0.25], [0.25, 0.25], [0.0]])
def test_no_tiles_and_equal_tiles_have_a_scale(values):
    for kind in UNITS:
        shown, scale = layer_values(np.array(values), kind)
        assert scale.low < scale.high
        assert scale.colours(shown).shape == (len(values), 3)
        shown, scale = layer_values(np.array(values), kind, percentile=True)
        assert (scale.low, scale.high, scale.unit) == (0, 100, PERCENTILE_UNIT)
        assert (shown == 50).all()


def test_percentiles_of_equal_values_are_equal():
    np.testing.assert_allclose(percentiles(np.array([5.0, 1.0, 5.0, 9.0])), [50, 12.5, 50, 87.5])


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6))
def test_ticks_are_round_and_on_the_bar(low, span):
    scale = ColourScale(low, low + span, "x")
    if not scale.high - scale.low > abs(low) * 1e-6:
        return  # below floating-point resolution
    ticks = np.array(scale.ticks())
    assert 4 <= len(ticks) <= 9
    slack = span * 1e-6
    assert ((ticks >= scale.low - slack) & (ticks <= scale.high + slack)).all()
    step = ticks[1] - ticks[0]
    digits = step / 10 ** np.floor(np.log10(step * (1 + 1e-6)))
    assert min(abs(digits - each) for each in (1, 2, 2.5, 5)) < 1e-3


def test_palettes_are_smooth():
    for diverging in (False, True):
        colours = palette(diverging=diverging).astype(int)
        assert colours.shape == (256, 3)
        assert np.abs(np.diff(colours, axis=0)).max() <= 4


def test_layers_are_sorted_by_informativeness():
    columns = ("attention", "weight", "contribution.B", "contribution.A")
    layers = list_layers(columns, ["A", "B"])
    assert [each.column for each in layers] == ["contribution.A", "contribution.B", "weight", "attention"]
    assert main_layers(layers) == layers[:2]
    assert main_layers(list_layers(("attention", "score"), ["A"])) == [Layer("score", "score")]
    assert main_layers([]) == []


def test_titles_and_file_names_name_the_target():
    layer = Layer("contribution.PD-L1 / TPS", "contribution", "PD-L1 / TPS")
    assert layer.title.endswith("PD-L1 / TPS")
    assert layer.file_name == "contribution-PD-L1_TPS"
    assert slug("../..") == "target"
